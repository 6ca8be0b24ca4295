// Server-sent events over a POST, which EventSource cannot send.

import { keyHeaders } from "./key.js";

/** What ended a request before its stream did, or instead of it. */
export class StreamProblem extends Error {
  constructor(message, { code = null, param = null, retryAfter = null } = {}) {
    super(message);
    this.code = code;
    this.param = param;
    this.retryAfter = retryAfter;
  }
}

/** Yield `{ event, data }` until the stream ends; data is parsed JSON. */
export async function* events(address, body, signal) {
  const response = await asked(address, body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const lines = new Lines();
  try {
    for (;;) {
      const { done, value } = await read(reader, signal);
      if (done) return;
      for (const line of lines.add(value)) {
        const found = lines.event(line);
        if (found) yield found;
      }
    }
  } finally {
    // Closing the connection aborts the request at its worker.
    reader.cancel().catch(() => {});
  }
}

async function asked(address, body, signal) {
  let response;
  try {
    response = await fetch(address, {
      method: "POST",
      headers: { "Content-Type": "application/json", Accept: "text/event-stream", ...keyHeaders() },
      body: JSON.stringify(body),
      signal,
    });
  } catch (error) {
    if (signal.aborted) throw error;
    throw new StreamProblem("The gateway does not answer. Is it running?", { code: "unreachable" });
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function read(reader, signal) {
  try {
    return await reader.read();
  } catch (error) {
    if (signal.aborted) throw error;
    throw new StreamProblem("The connection to the gateway broke.", { code: "disconnected" });
  }
}

async function refusal(response) {
  const answer = await response.json().catch(() => null);
  const { message, code, param } = answer?.error ?? {};
  const retryAfter = Number(response.headers.get("Retry-After")) || null;
  return new StreamProblem(message ?? `The gateway answered with status ${response.status}.`, { code, param, retryAfter });
}

/** Cuts text into lines, and collects lines into events. */
class Lines {
  #rest = "";
  #name = "message";
  #data = [];

  add(text) {
    // A carriage return at the very end may be half of a line end, so it waits for what follows.
    const lines = (this.#rest + text).split(/\r\n|\n|\r(?!$)/);
    this.#rest = lines.pop();
    return lines;
  }

  event(line) {
    if (line === "") return this.#take();
    const [, field, value] = /^([^:]*):? ?(.*)$/s.exec(line);
    if (field === "event") this.#name = value;
    else if (field === "data") this.#data.push(value);
    return null;
  }

  #take() {
    const [event, data] = [this.#name, this.#data.join("\n")];
    [this.#name, this.#data] = ["message", []];
    if (data === "") return null;
    try {
      return { event, data: JSON.parse(data) };
    } catch {
      throw new StreamProblem("The gateway sent an event that is not JSON.", { code: "bad_event" });
    }
  }
}
