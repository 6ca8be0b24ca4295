// Formats numbers and texts for the whole page.

const UNSEEN = new Map([[" ", "␣"], ["\n", "↵"], ["\r", "␍"], ["\t", "⇥"], ["\u00a0", "⍽"]]);
const THIN = "\u202f";
const whole = new Intl.NumberFormat("en-GB");

/** The lower edges of the probability classes p0, p1, ...; one more class is below the last edge. */
const EDGES = [0.9, 0.7, 0.5, 0.3, 0.1, 0.01];

export function probabilityClass(logprob) {
  if (logprob === null || logprob === undefined) return "unscored";
  const probability = Math.exp(logprob);
  const found = EDGES.findIndex((edge) => probability >= edge);
  return `p${found < 0 ? EDGES.length : found}`;
}

export function percent(probability) {
  if (!Number.isFinite(probability)) return "–";
  const share = probability * 100;
  if (share > 0 && share < 0.01) return `<${THIN}0.01${THIN}%`;
  if (share < 100 && share >= 99.95) return `>${THIN}99.9${THIN}%`;
  const digits = share >= 10 || share === 0 ? 1 : 2;
  return `${share.toFixed(share === 100 ? 0 : digits)}${THIN}%`;
}

export const count = (number) => (Number.isFinite(number) ? whole.format(number) : "–");

export function decimal(number, digits = 2) {
  if (!Number.isFinite(number)) return "–";
  return number.toFixed(digits).replace("-", "−");
}

export function seconds(number) {
  if (!Number.isFinite(number)) return "–";
  return number < 1 ? `${Math.round(number * 1000)}${THIN}ms` : `${number.toFixed(1)}${THIN}s`;
}

export const plural = (number, one) => `${count(number)} ${one}${number === 1 ? "" : "s"}`;

/** Return a token's text with visible spaces, line ends and control characters. */
export function visible(text) {
  if (text === "") return "∅";
  return Array.from(text, (letter) => UNSEEN.get(letter) ?? escaped(letter)).join("");
}

/** Whether a text is invisible, like a part of a character; spaces and line ends take room. */
export const isUnseen = (text) => /^[\p{Cc}\p{Cf}]*$/u.test(text) && !/[\n\t]/.test(text);

/** Whether a text turns the writing direction of the text after it. */
export const isTurning = (text) => /[\u202a-\u202e\u2066-\u2069]/.test(text);

function escaped(letter) {
  // Escape format characters too, because some of them change the writing direction.
  return /[\p{Cc}\p{Cf}]/u.test(letter) ? `\\u{${letter.codePointAt(0).toString(16)}}` : letter;
}
