// The text for screen readers, in phrases, because single tokens are impossible to follow.

const PHRASE = /[.!?;:\n]\s*$/;
const LONGEST = 160;
const KEPT = 6;
/** Milliseconds between two phrases: a fast model would queue hundreds of them. */
const PAUSE = 1500;

export class Spoken {
  #log;
  #phrase = "";
  #saidAt = -Infinity;

  constructor(log) {
    this.#log = log;
  }

  clear() {
    this.#phrase = "";
    this.#saidAt = -Infinity;
    this.#log.replaceChildren();
  }

  add(text) {
    this.#phrase += text;
    if (performance.now() - this.#saidAt < PAUSE) return;
    if (PHRASE.test(this.#phrase) || this.#phrase.length > LONGEST) this.#say();
  }

  /** Say the rest, and how the request ended. */
  end(how) {
    this.#say();
    this.#phrase = how;
    this.#say();
  }

  #say() {
    const phrase = this.#phrase.trim();
    this.#phrase = "";
    if (!phrase) return;
    const line = document.createElement("p");
    line.textContent = phrase;
    this.#saidAt = performance.now();
    this.#log.append(line);
    while (this.#log.childElementCount > KEPT) this.#log.firstElementChild.remove();
  }
}
