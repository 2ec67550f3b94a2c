/* The Markdown that models write, as elements: made by createElement and text alone, so an answer cannot become a script. */

import { copyButton, el } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,}) *([\w+#.-]*)[^`]*$/;
const HEADING = /^(#{1,6}) +(.*?)#*$/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)]) +/;
const QUOTE = /^ {0,3}> ?/;
const DASHES = /^ *\|? *:?-+:? *(\| *:?-+:? *)*\|? *$/; // below the head of a table
// lengths are bounded, so that what never closes costs little
const INLINE = new RegExp(
  [
    /(?<!`)(?<tick>`+)(?!`)(?<code>.{1,999}?)(?<!`)\k<tick>(?!`)/,
    /(?<strong>\*\*|__)(?=\S)(?<bold>.{1,999}?)(?<=\S)\k<strong>/,
    /(?<em>\*|(?<!\w)_)(?=[^\s*_])(?<slant>[^*_]{1,999}?)(?<=\S)\k<em>(?!\w)/,
    /~~(?<gone>[^~]{1,999})~~/,
    /\[(?<label>[^[\]]{1,300})\]\((?<href>https?:\/\/[^\s()]{1,999})\)/,
    /(?<url>https?:\/\/[^\s<>()"'`]{1,999}[^\s<>()"'`.,:;!?])/,
    /\\(?<plain>[\\`*_{}[\]()#+.!~|>-])/,
  ].map((pattern) => pattern.source).join("|"),
  "gs",
);

/** Bring `root` up to `text`. A block that stayed the same keeps its element, so a stream redraws only what grows. */
export function render(root, text) {
  const found = blocks(text.split("\n"));
  found.forEach((block, i) => {
    const old = root.children[i], source = `${block.kind}\n${block.lines.join("\n")}`;
    if (old?.source === source) return;
    const made = MAKE[block.kind](block.lines, block);
    made.source = source;
    if (old) old.replaceWith(made);
    else root.append(made);
  });
  while (root.children.length > found.length) root.lastElementChild.remove();
  return root;
}

function blocks(lines) {
  const found = [];
  let at = 0;
  const take = (kind, goes) => {
    const block = { kind, lines: [lines[at++]] };
    while (at < lines.length && goes(lines[at])) block.lines.push(lines[at++]);
    found.push(block);
    return block;
  };
  while (at < lines.length) {
    const line = lines[at], kind = kindOf(line, lines[at + 1]), fence = FENCE.exec(line);
    if (kind === "blank") at += 1;
    else if (kind === "code") {
      const closes = (next) => next.trim().startsWith(fence[1]) && !next.trim().replaceAll(fence[1][0], "");
      take(kind, (next) => !closes(next)).language = fence[2];
      at += 1;
    } else if (kind === "list") {
      const first = ITEM.exec(line), other = (next) => {
        const item = ITEM.exec(next);
        return item && item[1].length <= first[1].length + 1 && numbered(item[2]) !== numbered(first[2]); // another list
      };
      const goes = (next) => kindOf(next) === "list" || /^ /.test(next) || (!next.trim() && /^( {2,}\S|\d|[-*+] )/.test(lines[at + 1] ?? ""));
      take(kind, (next) => goes(next) && !other(next));
    } else if (kind === "quote") take(kind, (next) => QUOTE.test(next));
    else if (kind === "table") take(kind, (next) => next.includes("|"));
    else if (kind === "text") take(kind, (next) => kindOf(next, lines[at + 1]) === "text");
    else take(kind, () => false);
  }
  return found;
}

const numbered = (mark) => /\d/.test(mark);

function kindOf(line, next) {
  if (!line.trim()) return "blank";
  if (FENCE.test(line)) return "code";
  if (HEADING.test(line)) return "heading";
  if (RULE.test(line)) return "rule";
  if (ITEM.test(line)) return "list";
  if (QUOTE.test(line)) return "quote";
  return line.includes("|") && next?.includes("|") && DASHES.test(next) ? "table" : "text";
}

const MAKE = {
  text: (lines) => inline(el("p"), lines.join("\n")),
  rule: () => el("hr"),
  quote: (lines) => render(el("blockquote"), lines.map((line) => line.replace(QUOTE, "")).join("\n")),
  heading([line]) {
    const [, marks, text] = HEADING.exec(line);
    return inline(el(`h${Math.min(marks.length + 2, 6)}`), text); // h1 is the page's, h2 its parts'
  },
  code([, ...lines], { language }) {
    const text = lines.join("\n"), name = language || "code";
    const head = el("figcaption", {}, name, copyButton(() => text, name));
    return el("figure", { class: "code" }, head, el("pre", { tabindex: 0, role: "group", "aria-label": name }, el("code", {}, text)));
  },
  list(lines) {
    const [, indent, mark] = ITEM.exec(lines[0]), items = [];
    for (const line of lines) {
      const item = ITEM.exec(line);
      if (item && item[1].length <= indent.length + 1) items.push({ cut: item[0].length, lines: [line.slice(item[0].length)] });
      else items.at(-1).lines.push(line.replace(new RegExp(`^ {0,${items.at(-1).cut}}`), ""));
    }
    const start = parseInt(mark, 10);
    const list = el(numbered(mark) ? "ol" : "ul", start > 1 || start === 0 ? { start } : {});
    for (const item of items) {
      const made = render(el("li"), item.lines.join("\n"));
      if (made.firstElementChild?.tagName === "P") made.firstElementChild.replaceWith(...made.firstElementChild.childNodes); // tight
      list.append(made);
    }
    return list;
  },
  table([head, , ...rows]) {
    const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|");
    const row = (line, tag) => el("tr", {}, ...cells(line).map((cell) => inline(el(tag), cell.trim())));
    const table = el("table", {}, el("thead", {}, row(head, "th")), el("tbody", {}, ...rows.map((line) => row(line, "td"))));
    return el("div", { class: "wide", tabindex: 0, role: "group", "aria-label": "table" }, table);
  },
};

/** `text` with emphasis, code and links, appended to `root`. */
function inline(root, text) {
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    const { code, bold, slant, gone, label, href, url, plain } = match.groups;
    root.append(text.slice(at, match.index));
    at = match.index + match[0].length;
    if (code !== undefined) root.append(el("code", {}, code.length > 2 ? code.replace(/^ (.*) $/s, "$1") : code));
    else if (bold) root.append(inline(el("strong"), bold));
    else if (slant) root.append(inline(el("em"), slant));
    else if (gone) root.append(inline(el("del"), gone));
    else if (plain) root.append(plain);
    else root.append(el("a", { href: href ?? url, target: "_blank", rel: "noopener noreferrer" }, label ?? url));
  }
  root.append(text.slice(at));
  return root;
}
