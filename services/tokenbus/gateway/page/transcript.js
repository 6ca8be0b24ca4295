// The tokens of one request, and the draft proposals for each position.

export class Transcript {
  tokens = [];
  steps = 0;
  drafted = 0;
  accepted = 0;
  #proposals = new Map();
  #logprobSum = 0;
  #scored = 0;

  /** Add a row; return its tokens, and by head whether its draft was accepted. */
  add(row) {
    this.steps += 1;
    const drafts = row.draft ?? [];
    this.#remember(row, drafts);
    const tokens = row.tokens.map((token, place) => ({
      ...token,
      index: this.tokens.length + place,
      position: row.position + place,
      step: row.step,
      worker: row.worker,
      epoch: row.epoch,
      origin: origin(drafts[place]),
    }));
    for (const token of tokens) this.tokens.push(token);
    for (const { logprob } of tokens) this.#count(logprob);
    const heads = outcomes(row, drafts);
    this.drafted += heads.length;
    this.accepted += heads.filter(Boolean).length;
    return { tokens, heads };
  }

  /** Return the proposals for a position, the latest step first. */
  proposals(position) {
    return this.#proposals.get(position) ?? [];
  }

  /** The number of equally likely choices that the average token stands for. */
  get perplexity() {
    return this.#scored ? Math.exp(-this.#logprobSum / this.#scored) : null;
  }

  #count(logprob) {
    if (logprob === null || logprob === undefined) return;
    this.#logprobSum += logprob;
    this.#scored += 1;
  }

  #remember(row, drafts) {
    drafts.forEach((draft, place) => {
      const position = row.position + place;
      const outcome = draft.accepted ? "accepted" : place < row.tokens.length ? "rejected" : "dropped";
      const known = this.#proposals.get(position) ?? [];
      known.unshift({ ...draft, outcome, head: place + 1, step: row.step });
      this.#proposals.set(position, known);
    });
  }
}

function origin(draft) {
  if (!draft) return "own";
  return draft.accepted ? "accepted" : "corrected";
}

/** By head, whether its draft was accepted; without drafts the counts tell: the last token is the target's. */
function outcomes(row, drafts) {
  if (drafts.length) return drafts.map((draft) => draft.accepted);
  if (!row.tokens.length) return [];
  return Array.from({ length: row.verified ?? 0 }, (_, head) => head < row.tokens.length - 1);
}
