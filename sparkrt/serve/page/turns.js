/* Messages as one sees them. A message is what is kept and sent; `turn` makes its element, whose `update` follows the message and
`spoken` is the text that a screen reader is given. */

import { copyButton, el } from "./dom.js";
import { render } from "./markdown.js";

/** The element of `message`. `actions`: `edit(text)`, `regenerate()`, `retry()`. */
export function turn(message, actions) {
  return { user: asked, assistant: answered, tool: returned }[message.role](message, actions);
}

/** Who reads with the ears goes from turn to turn by their headings. */
const heading = (text) => el("h2", { class: "unseen" }, text);

function asked(message, actions) {
  const text = el("p", { class: "bubble" }, message.content);
  const edit = el("button", { type: "button", class: "quiet", "aria-label": "Edit your message", click: () => begin() }, "Edit");
  const foot = el("footer", {}, edit, copyButton(() => message.content, "your message"));
  const root = el("article", { class: "turn user", "aria-label": "You" }, heading("You"), text, foot);

  function begin() {
    const area = el("textarea", { rows: 3, "aria-label": "Your message" });
    const end = () => (form.replaceWith(text, foot), edit.focus());
    const submit = (event) => (event.preventDefault(), area.value.trim() ? actions.edit(area.value.trim()) : end());
    const keydown = (event) => {
      if (event.key === "Escape") end();
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
    };
    const cancel = el("button", { type: "button", click: end }, "Cancel");
    const form = el("form", { class: "edit", submit, keydown }, area, el("div", {}, cancel, el("button", { class: "main" }, "Send")));
    area.value = message.content;
    foot.remove();
    text.replaceWith(form);
    area.focus();
  }
  return root;
}

function returned(message) {
  const head = el("summary", {}, "Result of ", el("code", {}, message.name));
  const body = el("pre", { tabindex: 0, role: "group", "aria-label": "result" }, message.content);
  return el("article", { class: "turn tool", "aria-label": `Result of ${message.name}` }, heading("Result"), el("details", {}, head, body));
}

function answered(message, actions) {
  const summary = el("summary"), thoughts = el("div", { class: "thoughts" });
  const thinking = el("details", { class: "thinking", hidden: true }, summary, thoughts);
  const text = el("div", { class: "prose" }), calls = el("div", { class: "calls" }), trouble = el("div");
  const stats = el("span", { class: "stats" });
  const again = el("button", { type: "button", class: "quiet", "aria-label": "Answer anew", click: actions.regenerate }, "Regenerate");
  const copy = copyButton(() => message.content, "the answer"), foot = el("footer", {}, again, copy, stats);
  const root = el("article", { class: "turn assistant", "aria-label": "Answer" }, heading("Answer"), thinking, text, calls, trouble, foot);

  root.update = () => {
    const busy = message.state === "running", empty = !message.content && !message.reasoning && !message.calls.length;
    root.classList.toggle("running", busy);
    root.classList.toggle("empty", busy && empty);
    root.setAttribute("aria-busy", busy);
    thinking.hidden = !message.reasoning;
    const done = !busy || message.content || message.calls.length;
    summary.textContent = !done ? "Thinking…" : message.thought ? `Thought for ${seconds(message.thought)}` : "Thoughts";
    thinking.classList.toggle("alive", !done);
    thoughts.textContent = message.reasoning;
    render(text, message.content);
    calls.replaceChildren(...message.calls.map(called));
    trouble.replaceChildren(...(message.error ? [failed(message.error, actions)] : []));
    foot.hidden = busy || (empty && Boolean(message.error)); // then there is a button that says so better
    copy.hidden = !message.content;
    stats.textContent = facts(message).join(" · ");
  };
  root.spoken = () => [text, calls].map((part) => part.innerText).join("\n").trim();
  root.update();
  return root;
}

function called({ name, arguments: given }) {
  let rows;
  try {
    rows = Object.entries(JSON.parse(given)).map(([key, value]) => [key, typeof value === "string" ? value : JSON.stringify(value)]);
  } catch {
    rows = [["", given]]; // not complete yet, or never
  }
  const list = el("dl", {}, ...rows.flatMap(([key, value]) => [el("dt", {}, key), el("dd", {}, value)]));
  return el("section", { class: "call", "aria-label": `Call of ${name}` }, el("h3", {}, "Calls ", el("code", {}, name)), list);
}

function failed({ message, detail }, actions) {
  const retry = el("button", { type: "button", click: actions.retry }, "Try again");
  return el("div", { class: "error", role: "alert" }, el("p", {}, el("strong", {}, message), ` ${detail}`), retry);
}

/** What there is to say of an answer: how it ended if not by itself, its tokens, their rate, and how long the first one took. */
export function facts({ state, reason, tokens, rate, first }) {
  const said = [];
  if (state === "stopped") said.push("stopped");
  if (reason === "length") said.push("cut at the token limit");
  if (tokens) said.push(`${tokens} token${tokens === 1 ? "" : "s"}`);
  if (rate) said.push(`${rate.toFixed(rate < 10 ? 1 : 0)} tokens/s`);
  if (first) said.push(`first after ${seconds(first)}`);
  return said;
}

const seconds = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);
