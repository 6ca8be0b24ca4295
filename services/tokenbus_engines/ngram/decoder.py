"""NgramDecoder: computes steps by looking things up in the model's tables."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tokenbus_contracts import RowStatus, SpeculativeMethod
from tokenbus_engines.admission import EngineOptions
from tokenbus_engines.engine import Block, Outcome, Proposed, Scores
from tokenbus_engines.ngram.model import ABSENT, WIDTH, Model, default_model
from tokenbus_engines.ngram.tokenizer import default_tokenizer
from tokenbus_engines.requests import Request, Requests
from tokenbus_engines.sampling import (
    DRAFT,
    Distribution,
    Drafts,
    Ids,
    SamplingParams,
    distribution,
    drawn,
    mixed,
    verified,
)
from tokenbus_engines.scheduler import Plan

SALT = 2**63 - 1
"""Seeds are often small numbers. A counter that is small too would cancel them out."""


class Drafted(NamedTuple):
    """What the draft proposed, a line for each row."""

    tokens: Ids
    contexts: Ids
    """The target's context before each token, and one more: that after the last."""
    own_places: Ids
    """The place of each token in the draft's context."""
    drafts: Drafts
    """The same for `verified`, in places of the target's context."""


class Emitted(NamedTuple):
    """The tokens that were accepted and the one after them, a line for each row."""

    tokens: Ids
    places: Ids
    """The place of each token in its context."""
    counts: Ids
    """How many tokens of each line there are."""
    after: Ids
    """The context that each row is in now."""


class NgramRequests(Requests):
    """The requests, with the model's context of each."""

    def __init__(self, proposals: int) -> None:
        """Keep at most so many proposals of each request."""
        super().__init__()
        self._model = default_model()
        self.contexts = np.zeros(0, np.int64)
        self.proposals = np.zeros((0, proposals), np.int64)
        """What a prefill engine's draft proposed and was not verified yet; absent where there is none."""

    def params(self, slots: Ids) -> SamplingParams:
        """Return how the tokens of requests are chosen."""
        params = super().params(slots)
        return params._replace(seeds=mixed(params.seeds), salt=SALT)

    def _write(self, slot: int, request: Request) -> None:
        count = self.proposals.shape[1]
        self.contexts[slot] = self._model.contexts.of(request.prompt + request.output)
        self.proposals[slot] = (request.proposals + [ABSENT] * count)[:count]


@dataclass(slots=True, kw_only=True, eq=False)
class NgramBlock(Block):
    """What a step computed, with the model's contexts and places."""

    drafted: Drafted
    emitted: Emitted


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
            # Verifying needs the draft's probability of a token, and the draft has one for these alone.
            if model.places(model.drafts[at], np.array([token]))[0] >= WIDTH:
                raise ValueError(f"state.proposals[{place}]: a token that the draft proposes there, got {token}")
            at = model.contexts.after(at, np.array([token]))

    def compute(self, plan: Plan) -> NgramBlock:
        """Let the draft propose and the target verify; a first token is the target's alone."""
        requests, model, decoding = self.requests, self._model, plan.decode.size
        slots = np.concatenate([plan.decode, plan.first])
        params, positions, contexts = requests.params(slots), requests.positions[slots], requests.contexts[slots]
        most = self._speculate if decoding else 0
        drafted = propose(model, contexts, params, positions, requests.proposals[slots, :most])
        drafted.drafts.counts[decoding:] = 0
        emitted = verify(model, drafted, params, positions)
        return NgramBlock(
            slots=slots,
            tokens=emitted.tokens,
            counts=emitted.counts,
            drafts=drafted.tokens[:decoding],
            draft_counts=drafted.drafts.counts[:decoding],
            drafted=drafted,
            emitted=emitted,
        )

    def propose(self, block: NgramBlock, result: Outcome) -> Proposed | None:
        """Draft what follows for requests that are handed off; others are drafted for in the next step."""
        if not self._hands_off:
            return None
        rows = (result.statuses == RowStatus.ACTIVE).nonzero()[0]
        slots = block.slots[rows]
        positions = self.requests.positions[slots] + result.kept[rows]
        given = np.full((rows.size, self._speculate), ABSENT)
        counts = np.zeros(block.slots.size, np.int64)
        tokens = np.zeros((block.slots.size, self._speculate), np.int64)
        counts[rows] = self._speculate
        tokens[rows] = propose(
            self._model, block.emitted.after[rows], self.requests.params(slots), positions, given
        ).tokens
        return Proposed(counts, tokens)

    def scores(self, block: NgramBlock, rows: Ids, counts: Ids, top_k: int, *, are_drafts: bool) -> Scores:
        """Look the scores up: what is behind a context's line has one logprob and one rank."""
        model, contexts, places = self._model, block.drafted.contexts, block.emitted.places
        if are_drafts:
            contexts, places = model.drafts[contexts[:, :-1]], block.drafted.own_places
        mask = np.arange(places.shape[1]) < counts[:, None]
        contexts, columns = contexts[rows][mask], np.minimum(places[rows][mask], WIDTH)
        return Scores(
            model.logits[contexts, columns],
            model.ranks[contexts, columns],
            model.ids[contexts, :top_k],
            model.logits[contexts, :top_k],
        )

    def carried(self, block: NgramBlock, row: int) -> bytes:
        """Return nothing: a context follows from the tokens."""
        del block, row
        return b""

    def advance(self, block: NgramBlock, result: Outcome) -> None:
        """Keep the contexts that requests are in now."""
        del result
        self.requests.contexts[block.slots] = block.emitted.after
        self.requests.proposals[block.slots] = ABSENT


def propose(model: Model, contexts: Ids, params: SamplingParams, positions: Ids, given: Ids) -> Drafted:
    """Let the draft propose as many tokens as `given` has columns; a given token replaces the draft's own."""
    rows, count = given.shape
    tokens, own_places, columns = (np.zeros((rows, count), np.int64) for _ in range(3))
    before = np.empty((rows, count + 1), np.int64)
    chances = np.empty((rows, count, WIDTH + 1))
    before[:, 0] = contexts
    begins, has_given = np.arange(rows)[:, None] * (WIDTH + 1), (given != ABSENT).any()
    numbers, is_plain = params.uniforms(positions[:, None] + np.arange(count), DRAFT), params.are_plain
    for turn in range(count):
        at = before[:, turn]
        drafts = model.drafts[at]
        if is_plain:
            mine = model.offered.take(drafts, 0)
        else:
            mine = distribution(model.logits.take(drafts, 0), params, model.sizes).chances
            mine[:, WIDTH] = 0  # the draft proposes no token of its tail
            mine /= mine.sum(axis=1, keepdims=True)
        places = drawn(mine, numbers[:, turn])
        if has_given:
            has = (given[:, turn] != ABSENT).nonzero()[0]
            places[has] = model.places(drafts[has], given[has, turn])
        own_places[:, turn] = places
        chances[:, turn] = mine.take(model.places_in_draft.take(at, 0) + begins)
        tokens[:, turn] = model.ids[drafts, places]
        there = model.draft_places[at, places].astype(np.int64)
        columns[:, turn] = np.minimum(there, WIDTH)
        before[:, turn + 1] = model.after(at, there, tokens[:, turn])
    return Drafted(tokens, before, own_places, Drafts(columns, chances, np.full(rows, count)))


def verify(model: Model, drafted: Drafted, params: SamplingParams, positions: Ids) -> Emitted:
    """Accept drafts as the target allows, and draw one token more."""
    contexts = drafted.contexts
    if params.are_plain:
        chances = model.chances.take(contexts, 0)
        target = Distribution(chances, np.broadcast_to(model.sizes, chances.shape))
    else:
        target = distribution(model.logits.take(contexts, 0), params, model.sizes)
    found = verified(target, drafted.drafts, params, positions, model.sizes)
    every, last = np.arange(len(contexts)), found.counts - 1
    places = found.columns
    places[every, last] += found.within
    tokens = model.tokens(contexts.ravel(), places.ravel()).reshape(places.shape)
    after = model.after(contexts[every, last], places[every, last], tokens[every, last])
    return Emitted(tokens, places, found.counts, after)
