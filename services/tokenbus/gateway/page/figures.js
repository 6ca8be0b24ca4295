// The request's figures: the number of tokens, the rate and the probabilities.

import { described, eachFrame } from "./dom.js";
import { count, decimal, percent, plural, seconds } from "./format.js";

/** Milliseconds over which the rate is measured while tokens come; afterwards it is that of the whole request. */
const WINDOW = 2000;

export class Figures {
  #list;
  #origin;
  #transcript = null;
  #begin = null;
  #began = 0;
  #first = null;
  #end = null;
  #marks = [];
  #draw = eachFrame(() => this.#render(), 125);

  constructor(list, origin) {
    this.#list = list;
    this.#origin = origin;
  }

  start(transcript, now) {
    this.#transcript = transcript;
    this.#begin = null;
    this.#began = now;
    this.#first = this.#end = null;
    this.#marks = [];
    this.#draw();
  }

  /** Handle the stream's begin event. */
  opened(begin) {
    this.#begin = begin;
    this.#draw();
  }

  arrived(now) {
    const total = this.#transcript.tokens.length;
    if (total) this.#first ??= now;
    this.#marks.push([now, total]);
    while (this.#marks[0][0] < now - WINDOW) this.#marks.shift();
    this.#draw();
  }

  stop(now) {
    this.#end = now;
    this.#draw();
  }

  #rate() {
    const total = this.#transcript.tokens.length;
    if (this.#first === null) return null;
    if (this.#end !== null) return total / Math.max((this.#end - this.#began) / 1000, 0.001);
    const [then, before] = this.#marks[0];
    const [now, after] = this.#marks.at(-1);
    return now > then ? (after - before) / ((now - then) / 1000) : null;
  }

  #render() {
    const { tokens, steps, drafted, accepted, perplexity } = this.#transcript;
    this.#list.replaceChildren(
      ...described([
        ["tokens", count(tokens.length)],
        ["tokens/s", count(Math.round(this.#rate() ?? NaN))],
        ["first token", this.#first === null ? "–" : seconds((this.#first - this.#began) / 1000)],
        ["tokens a step", steps ? decimal(tokens.length / steps) : "–"],
        ["drafts accepted", drafted ? percent(accepted / drafted) : "–"],
        ["perplexity", decimal(perplexity ?? NaN)],
      ]),
    );
    this.#origin.textContent = this.#begin ? summary(this.#begin) : "";
  }
}

function summary({ request, model, prompt_tokens: prompt }) {
  return [model, plural(prompt, "prompt token"), `request ${request}`].filter(Boolean).join(" · ");
}
