// The page: the form, the current request and the selected token.

import { Bus } from "./bus.js";
import { AcceptanceChart } from "./chart.js";
import { Figures } from "./figures.js";
import { plural } from "./format.js";
import { keepKey } from "./key.js";
import { Panel } from "./panel.js";
import { Spoken } from "./spoken.js";
import { StreamProblem, events } from "./stream.js";
import { TokenText } from "./tokens.js";
import { Transcript } from "./transcript.js";

const $ = (id) => document.getElementById(id);
const [form, box, problem] = [$("ask"), $("tokens"), $("problem")];

const figures = new Figures($("figures"), $("origin"));
const chart = new AcceptanceChart($("chart"));
const spoken = new Spoken($("spoken"));
const text = new TokenText(box, choose);
const panel = new Panel($("panel"), { move: (by) => pinned && text.look(pinned.index + by), close });
let transcript = new Transcript();
let running = null;
/** The token that stays selected when the pointer leaves. */
let pinned = null;

/** Show a token; how is "first", "hover", "pin" or "leave". */
function choose(token, how) {
  if (how === "pin" || how === "first") pinned = token;
  const shown = how === "leave" ? pinned : token;
  text.mark(shown);
  if (shown) panel.show(shown, transcript.proposals(shown.position));
  else panel.hide();
  // On a phone the panel is below the text, so scroll to the panel.
  if (how === "pin" && shown) $("panel").scrollIntoView({ block: "nearest" });
}

/** Disable the box of a value that no connected engine computes, and say why beside it. */
function offer(scores) {
  const box = form.elements.return_entropies;
  box.disabled = !scores.has("entropies");
  $("no-entropies").hidden = !box.disabled;
}

function close() {
  const was = pinned;
  choose(null, "pin");
  // Return the keyboard focus to the token, but leave a mouse user's focus unchanged.
  if (was && $("panel").matches(":focus-within")) box.focus({ preventScroll: true });
}

function request() {
  const fields = new FormData(form);
  const number = (name) => Number(fields.get(name));
  const seed = fields.get("seed");
  return {
    prompt: fields.get("prompt"),
    max_tokens: number("max_tokens"),
    temperature: number("temperature"),
    top_p: number("top_p"),
    top_logprobs: number("top_logprobs"),
    seed: seed === "" ? null : Number(seed),
    stop: [],
    drafts: true,
    return_entropies: fields.has("return_entropies"),
  };
}

function begin() {
  transcript = new Transcript();
  pinned = null;
  panel.hide();
  text.clear();
  chart.clear();
  spoken.clear();
  problem.hidden = true;
  problem.replaceChildren();
  figures.start(transcript, performance.now());
  setState("streaming");
  // On a phone the form fills the window, so scroll to the tokens.
  if (box.getBoundingClientRect().top > innerHeight - 160) $("output").scrollIntoView({ block: "start" });
}

async function run() {
  running?.abort();
  const ours = (running = new AbortController());
  begin();
  try {
    const ending = await follow(ours);
    if (running === ours) finish(ending);
  } catch (error) {
    if (running === ours) ours.signal.aborted ? finish({ reason: "aborted" }) : fail(error);
  }
}

/** Handle events until one ends the request; a stream that stops without one has failed. */
async function follow({ signal }) {
  for await (const { event, data } of events("inspect", request(), signal)) {
    if (signal.aborted) break;
    if (event === "begin") figures.opened(data);
    else if (event === "row") take(data);
    else if (event === "end") return data;
    else if (event === "error") throw new StreamProblem(data.message, { code: data.code });
  }
  signal.throwIfAborted();
  throw new StreamProblem("The stream stopped without saying how the request ended.", { code: "cut_off" });
}

function take(row) {
  const { tokens, heads } = transcript.add(row);
  text.add(tokens);
  if (tokens[0]?.index === 0) choose(tokens[0], "first");
  chart.add(heads);
  spoken.add(tokens.map((token) => token.text).join(""));
  figures.arrived(performance.now());
}

function finish({ reason }) {
  const words = { stop: "The model ended its text", length: "Max tokens reached", aborted: "Stopped" };
  end(reason === "aborted" ? "stopped" : "done", `${words[reason] ?? reason}: ${plural(transcript.tokens.length, "token")}.`);
}

const TITLES = {
  worker_lost: "The worker was lost",
  gap: "Tokens were lost",
  no_worker: "No worker is available",
  overloaded: "The system is overloaded",
  missing_api_key: "An API key is needed",
  invalid_api_key: "The API key is not known",
  rate_limit_exceeded: "The key's limit is reached",
  concurrency_limit_exceeded: "The key's limit is reached",
  unreachable: "No answer",
  disconnected: "Connection lost",
  cut_off: "Connection lost",
};

function fail(error) {
  if (!(error instanceof StreamProblem)) console.error(error);
  const came = transcript.tokens.length;
  const kept = came ? `${plural(came, "token")} came before that, and ${came === 1 ? "is" : "are"} kept below.` : "No token came.";
  const again = error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
  const title = document.createElement("strong");
  title.textContent = TITLES[error.code] ?? "The request failed";
  const detail = document.createElement("p");
  detail.textContent = `${sentence(error.message)} ${kept}${again}`;
  problem.replaceChildren(title, detail);
  problem.hidden = false;
  form.elements[error.param]?.focus?.();
  end("failed", "");
}

/** Return a message as a sentence; a name at its beginning, of a field or a worker, keeps its letters. */
function sentence(words) {
  const begun = /^[a-z]+ /.test(words) ? words[0].toUpperCase() + words.slice(1) : words;
  return /[.!?]$/.test(begun) ? begun : `${begun}.`;
}

function end(state, words) {
  running = null;
  figures.stop(performance.now());
  spoken.end(words);
  $("ending").textContent = words;
  setState(state);
}

function setState(state) {
  const isStreaming = state === "streaming";
  document.body.dataset.state = state;
  box.setAttribute("aria-busy", isStreaming);
  // Do not disable the button, because a disabled button loses the keyboard focus.
  if (!isStreaming && document.activeElement === $("stop")) $("run").focus();
  $("stop").disabled = !isStreaming;
  if (isStreaming) $("ending").textContent = "";
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !event.repeat) form.requestSubmit();
});
// Send one request for a double click, because a second request would abort the first.
$("run").addEventListener("click", (event) => event.detail > 1 && event.preventDefault());
$("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") close();
});
for (const choice of document.getElementsByName("view")) {
  choice.addEventListener("change", () => (box.dataset.view = choice.value));
}
addEventListener("pagehide", () => running?.abort());

keepKey($("key"));
new Bus($("bus"), $("pulse"), offer).watch();
