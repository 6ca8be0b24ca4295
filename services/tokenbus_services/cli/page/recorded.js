// The page of `tokenbus inspect --html`: the tokens of one recording, or of two beside each other.

import { described, element } from "./dom.js";
import { count, decimal, plural, probabilityClass } from "./format.js";
import { Panel } from "./panel.js";
import { TokenText } from "./tokens.js";

const $ = (id) => document.getElementById(id);
const { files, summary, requests, faults, shown, has_texts: hasTexts } = JSON.parse($("recorded").textContent);
const all = requests.flatMap((request) => request.values);
const isComparison = requests.some((request) => "max_difference" in request);

/** The class below each upper edge; the last class is for what is above all of them. */
const below = (edges, classes) => (value) => {
  const found = edges.findIndex((edge) => value <= edge);
  return classes[found < 0 ? edges.length : found];
};
const ofDifference = below([0.01, 0.1, 0.5], ["p0", "p2", "p4", "p5"]);
const ofEntropy = below([0.1, 0.5, 1, 2, 4], ["p0", "p1", "p2", "p3", "p4", "p5"]);

const VIEWS = {
  Difference: {
    isThere: isComparison,
    legend: [["p0", "≤ 0.01"], ["p2", "≤ 0.1"], ["p4", "≤ 0.5"], ["p5", "> 0.5"], ["p6", "another token"], ["", "not compared"]],
    colour: (token) => (token.id !== token.other_token_id ? "p6" : token.difference === null ? "unscored" : ofDifference(Math.abs(token.difference))),
  },
  Probability: {
    isThere: true,
    legend: [["p0", "≥ 90 %"], ["p1", "70"], ["p2", "50"], ["p3", "30"], ["p4", "10"], ["p5", "1"], ["p6", "< 1 %"]],
    colour: (token) => probabilityClass(token.logprob),
  },
  Entropy: {
    isThere: all.some((token) => "entropy" in token),
    legend: [["p0", "≤ 0.1 nats"], ["p1", "0.5"], ["p2", "1"], ["p3", "2"], ["p4", "4"], ["p5", "> 4"], ["", "not known"]],
    colour: (token) => (token.entropy === undefined ? "unscored" : ofEntropy(token.entropy)),
  },
};

const texts = [];
/** The token that stays when the pointer leaves, and the text that it is of. */
let pinned = null;
const panel = new Panel($("panel"), { move: (by) => pinned && pinned.text.look(pinned.token.index + by), close });

function choose(text, token, how) {
  const chosen = token && { text, token };
  if (how === "pin") pinned = chosen;
  const looked = how === "leave" ? pinned : chosen;
  for (const each of texts) each.mark(looked?.text === each ? looked.token : null);
  if (looked) panel.show(looked.token, null);
  else panel.hide();
}

function close() {
  choose(null, null, "pin");
}

function drawn(request) {
  const box = element("div", { class: hasTexts ? "tokens" : "tokens ids", tabindex: 0, role: "group", "aria-label": `Tokens of request ${request.request_id}. Arrow keys move between them.` });
  const text = new TokenText(box, (token, how) => choose(text, token, how));
  const tokens = request.values.map((value, index) => ({
    ...value,
    id: value.token_id,
    index,
    origin: "own",
  }));
  texts.push(text);
  $("requests").append(element("h3", {}, `Request ${request.request_id}`), element("dl", { class: "figures" }, ...figures(request)), box);
  return (colour) => {
    text.clear();
    text.add(tokens.map((token) => ({ ...token, colour: colour(token) })));
  };
}

function figures(values) {
  const known = Object.entries(values).filter(([name, value]) => typeof value === "number" && name !== "request_id");
  return described(known.map(([name, value]) => [name.replaceAll("_", " "), Number.isInteger(value) ? count(value) : decimal(value, 4)]));
}

function view(draws, { legend, colour }) {
  close();
  $("legend").replaceChildren(...legend.map(([kind, text]) => element("li", { class: kind }, text)));
  for (const draw of draws) draw(colour);
}

$("summary-title").textContent = files.join(" · ");
$("summary").replaceChildren(...figures(summary));
$("shown").textContent =
  `${plural(shown.requests, "request")} of ${count(shown.of_requests)} and ${plural(shown.tokens, "token")} of ${count(shown.of_tokens)} are on this page, ` +
  `which has at most ${plural(shown.most_requests, "request")} and ${plural(shown.most_tokens, "token")}.`;
$("problem").hidden = !faults.length;
$("problem").textContent = faults.join(" ");

const draws = requests.map(drawn);
const there = Object.entries(VIEWS).filter(([, { isThere }]) => isThere);
there.forEach(([name, each], place) => {
  const choice = element("input", { type: "radio", name: "view", value: name, checked: !place });
  choice.addEventListener("change", () => view(draws, each));
  $("views").append(element("label", {}, choice, element("span", {}, name)));
});
view(draws, there[0][1]);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") close();
});
