// The text, with an element for each token. New elements are added once per frame.

import { eachFrame, element } from "./dom.js";
import { isTurning, isUnseen, percent, probabilityClass, visible } from "./format.js";

export class TokenText {
  #box;
  #choose;
  #waiting = [];
  #tokens = [];
  #nodes = [];
  #chosen = null;
  #marked = null;
  #line = null;
  #draw = eachFrame(() => this.#flush());

  /** `choose(token, how)` is called with the selected token; how is "hover", "pin" or "leave". */
  constructor(box, choose) {
    this.#box = box;
    this.#choose = choose;
    // All tokens share one listener of each kind.
    box.addEventListener("pointerover", (event) => {
      if (event.pointerType !== "touch") this.#select(event.target, "hover");
    });
    box.addEventListener("pointerleave", () => choose(null, "leave"));
    box.addEventListener("click", (event) => this.#select(event.target, "pin"));
    box.addEventListener("keydown", (event) => this.#key(event));
  }

  clear() {
    this.#waiting = [];
    this.#tokens = [];
    this.#nodes = [];
    this.mark(null);
    this.#line = null;
    this.#box.replaceChildren();
  }

  add(tokens) {
    for (const token of tokens) this.#waiting.push(token);
    this.#draw();
  }

  /** Mark one token as selected; null: none. */
  mark(token) {
    this.#chosen = token;
    this.#marked?.classList.remove("marked");
    this.#marked = token ? this.#nodes[token.index] : null;
    this.#marked?.classList.add("marked"); // a token without an element is marked later
  }

  /** Select a token by keyboard: it gets the focus, and a name for screen readers. */
  focus(index) {
    const node = this.#nodes[index];
    if (!node) return;
    const token = this.#tokens[index];
    node.tabIndex = -1;
    node.setAttribute("role", "button");
    node.setAttribute("aria-label", spoken(token));
    node.focus({ preventScroll: true });
    this.look(index);
  }

  /** Select a token without moving the focus. */
  look(index) {
    const node = this.#nodes[index];
    if (!node) return;
    node.scrollIntoView({ block: "nearest" });
    this.#choose(this.#tokens[index], "pin");
  }

  #flush() {
    if (!this.#waiting.length) return;
    const box = this.#box;
    const isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 24;
    for (const token of this.#waiting) {
      const node = drawn(token);
      this.#nodes.push(node);
      this.#tokens.push(token);
      this.#line ??= box.appendChild(element("div"));
      this.#line.append(node);
      // The browser lays out each line separately, which keeps long texts fast.
      if (token.text.endsWith("\n")) this.#line = null;
    }
    this.#waiting = [];
    if (!this.#marked) this.mark(this.#chosen);
    if (isAtEnd) box.scrollTop = box.scrollHeight;
  }

  #select(target, how) {
    const node = target.closest("[data-i]");
    if (node) this.#choose(this.#tokens[Number(node.dataset.i)], how);
  }

  #key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey || !this.#nodes.length) return;
    const focused = document.activeElement?.dataset.i;
    const at = focused === undefined ? null : Number(focused);
    const to = this.#destination(event.key, at);
    if (to === null) return;
    event.preventDefault();
    this.focus(Math.min(Math.max(to, 0), this.#nodes.length - 1));
  }

  #destination(key, at) {
    const start = this.#marked ? Number(this.#marked.dataset.i) : 0;
    if (key === "Home") return 0;
    if (key === "End") return this.#nodes.length - 1;
    if (!["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Enter", " "].includes(key)) return null;
    if (at === null) return start;
    if (key === "ArrowRight") return at + 1;
    if (key === "ArrowLeft") return at - 1;
    return key === "ArrowUp" ? this.#lineAway(at, -1) : key === "ArrowDown" ? this.#lineAway(at, 1) : at;
  }

  /** Return the nearest token in the next line, up or down. */
  #lineAway(at, way) {
    const here = this.#nodes[at].getBoundingClientRect();
    let best = at;
    let nearest = Infinity;
    let line = null;
    for (let index = at + way; index >= 0 && index < this.#nodes.length; index += way) {
      const there = this.#nodes[index].getBoundingClientRect();
      if (Math.abs(there.top - here.top) < here.height / 2) continue;
      line ??= there.top;
      if (Math.abs(there.top - line) > there.height / 2) break;
      const distance = Math.abs(there.left - here.left);
      if (distance < nearest) [best, nearest] = [index, distance];
    }
    return best;
  }
}

function drawn(token) {
  const classes = ["t", probabilityClass(token.logprob), token.origin];
  if (isUnseen(token.text)) classes.push("empty");
  if (isTurning(token.text)) classes.push("turning");
  return element("span", { class: classes.join(" "), "data-i": token.index }, ...withLineEnds(token.text));
}

/** A line's end is invisible, so a mark stands before it, which is not copied with the text. */
function withLineEnds(text) {
  if (!text.includes("\n")) return [text];
  return text.split("\n").flatMap((line, place) => (place ? [element("i", { class: "break" }), `\n${line}`] : [line]));
}

function spoken(token) {
  const text = token.name ?? (token.text.trim() || visible(token.text));
  if (token.logprob === null || token.logprob === undefined) return text;
  return `${text}, ${percent(Math.exp(token.logprob))}, rank ${token.rank}`;
}
