// The chart of accepted draft tokens over the steps of a request, with a line for each head.

import { eachFrame, element, shape } from "./dom.js";
import { count, percent } from "./format.js";

const WIDTH = 320;
const HEIGHT = 132;
const PLOT = { left: 40, right: 12, top: 8, bottom: 22 };
const MOST_POINTS = 120;
/** Steps in a rate: enough for a calm line, few enough to show a change. */
const WINDOW = 24;

export class AcceptanceChart {
  #box;
  #heads = [];
  #steps = 0;
  #draw = eachFrame(() => this.#render(), 250);

  constructor(box) {
    this.#box = box;
    this.clear();
  }

  clear() {
    this.#heads = [];
    this.#steps = 0;
    this.#draw();
  }

  /** Add a step: whether each head's draft was accepted; empty without drafts. */
  add(outcomes) {
    this.#steps += 1;
    outcomes.forEach((isAccepted, head) => {
      this.#heads[head] ??= new Head();
      this.#heads[head].add(this.#steps, isAccepted);
    });
    this.#draw();
  }

  #render() {
    if (!this.#heads.length) {
      this.#box.replaceChildren(element("p", { class: "blank" }, "No drafts yet. Each head that proposes tokens gets a line here."));
      return;
    }
    const heads = this.#heads.map((head, index) => ({ head, index }));
    const lines = heads.map(({ head, index }) => line(head.points, index, this.#steps));
    const drawing = shape(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": this.#told() },
      ...grid(this.#steps),
      ...lines,
    );
    const legend = heads.map(({ head, index }) =>
      element("li", { class: `h${index % 5}` }, swatch(index), ` head ${index + 1} `, element("b", {}, percent(head.rate))),
    );
    this.#box.replaceChildren(drawing, element("ul", { class: "heads" }, ...legend));
  }

  #told() {
    const rates = this.#heads.map((head, index) => `head ${index + 1} ${percent(head.rate)}`);
    return `Accepted drafts over ${count(this.#steps)} steps: ${rates.join(", ")}`;
  }
}

/** One head's drafts: the rate over all of them, and points of the rate over the last few. */
class Head {
  points = [];
  #last = [];
  #seen = 0;
  #accepted = 0;

  add(step, isAccepted) {
    this.#seen += 1;
    this.#accepted += Number(isAccepted);
    this.#last.push(Number(isAccepted));
    if (this.#last.length > WINDOW) this.#last.shift();
    this.points.push([step, this.#last.reduce((sum, each) => sum + each, 0) / this.#last.length]);
  }

  get rate() {
    return this.#accepted / this.#seen;
  }
}

const across = (step, steps) => PLOT.left + ((step - 1) / Math.max(steps - 1, 1)) * (WIDTH - PLOT.left - PLOT.right);
const down = (rate) => PLOT.top + (1 - rate) * (HEIGHT - PLOT.top - PLOT.bottom);

function line(points, index, steps) {
  const every = Math.ceil(points.length / MOST_POINTS);
  const kept = points.filter((_, place) => place % every === 0 || place === points.length - 1);
  const places = kept.map(([step, rate]) => `${across(step, steps).toFixed(1)},${down(rate).toFixed(1)}`);
  return shape("polyline", { class: `h${index % 5}`, points: places.join(" ") });
}

function grid(steps) {
  const right = WIDTH - PLOT.right;
  const rules = [0, 0.5, 1].flatMap((rate) => [
    shape("line", { class: "rule", x1: PLOT.left, x2: right, y1: down(rate), y2: down(rate) }),
    shape("text", { x: PLOT.left - 6, y: down(rate) + 3, "text-anchor": "end" }, `${rate * 100} %`),
  ]);
  const below = HEIGHT - 6;
  return [
    ...rules,
    shape("text", { x: PLOT.left, y: below }, "step 1"),
    shape("text", { x: right, y: below, "text-anchor": "end" }, count(steps)),
  ];
}

function swatch(index) {
  return shape("svg", { class: "swatch", viewBox: "0 0 22 6", "aria-hidden": "true" }, shape("polyline", { class: `h${index % 5}`, points: "0,3 22,3" }));
}
