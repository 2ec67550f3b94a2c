/* The server: its key, its errors in people's words, its streams. */

import { $ } from "./dom.js";

const KEY = "sparkrt.key"; // in sessionStorage: gone with the tab

/** What went wrong, to be shown: `message` for everybody, `detail` as the server put it; `status` 0 where nothing answered. */
export class Failure extends Error {
  constructor(status, detail = "") {
    super(WORDS[status] ?? (status >= 500 ? "The server failed." : "The server refused this request."));
    Object.assign(this, { status, detail });
  }
}

const WORDS = {
  0: "The server cannot be reached.",
  401: "The server wants an API key.",
  429: "Too many requests at the moment.",
  503: "The server is busy, or about to stop.",
};

/** A response with status 200. Throws Failure. Whoever may be asked for the key is (`ask`), once for all that wait for it. */
export async function call(path, { ask = true, ...options } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY), headers = { "content-type": "application/json" };
    if (key) headers.authorization = `Bearer ${key}`;
    let response;
    try {
      response = await fetch(path, { ...options, headers, cache: "no-store" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Failure(0);
    }
    if (response.ok) return response;
    if (response.status !== 401 || !ask) throw new Failure(response.status, await reason(response));
    if (key === sessionStorage.getItem(KEY) && !(await askKey(Boolean(key)))) throw new Failure(401);
  }
}

async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `HTTP ${response.status}`;
  }
}

let asking;

function askKey(wrong) {
  const dialog = $("key");
  $("key-why").textContent = wrong ? "This key was not accepted." : "This server answers to those who bring a key.";
  asking ??= new Promise((resolve) => {
    dialog.returnValue = "";
    dialog.onclose = () => {
      const value = $("key-value").value.trim(), given = dialog.returnValue === "use" && value !== "";
      if (given) sessionStorage.setItem(KEY, value);
      $("key-value").value = "";
      asking = undefined;
      resolve(given);
    };
    dialog.showModal();
  });
  return asking;
}

/** The chunks of a streamed answer. Throws Failure for an error among them, and if they break off. */
export async function* chunks(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Failure(0, "The connection broke off in the middle of the answer.");
    }
    if (part.done) throw new Failure(0, "The connection broke off in the middle of the answer.");
    const events = (text + part.value).split("\n\n");
    text = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Failure(chunk.error.code >= 400 ? chunk.error.code : 500, chunk.error.message);
      yield chunk;
    }
  }
}
