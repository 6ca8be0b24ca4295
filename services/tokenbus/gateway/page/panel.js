// The panel with all details of the selected token.

import { described, element } from "./dom.js";
import { count, decimal, percent, plural, visible } from "./format.js";

const OUTCOMES = {
  accepted: "accepted",
  rejected: "rejected",
  dropped: "dropped after a rejected one",
};

export class Panel {
  #panel;
  #actions;
  #hint;

  /** `actions` has the actions of the panel's buttons: move(by) and close(). */
  constructor(panel, actions) {
    this.#panel = panel;
    this.#actions = actions;
    this.#hint = [...panel.children];
  }

  show(token, proposals) {
    const held = this.#panel.contains(document.activeElement) ? document.activeElement.dataset.do : null;
    this.#panel.replaceChildren(this.#head(token), figures(token), alternatives(token), history(token, proposals));
    this.#panel.dataset.open = "true";
    // The buttons are new elements, so restore the focus for a user who presses a button repeatedly.
    if (held) this.#panel.querySelector(`[data-do="${held}"]`)?.focus();
  }

  hide() {
    this.#panel.replaceChildren(...this.#hint);
    this.#panel.dataset.open = "false";
  }

  #head(token) {
    const button = (what, label, sign, act) => {
      const made = element("button", { type: "button", class: "icon", "data-do": what, "aria-label": label, title: label }, sign);
      made.addEventListener("click", act);
      return made;
    };
    return element(
      "div",
      { class: "panel-head" },
      element("h2", {}, element("bdi", { class: "piece" }, visible(token.name ?? token.text))),
      button("back", "Token before", "‹", () => this.#actions.move(-1)),
      button("on", "Token after", "›", () => this.#actions.move(1)),
      button("close", "Close", "×", () => this.#actions.close()),
    );
  }
}

function figures(token) {
  const isScored = token.logprob !== null && token.logprob !== undefined;
  const main = isScored ? percent(Math.exp(token.logprob)) : "not scored";
  return element(
    "div",
    {},
    element("p", { class: "probability" }, main, isScored ? element("span", {}, `rank ${count(token.rank)}`) : null),
    element(
      "dl",
      { class: "facts" },
      ...described([
        ["Logprob", isScored ? decimal(token.logprob, 4) : null],
        ["Entropy", Number.isFinite(token.entropy) ? decimal(token.entropy, 4) : null],
        ["Token id", String(token.id)],
        ["Completes", token.name && token.text ? visible(token.text) : null],
        ["Position", count(token.position)],
        ["Step", count(token.step)],
        ["Worker", token.worker || null],
        ["Epoch", token.epoch ? String(token.epoch) : null, "wide"],
      ]),
    ),
  );
}

function alternatives(token) {
  const listed = (token.alternatives ?? []).map(([id, text, logprob]) => ({ id, text, logprob }));
  const rest = 1 - listed.reduce((sum, { logprob }) => sum + Math.exp(logprob), 0);
  const isListed = listed.some(({ id }) => id === token.id);
  const chosen = isListed || token.logprob === null ? [] : [{ id: token.id, text: token.name ?? token.text, logprob: token.logprob }];
  if (!listed.length && !chosen.length) return element("p", { class: "note" }, "This token has no alternatives.");
  const rows = [...listed, ...chosen].map((each) => bar(each, each.id === token.id));
  // Show the other tokens only if their probability is visible after rounding.
  const others = listed.length && rest > 0.0005 ? [remainder(rest, !isListed)] : [];
  return element("section", {}, element("h3", {}, "Alternatives"), element("ol", { class: "bars" }, ...rows, ...others));
}

function bar({ id, text, logprob }, isChosen) {
  const probability = Math.exp(logprob);
  return element(
    "li",
    { class: isChosen ? "chosen" : null },
    element("bdi", { class: "piece" }, visible(text), isChosen ? element("span", { class: "hidden" }, " (chosen)") : null),
    gauge(probability),
    element("span", { class: "share" }, percent(probability)),
    element("span", { class: "id" }, element("span", { class: "hidden" }, "id "), String(id)),
  );
}

function remainder(probability, holdsChosen) {
  return element(
    "li",
    { class: "others" },
    element("span", {}, holdsChosen ? "all others, the chosen token included" : "all others"),
    gauge(probability),
    element("span", { class: "share" }, percent(probability)),
    element("span", { class: "id" }),
  );
}

function gauge(probability) {
  const fill = element("i");
  fill.style.width = `${Math.min(probability, 1) * 100}%`;
  return element("span", { class: "gauge", "aria-hidden": "true" }, fill);
}

function history(token, proposals) {
  const title = element("h3", {}, "Draft history");
  if (!proposals.length) {
    return element("section", {}, title, element("p", { class: "note" }, "No draft for this position: the target model made the token."));
  }
  const items = proposals.map((each) =>
    element(
      "li",
      { class: each.outcome },
      element("bdi", { class: "piece" }, visible(each.text)),
      element("span", { class: "outcome" }, OUTCOMES[each.outcome]),
      element("span", { class: "note" }, origin(each)),
    ),
  );
  const lead = `${plural(proposals.length, "proposal")} for position ${count(token.position)}, the latest first`;
  return element("section", {}, title, element("p", { class: "note" }, lead), element("ol", { class: "history" }, ...items));
}

function origin({ step, head, id, logprob }) {
  const probability = logprob === null || logprob === undefined ? "" : ` · ${percent(Math.exp(logprob))} by the draft`;
  return `step ${count(step)} · head ${head} · id ${id}${probability}`;
}
