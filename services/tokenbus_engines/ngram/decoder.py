"""NgramDecoder: computes steps by looking things up in the model's tables."""

from dataclasses import dataclass

import numpy as np

from tokenbus_contracts import RowStatus, SpeculativeMethod
from tokenbus_engines.admission import EngineOptions
from tokenbus_engines.engine import Block, Outcome, Proposed, Scores
from tokenbus_engines.ngram.model import ABSENT, WIDTH, Ids, default_model
from tokenbus_engines.ngram.sampling import SamplingParams
from tokenbus_engines.ngram.speculation import Drafted, Emitted, Front, propose, single, verify
from tokenbus_engines.ngram.tokenizer import default_tokenizer
from tokenbus_engines.requests import Request, Requests
from tokenbus_engines.sampling import mixed
from tokenbus_engines.scheduler import Plan

_COLDEST = 1e30
"""Above it nothing changes any more but that products overflow."""


class NgramRequests(Requests):
    """The requests, with the model's context of each."""

    def __init__(self, proposals: int) -> None:
        """Keep at most so many proposals of each request."""
        super().__init__()
        self._model = default_model()
        self.mixed_seeds = np.zeros(0, np.uint64)
        self.contexts = np.zeros(0, np.int64)
        """The model's context of each."""
        self.coldness = np.zeros(0)
        """What logprobs are multiplied by: one over the temperature."""
        self.top_k = np.zeros(0, np.int64)
        self.top_p = np.zeros(0)
        self.has_proposals = np.zeros(0, np.bool_)
        self.proposals = np.zeros((0, proposals), np.int64)
        """What another engine's draft proposed and was not verified yet."""

    def front(self, slots: Ids) -> Front:
        """Return where requests are, and how their tokens are chosen."""
        params = SamplingParams(self.coldness[slots], self.top_k[slots], self.top_p[slots])
        return Front(self.contexts[slots], self.positions[slots], self.mixed_seeds[slots], params)

    def _write(self, slot: int, request: Request) -> None:
        is_greedy, size = request.temperature == 0, self._model.vocabulary_size
        self.mixed_seeds[slot] = mixed(np.array([request.seed], np.uint64))[0]
        self.contexts[slot] = self._model.contexts.of(request.prompt + request.output)
        self.coldness[slot] = 1.0 if is_greedy else min(1 / request.temperature, _COLDEST)
        self.top_k[slot] = 1 if is_greedy else min(request.top_k or size, size)
        self.top_p[slot] = request.top_p
        self.has_proposals[slot] = bool(request.proposals)
        self.proposals[slot] = padded(request.proposals, self.proposals.shape[1])


@dataclass(slots=True, kw_only=True, eq=False)
class NgramBlock(Block):
    """What a step computed, with the model's context of each token."""

    emitted: Emitted
    drafted: Drafted | None
    """Of the slots that continue, if the draft proposed anything."""


class NgramDecoder:
    """Proposes with the model cut to short contexts, and verifies with the whole."""

    most_carried = 0

    def __init__(self, options: EngineOptions) -> None:
        """Read the model that comes with the package, once in a process."""
        self._model = default_model()
        self._speculate = options.speculate
        self._hands_off = options.role == "prefill"
        self.tokenizer = default_tokenizer()
        self.requests = NgramRequests(options.speculate)
        self.method = SpeculativeMethod.NGRAM if options.speculate else SpeculativeMethod.NONE
        self.fingerprint = self._model.fingerprint

    def read_carried(self, request: Request, carried: bytes) -> None:
        """Check what was proposed; nothing else is carried."""
        if carried:
            raise ValueError(f"state.carried: nothing, got {len(carried)} bytes")
        model = self._model
        at = np.array([model.contexts.of(request.prompt + request.output)])
        for place, token in enumerate(request.proposals):
            # The draft proposes what is in its line; of anything else it has no probability, which verifying needs.
            if model.places(model.drafts[at], np.array([token]))[0] >= WIDTH:
                raise ValueError(f"state.proposals[{place}]: a token that the draft proposes there, got {token}")
            at = model.contexts.after(at, np.array([token]))

    def compute(self, plan: Plan) -> NgramBlock:
        """Let the draft propose and the target verify; a first token is the target's alone."""
        requests, model, decode, first = self.requests, self._model, plan.decode, plan.first
        slots = np.concatenate([decode, first]) if first.size else decode
        if not (self._speculate and decode.size):
            drafted, emitted = None, single(model, requests.front(slots))
        else:
            front = requests.front(decode)
            given = None
            if requests.has_proposals[decode].any():
                given = np.where(requests.has_proposals[decode][:, None], requests.proposals[decode], ABSENT)
            drafted = propose(model, front, self._speculate, given)
            emitted = verify(model, front, drafted)
            if first.size:
                emitted = _below(emitted, single(model, requests.front(first)))
        return NgramBlock(
            slots=slots,
            tokens=emitted.tokens,
            counts=emitted.counts,
            drafts=np.zeros((decode.size, 0), np.int64) if drafted is None else drafted.tokens,
            draft_counts=np.full(decode.size, 0 if drafted is None else self._speculate),
            emitted=emitted,
            drafted=drafted,
        )

    def propose(self, block: NgramBlock, result: Outcome) -> Proposed | None:
        """Draft what follows for requests that are handed off; others are drafted for in the next step."""
        if not self._hands_off:
            return None
        rows = (result.statuses == RowStatus.ACTIVE).nonzero()[0]
        front = self.requests.front(block.slots[rows])
        front = front._replace(contexts=block.emitted.after[rows], positions=front.positions + result.kept[rows])
        counts = np.zeros(block.slots.size, np.int64)
        tokens = np.zeros((block.slots.size, self._speculate), np.int64)
        counts[rows] = self._speculate
        tokens[rows] = propose(self._model, front, self._speculate).tokens
        return Proposed(counts, tokens)

    def scores(self, block: NgramBlock, rows: Ids, counts: Ids, top_k: int, *, are_drafts: bool) -> Scores:
        """Look the scores up: what is behind a context's line has one logprob and one rank."""
        model, drafted = self._model, block.drafted
        if are_drafts and drafted is not None:
            contexts, places = model.drafts[drafted.contexts[:, :-1]], drafted.own_places
        else:
            contexts, places = block.emitted.contexts, block.emitted.places
        mask = np.arange(places.shape[1]) < counts[:, None]
        contexts, places = contexts[rows, : places.shape[1]][mask], places[rows][mask]
        near, is_in_line = np.minimum(places, WIDTH - 1), places < WIDTH
        return Scores(
            np.where(is_in_line, model.logprobs[contexts, near], model.tail_logprob),
            np.where(is_in_line, model.ranks[contexts, near], np.uint32(WIDTH + 1)),
            model.ids[contexts, :top_k],
            model.logprobs[contexts, :top_k],
        )

    def carried(self, block: NgramBlock, row: int) -> bytes:
        """Return nothing: a context follows from the tokens."""
        del block, row
        return b""

    def advance(self, block: NgramBlock, result: Outcome) -> None:
        """Keep the contexts that requests are in now."""
        del result
        self.requests.contexts[block.slots] = block.emitted.after
        self.requests.has_proposals[block.slots] = False


def padded(proposals: list[int], count: int) -> list[int]:
    """Return exactly `count` proposals; those that are missing are absent."""
    return [*proposals[:count], *[ABSENT] * (count - len(proposals))]


def _below(upper: Emitted, lower: Emitted) -> Emitted:
    """Return the rows of both; lines of one token have nothing behind it."""
    missing = upper.tokens.shape[1] - lower.tokens.shape[1]

    def _joined(above: Ids, below: Ids) -> Ids:
        return np.concatenate([above, np.pad(below, ((0, 0), (0, missing)), constant_values=-1)])

    return Emitted(
        _joined(upper.tokens, lower.tokens),
        _joined(upper.contexts, lower.contexts),
        _joined(upper.places, lower.places),
        np.concatenate([upper.counts, lower.counts]),
        np.concatenate([upper.after, lower.after]),
    )
