/* The conversation: what is kept, what is sent, and what comes back. */

import { call, chunks } from "./api.js";
import { $ } from "./dom.js";
import { startPanel } from "./panel.js";
import { turn } from "./turns.js";

const KEPT = "sparkrt.chat"; // in localStorage: {messages, settings}
const EXAMPLE_TOOL = {
  type: "function",
  function: {
    name: "FindMovies",
    description: "Find movies by title, director or genre",
    parameters: { type: "object", properties: { title: { type: "string" }, directed_by: { type: "string" }, genre: { type: "string" } } },
  },
};

const WIDE = matchMedia("(min-width: 64.01rem)"); // else settings are a drawer over the conversation

let messages = [], views = [], running = null; // the AbortController of the answer that is coming
const ask = $("ask"), log = $("log"), settings = $("settings");

function load() {
  try {
    const kept = JSON.parse(localStorage.getItem(KEPT) ?? "{}");
    messages = kept.messages ?? [];
    for (const [name, value] of Object.entries(kept.settings ?? {})) if (settings.elements[name]) settings.elements[name].value = value;
  } catch {
    messages = []; // no storage here, or not ours
  }
  for (const message of messages) if (message.state === "running") message.state = "stopped"; // the page went away meanwhile
}

function save() {
  try {
    localStorage.setItem(KEPT, JSON.stringify({ messages, settings: Object.fromEntries(new FormData(settings)) }));
  } catch {
    // full, or forbidden: the conversation lasts as long as the page
  }
}

/** The elements of the messages from `from` on, made anew. */
function show(from = 0) {
  for (const view of views.splice(from)) view.remove();
  for (const message of messages.slice(from)) {
    const at = messages.indexOf(message);
    const actions = {
      edit: (text) => (cut(at), send(text)),
      regenerate: () => (cut(at), answer()),
      retry: () => (cut(at), answer()),
    };
    views.push(turn(message, actions));
    log.append(views.at(-1));
  }
  $("empty").hidden = messages.length > 0;
  const call = openCalls()[0];
  ask.placeholder = call ? `Result of ${call.name}, to be sent back to the model` : "Ask something";
}

function cut(at) {
  stop();
  messages.length = at;
  show(at);
}

/** The calls at the end of the conversation that have no result yet. */
function openCalls() {
  const last = messages.findLast((message) => message.role === "assistant");
  if (!last || messages.at(-1).role === "user" || last.state === "running") return [];
  const known = new Set(messages.map((message) => message.tool_call_id));
  return last.calls.filter((call) => !known.has(call.id));
}

function send(text) {
  const [call] = openCalls();
  messages.push(call ? { role: "tool", tool_call_id: call.id, name: call.name, content: text } : { role: "user", content: text });
  show(messages.length - 1);
  if (openCalls().length) save();
  else answer();
}

/** The body of the request; undefined if a setting is not well formed, which is then shown. */
function body() {
  const { system, tools, temperature, top_p, top_k, max_tokens, thinking } = Object.fromEntries(new FormData(settings));
  if (!settings.reportValidity()) return openSide(true);
  const said = messages.filter((message) => message.role !== "assistant" || message.content || message.calls.length);
  const sent = said.map(({ role, content, calls, tool_call_id }) => {
    if (role === "tool") return { role, content, tool_call_id };
    const made = calls?.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
    return { role, content, ...(made?.length && { tool_calls: made }) };
  });
  const found = { messages: system.trim() ? [{ role: "system", content: system }, ...sent] : sent, stream: true };
  found.stream_options = { include_usage: true, continuous_usage_stats: true };
  for (const [name, value] of Object.entries({ temperature, top_p, top_k, max_tokens })) if (value !== "") found[name] = Number(value);
  if (thinking) found.chat_template_kwargs = { enable_thinking: thinking === "on" };
  if (tools.trim()) found.tools = JSON.parse(tools);
  return found;
}

async function answer() {
  const asked = body();
  if (!asked) return;
  const message = { role: "assistant", content: "", reasoning: "", calls: [], state: "running" }, mine = new AbortController();
  messages.push(message);
  show(messages.length - 1);
  const view = views.at(-1), clock = { begun: performance.now() };
  working((running = mine));
  let drawn = false;
  const draw = () => {
    if (drawn) return; // once a frame is enough
    drawn = true;
    requestAnimationFrame(() => {
      drawn = false;
      following(view.update);
    });
  };
  log.scrollTop = log.scrollHeight;
  try {
    const response = await call("v1/chat/completions", { method: "POST", body: JSON.stringify(asked), signal: mine.signal });
    for await (const chunk of chunks(response)) {
      take(message, chunk, clock);
      draw();
    }
    message.state = "done";
  } catch (error) {
    message.state = "stopped";
    if (error.name !== "AbortError") message.error = { message: error.message, detail: error.detail ?? String(error) };
  }
  message.calls = message.calls.filter((call) => isJson(call.arguments)); // one that was cut cannot be sent back
  if (running === mine) working((running = null));
  draw();
  if (messages.includes(message)) {
    const at = messages.indexOf(message);
    if (at === messages.length - 1) following(() => show(at));
    $("spoken").textContent = message.error ? "" : views[at].spoken(); // an error is an alert, and read out as such
    save();
  }
}

/** Change the log. Whoever is at its end stays there, whoever scrolled up goes on reading. */
function following(change) {
  const near = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  change();
  if (near) log.scrollTop = log.scrollHeight;
}

function isJson(text) {
  try {
    return JSON.parse(text) !== undefined;
  } catch {
    return false;
  }
}

/** Put what a chunk brings into `message`. */
function take(message, { choices, usage }, clock) {
  const now = performance.now(), [choice] = choices;
  const { reasoning_content: thought, content, tool_calls: calls = [] } = choice?.delta ?? {};
  if (thought || content || calls?.length) {
    clock.first ??= { at: now, tokens: usage?.completion_tokens ?? 1 };
    clock.last = now;
  }
  message.reasoning += thought ?? "";
  if (thought) message.thought = now - clock.begun;
  message.content += content ?? "";
  for (const { index, id, function: part } of calls ?? []) {
    message.calls[index] ??= { id, name: part.name, arguments: "" };
    message.calls[index].arguments += part.arguments ?? "";
  }
  message.reason = choice?.finish_reason ?? message.reason;
  if (usage && clock.first) {
    message.tokens = usage.completion_tokens;
    message.first = clock.first.at - clock.begun;
    const took = (clock.last - clock.first.at) / 1000;
    message.rate = took > 0 ? (message.tokens - clock.first.tokens) / took : undefined;
  }
}

function stop() {
  running?.abort();
  working((running = null));
}

/** Show whether an answer is coming: the button that sends stops then. */
function working(controller) {
  const focused = document.activeElement === $("send") || document.activeElement === $("stop");
  $("send").hidden = controller !== null;
  $("stop").hidden = controller === null;
  if (focused) (controller ? $("stop") : ask).focus();
  if (controller) $("spoken").textContent = "Answering";
}

function openSide(open) {
  $("side").hidden = !open;
  $("side-button").setAttribute("aria-expanded", open);
}

async function greet() {
  try {
    const { data } = await (await call("v1/models")).json();
    $("model").textContent = data[0].id;
    document.title = `${data[0].id} · sparkrt`;
  } catch {
    // the dot in the header tells
  }
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = ask.value.trim();
  if (!text || running) return;
  ask.value = "";
  send(text);
});
ask.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return; // an input method's Enter chooses a word
  event.preventDefault();
  $("form").requestSubmit();
});
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.defaultPrevented) return;
  if (running) stop();
  else if (!$("side").hidden && !WIDE.matches) $("side-close").click();
});
$("stop").addEventListener("click", stop);
$("new").addEventListener("click", () => (cut(0), save(), ask.focus()));
$("side-button").addEventListener("click", () => {
  openSide($("side").hidden);
  if (!WIDE.matches) $("side-close").focus(); // the button is below the drawer now
});
$("side-close").addEventListener("click", () => (openSide(false), $("side-button").focus()));
$("key-cancel").addEventListener("click", () => $("key").close());
$("as-new").addEventListener("click", () => (settings.reset(), settings.dispatchEvent(new Event("input"))));
settings.addEventListener("input", () => {
  let fault = "";
  try {
    const tools = settings.elements.tools.value.trim();
    if (tools && !Array.isArray(JSON.parse(tools))) fault = "Functions: expected a JSON list";
  } catch (error) {
    fault = `Functions: ${error.message}`;
  }
  settings.elements.tools.setCustomValidity(fault);
  document.documentElement.dataset.theme = settings.elements.theme.value;
  save();
});
for (const button of document.querySelectorAll("[data-ask]")) {
  button.addEventListener("click", () => {
    if ("tool" in button.dataset) settings.elements.tools.value = JSON.stringify([EXAMPLE_TOOL], null, 2);
    send(button.dataset.ask);
    ask.focus();
  });
}
addEventListener("pagehide", save);
addEventListener("back", greet);

load();
document.documentElement.dataset.theme = settings.elements.theme.value;
openSide(WIDE.matches);
show();
log.scrollTop = log.scrollHeight;
startPanel();
greet();
