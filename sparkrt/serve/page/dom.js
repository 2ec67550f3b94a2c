/* Elements from text: nothing here or anywhere on the page takes a string for markup. */

/** `<tag>` with attributes (functions become listeners, false and undefined are left out) and children, elements or text. */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export const $ = (id) => document.getElementById(id);

/** A button that puts `text()` on the clipboard and says so. */
export function copyButton(text, what) {
  const click = async () => {
    const done = await navigator.clipboard?.writeText(text()).then(() => true, () => false);
    button.textContent = done ? "Copied" : "Cannot copy here"; // a page that is not from localhost or https has no clipboard
    setTimeout(() => (button.textContent = "Copy"), 1500);
  };
  const button = el("button", { type: "button", class: "quiet", "aria-label": `Copy ${what}`, click }, "Copy");
  return button;
}
