/* What the server is doing, once a second while somebody looks. */

import { call } from "./api.js";
import { $, el } from "./dom.js";

const EVERY = 1000, AGAIN = 3000; // ms between looks, and after one that failed
const KEPT = 60; // looks in a sparkline

const whole = (n) => String(Math.round(n));
const percent = (n) => `${(100 * n).toFixed(n > 0 && n < 0.1 ? 1 : 0)} %`;
const used = (free, total) => (total ? 1 - free / total : 0);
const millis = (n) => `${n < 10 ? n.toFixed(2) : n.toFixed(0)} ms`;

// name, value of the stats now `s`, those of the last look `b` and the seconds between (undefined: as before), how it is written, top
const TILES = [
  ["Running", (s) => s.running, whole],
  ["Waiting", (s) => s.waiting, whole],
  ["Tokens/s", (s, b, dt) => (s.generation_tokens - b.generation_tokens) / dt, whole],
  ["Step time", (s, b) => (s.steps > b.steps ? (1000 * (s.step_seconds - b.step_seconds)) / (s.steps - b.steps) : undefined), millis],
  ["KV cache in use", (s) => used(s.free_blocks, s.total_blocks), percent, 1],
  ["State slots in use", (s) => used(s.free_slots, s.total_slots), percent, 1],
  ["Prefix cache hits", (s) => (s.prefix_cache_queries ? s.prefix_cache_hits / s.prefix_cache_queries : undefined), percent, 1],
  ["Snapshots in use", (s) => used(s.free_state_cache_slots, s.state_cache_slots), percent, 1],
];

export function startPanel() {
  const tiles = TILES.map(([name, value, write, top]) => {
    const line = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    line.append(document.createElementNS(line.namespaceURI, "path"));
    for (const [key, text] of Object.entries({ viewBox: `0 0 ${KEPT - 1} 20`, preserveAspectRatio: "none", "aria-hidden": "true" })) {
      line.setAttribute(key, text);
    }
    const shown = el("dd", {}, "–");
    $("live").append(el("div", { class: "tile" }, el("dt", {}, name), shown, line));
    return { value, write, top, shown, path: line.firstChild, points: [] };
  });
  let before, when, timer, looking = false;

  async function look() {
    if (document.hidden || looking) return;
    clearTimeout(timer);
    looking = true;
    let pause = EVERY;
    try {
      const info = await (await call("server_info", { ask: false })).json(), now = performance.now();
      for (const tile of before ? tiles : []) update(tile, tile.value(info.stats, before, (now - when) / 1000));
      [before, when] = [info.stats, now];
      say("up", "Ready");
    } catch (failure) {
      say(failure.status === 401 ? "wait" : "down", failure.status === 401 ? "Needs a key" : "Not reachable");
      pause = AGAIN;
    }
    looking = false;
    timer = setTimeout(look, pause);
  }
  document.addEventListener("visibilitychange", look);
  look();
}

function update({ points, shown, path, write, top }, value) {
  value ??= points.at(-1);
  if (value === undefined) return;
  points.push(value);
  if (points.length > KEPT) points.shift();
  shown.textContent = write(value);
  const most = top ?? Math.max(...points, 1e-9), from = KEPT - points.length;
  path.setAttribute("d", points.map((y, i) => `${i ? "L" : "M"}${from + i} ${(19 - 18 * (y / most)).toFixed(2)}`).join(""));
}

let last = "wait";

/** The dot in the header; its words are read out only when they change. */
function say(state, words) {
  if (state === last) return;
  if (last === "down" && state === "up") dispatchEvent(new Event("back"));
  last = state;
  $("state").className = state;
  $("state-words").textContent = words;
}
