// Server-sent events over a POST, which EventSource cannot send.

import { keyHeaders } from "./key.js";

/** The failure of a request, with the gateway's code for it. */
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
  const received = new Events();
  try {
    for (;;) {
      const { done, value } = await read(reader, signal);
      if (done) return;
      yield* received.add(value);
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

/** Collects text into the gateway's events: a line with the name, a line with the data, and an empty line. */
class Events {
  #rest = "";

  add(text) {
    const complete = (this.#rest + text).split("\n\n");
    this.#rest = complete.pop();
    return complete.map(parsed);
  }
}

function parsed(text) {
  const [, event, data] = /^event: (.*)\ndata: (.*)$/.exec(text) ?? [];
  try {
    return { event, data: JSON.parse(data) };
  } catch {
    throw new StreamProblem("The gateway sent an event that is not JSON.", { code: "bad_event" });
  }
}
