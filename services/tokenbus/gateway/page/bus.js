// The state of the bus, polled once a second: its workers, including lost workers.

import { element } from "./dom.js";
import { count, percent, plural } from "./format.js";
import { keyHeaders } from "./key.js";

const EVERY = 1000;
const PATIENCE = 5000;
const MOST_LOST = 8;

export class Bus {
  #box;
  #pulse;
  #scored;
  #seen = new Map();

  /** `scored(names)` is called with the fields of token scoring that a connected worker computes. */
  constructor(box, pulse, scored) {
    this.#box = box;
    this.#pulse = pulse;
    this.#scored = scored;
  }

  /** Poll until the page is closed; a hidden page does not poll. */
  async watch() {
    for (;;) {
      if (!document.hidden) await this.#look();
      await new Promise((resume) => setTimeout(resume, EVERY));
    }
  }

  async #look() {
    try {
      const response = await fetch("bus", { headers: keyHeaders(), signal: AbortSignal.timeout(PATIENCE) });
      const answer = await response.json();
      if (!response.ok) throw new Error(answer.error?.message ?? answer.error ?? `status ${response.status}`);
      this.#show(answer);
    } catch (error) {
      this.#fail(error.name === "Error" ? error.message : "the gateway does not answer");
    }
  }

  #show({ workers, processor, clients }) {
    const now = Date.now();
    for (const [id, known] of this.#seen) {
      if (!workers.some((worker) => worker.id === id)) known.lostAt ??= now;
    }
    for (const worker of workers) this.#seen.set(worker.id, { worker, lostAt: null });
    this.#forget();
    const connected = workers.filter((worker) => worker.connected);
    if (connected.length) this.#scored(new Set(connected.flatMap((worker) => worker.token_scores)));
    const rows = [...this.#seen.values()].sort((one, other) => one.worker.id.localeCompare(other.worker.id));
    const isSpread = new Set(workers.map((worker) => worker.processor)).size > 1;
    this.#box.replaceChildren(totals(processor, clients), element("ul", { class: "workers" }, ...rows.map((row) => card(row, now, isSpread))));
    if (!rows.length) this.#box.append(element("p", { class: "note" }, "No worker has connected yet. Start one with: tokenbus worker"));
    this.#beat(rows);
  }

  #fail(message) {
    const last = this.#box.querySelector(".workers");
    last?.classList.add("stale");
    const before = last ? [element("p", { class: "note" }, "Last known state:"), last] : [];
    this.#box.replaceChildren(element("p", { class: "note fault" }, `The bus is unavailable: ${message}`), ...before);
    this.#set("lost", "bus unreachable");
  }

  #forget() {
    const lost = [...this.#seen].filter(([, known]) => known.lostAt).sort(([, one], [, other]) => other.lostAt - one.lostAt);
    for (const [id] of lost.slice(MOST_LOST)) this.#seen.delete(id);
  }

  #beat(rows) {
    const here = rows.filter(({ worker, lostAt }) => !lostAt && worker.connected).length;
    const lost = rows.length - here;
    this.#set(lost || !here ? "lost" : "well", plural(here, "worker") + (lost ? `, ${count(lost)} lost` : ""));
  }

  #set(kind, text) {
    this.#pulse.dataset.kind = kind;
    const label = this.#pulse.querySelector("span");
    if (label.textContent !== text) label.textContent = text;
  }
}

const MEANINGS = {
  open: "open requests",
  steps: "the engines' steps since the processor started",
  tokens: "tokens that reached the processor",
  clients: "connected clients, gateways included",
  refused: "refused requests",
  lost: "messages that no replay could restore",
  lag: "messages on their way from the worker to the processor",
  retained: "messages that the worker keeps until clients acknowledge them",
  gaps: "losses of messages that cannot be replayed",
  replays: "requests to the worker to send messages again",
};

function totals(processor, clients) {
  const { open_requests: open, tokens, steps, refused, lost } = processor ?? {};
  const figures = [["open", open], ["steps", steps], ["tokens", tokens], ["clients", clients], ["refused", refused], ["lost", lost]];
  return element("dl", { class: "totals" }, ...measures(figures));
}

function card({ worker, lostAt }, now, isSpread) {
  const state = lostAt ? "lost" : !worker.connected ? "away" : worker.stalled ? "stalled" : "connected";
  const isPaused = state === "connected" && worker.paused_since;
  const pause = isPaused ? `paused by ${worker.paused_by} for ${since(now - 1000 * worker.paused_since)}` : state;
  const word = lostAt ? `lost ${since(now - lostAt)} ago` : pause;
  const figures = [["open", worker.open_requests], ["lag", worker.lag], ["retained", worker.retained], ["gaps", worker.gaps], ["replays", worker.replays], ["tokens", worker.tokens]];
  return element(
    "li",
    { class: `worker ${state}`, "data-worker": worker.id },
    element(
      "p",
      {},
      element("i", { class: "dot", "aria-hidden": "true" }),
      element("b", {}, worker.id),
      worker.role ? element("span", { class: "role" }, worker.role) : null,
      element("span", { class: "state" }, word),
    ),
    worker.model ? element("p", { class: "note" }, `${worker.model} · epoch ${worker.epoch}`) : null,
    isSpread && worker.processor ? element("p", { class: "note processor" }, `at ${worker.processor}`) : null,
    element("div", { class: "doing" }, element("dl", {}, ...measures(figures)), acceptance(worker.acceptance_by_head)),
  );
}

function measures(figures) {
  return figures
    .filter(([, value]) => value !== undefined && value !== null)
    .map(([term, value]) =>
      element(
        "div",
        { class: (term === "gaps" || term === "lost") && value > 0 ? "bad" : null, title: `${term}: ${MEANINGS[term]}` },
        element("dt", {}, term),
        element("dd", {}, count(value)),
      ),
    );
}

function acceptance(heads) {
  if (!heads?.length) return null;
  const bars = heads.map((rate) => {
    const fill = element("i");
    fill.style.height = `${Math.max(rate, 0.04) * 100}%`;
    return element("span", {}, fill);
  });
  const rates = heads.map((rate, index) => `head ${index + 1} ${percent(rate)}`).join(", ");
  return element("p", { class: "accepting", role: "img", "aria-label": `Accepted: ${rates}`, title: rates }, ...bars);
}

function since(milliseconds) {
  const passed = Math.max(1, Math.round(milliseconds / 1000));
  return passed < 120 ? `${passed} s` : `${Math.round(passed / 60)} min`;
}
