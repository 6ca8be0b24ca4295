"""PaddleDecoder: computes steps with the network: chunks of prompts, the verification of drafts, and new drafts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus_contracts import RowStatus, SpeculativeMethod
from tokenbus_engines.admission import EngineOptions
from tokenbus_engines.engine import Block, Outcome, Proposed, Scores, raise_failed
from tokenbus_engines.paddle.network import Tensor
from tokenbus_engines.paddle.runner import Lines, Piece, Runner
from tokenbus_engines.paddle.tokenizer import VOCABULARY_SIZE, ByteTokenizer
from tokenbus_engines.requests import Request, Requests
from tokenbus_engines.sampling import DRAFT, Drafts, Ids, Logits, SamplingParams, distribution, drawn, verified
from tokenbus_engines.scheduler import Plan
from tokenbus_gpu_ops import token_logprobs
from tokenbus_services.logs import logger

Further = Callable[[int, Tensor, Ids], tuple[Tensor, Logits]]
"""A draft head: takes its number, the state before it and the tokens chosen, and returns its state and its logits."""

_log = logger("worker")
_LARGEST = 65_504.0
"""No number of a sound hand-off comes near it, and none below it overflows in what is computed of it."""


class Carried(NamedTuple):
    """What a hand-off carries: the logits of its proposals, and what attention needs of its tokens."""

    draft_logits: Logits
    keys: Lines
    values: Lines


class Fronts(NamedTuple):
    """Where the heads begin to draft for each row."""

    states: Tensor
    """The network's state at the position before the last token."""
    tokens: Ids
    """The last token."""
    positions: Ids
    """The place of the next token in the row's output."""
    counts: Ids
    """How many drafts are wanted."""


class Drafted(NamedTuple):
    """What the heads drafted for each row, from the left, and the logits that it was drawn from."""

    tokens: Ids
    logits: Logits
    counts: Ids


class PaddleRequests(Requests):
    """The requests, with their tokens and what was drafted to follow."""

    def __init__(self, heads: int, most_carried: int) -> None:
        """Keep at most so many drafts of each, and carried keys and values of so many requests."""
        super().__init__()
        self._most_carried = most_carried
        self.texts: dict[int, list[int]] = {}
        """By slot: prompt and output."""
        self.carried: dict[int, Carried] = {}
        """By slot: keys and values that are not in the cache yet."""
        self.draft_counts = np.zeros(0, np.int64)
        self.drafts = np.zeros((0, heads), np.int64)
        self.draft_logits = np.zeros((0, heads, VOCABULARY_SIZE), np.float32)

    def remove(self, slots: Ids) -> None:
        """Forget requests."""
        super().remove(slots)
        for slot in slots.tolist():
            del self.texts[slot]
            self.carried.pop(slot, None)

    def _write(self, slot: int, request: Request) -> None:
        # The last token that can be is never a draft's successor, so it needs none.
        count = min(len(request.proposals), request.most - len(request.output) - 1)
        self.draft_counts[slot] = count
        if request.carried is not None:
            self.drafts[slot, :count] = request.proposals[:count]
            self.draft_logits[slot, :count] = request.carried.draft_logits[:count]
            # Memory is bounded: keys and values of what does not fit are computed again.
            if len(self.carried) < self._most_carried:
                self.carried[slot] = request.carried
            else:
                self.missing[slot] = len(request.prompt) + len(request.output) - 1
        self.texts[slot] = request.prompt + request.output


@dataclass(slots=True, kw_only=True, eq=False)
class PaddleBlock(Block):
    """What a step computed, with the logits that its tokens were drawn from."""

    states: Tensor = None
    """The network's state at each token: [lines x tokens of a line, width]."""
    logits: Logits
    """The target's: [lines, tokens of a line, vocabulary]."""
    draft_logits: Logits
    """The draft heads': [lines, drafts of a line, vocabulary]."""
    next_rows: Ids = field(default_factory=lambda: np.zeros(0, np.int64))
    """The lines whose requests continue."""
    next_drafts: Drafted | None = None
    """Of those: what follows."""


class PaddleDecoder:
    """Verifies what the heads drafted, and has them draft what may follow."""

    def __init__(self, runner: Runner, options: EngineOptions) -> None:
        shape = runner.shape
        self._runner = runner
        self._speculate = options.speculate
        self.tokenizer = ByteTokenizer()
        self.requests = PaddleRequests(shape.draft_heads, options.max_running)
        self.method = SpeculativeMethod.MTP if options.speculate else SpeculativeMethod.NONE
        self.fingerprint = runner.fingerprint.hex()
        self.most_carried = 4 * (2 * shape.layers * options.context * shape.width + shape.draft_heads * VOCABULARY_SIZE)

    def read_carried(self, request: Request, carried: bytes) -> None:
        """Take a hand-off's numbers, of which the request and the network say how many there are."""
        shape, drafts = self._runner.shape, len(request.proposals)
        if drafts > shape.draft_heads:
            raise ValueError(f"state.proposals: at most {shape.draft_heads}, got {drafts}")
        length = len(request.prompt) + len(request.output) - 1
        held = (2, shape.layers, shape.attention_heads, length, shape.head_width)
        size = drafts * VOCABULARY_SIZE + int(np.prod(held))
        if len(carried) != 4 * size:
            raise ValueError(f"state.carried: {4 * size} bytes, as its tokens say, got {len(carried)}")
        numbers = np.frombuffer(carried, "<f4")
        # Not "above": that would let NaN pass.
        wrong = ~(np.abs(numbers) <= _LARGEST)
        if wrong.any():
            raise ValueError(f"state.carried: finite numbers up to {_LARGEST:.0f}, got {numbers[wrong][0]}")
        logits, rest = np.split(numbers, [drafts * VOCABULARY_SIZE])
        request.carried = Carried(logits.reshape(drafts, VOCABULARY_SIZE), *rest.reshape(held))

    def compute(self, plan: Plan) -> PaddleBlock:
        """Compute all that is planned, and verify the drafts of those that continue.

        An EngineStepError names the requests whose carried keys and values could not be written.
        """
        requests = self.requests
        self._write_carried(plan.decode)
        pieces = [
            Piece(int(requests.places[slot]), len(text) - 1, [text[-1], *self._drafts_of(slot)])
            for slot in plan.decode.tolist()
            for text in (requests.texts[slot],)
        ]
        begins = requests.to_compute(plan.computing) - requests.missing[plan.computing]
        chunks = [
            Piece(int(requests.places[slot]), begin, requests.texts[slot][begin : begin + size])
            for slot, begin, size in zip(plan.computing.tolist(), begins.tolist(), plan.sizes.tolist(), strict=True)
        ]
        lines = [self._runner.compute(group) for group in (pieces, chunks) if group]
        slots = np.concatenate([plan.decode, plan.first])
        if not slots.size:
            nothing = np.zeros((0, 1, VOCABULARY_SIZE), np.float32)
            none = np.zeros((0, 1), np.int64)
            return PaddleBlock(
                slots=slots,
                tokens=none,
                counts=slots,
                drafts=none,
                draft_counts=slots,
                logits=nothing,
                draft_logits=nothing,
            )
        width = max((len(piece.tokens) for piece in pieces), default=0)
        firsts = np.arange(len(pieces)) * width
        chunk_width = max((len(piece.tokens) for piece in chunks), default=0)
        lasts = len(pieces) * width + np.arange(len(chunks)) * chunk_width + plan.sizes - 1
        firsts = np.concatenate([firsts, lasts[np.isin(plan.computing, plan.first)]])
        return self._verified(slots, plan.decode.size, self._runner.lines(lines), firsts)

    def propose(self, block: PaddleBlock, result: Outcome) -> Proposed | None:
        """Have the heads draft what may follow the last token of each request that continues.

        Only what follows a first token is published; the rest is published once it is verified.
        """
        rows = (result.statuses == RowStatus.ACTIVE).nonzero()[0]
        if not rows.size:
            return None
        requests, slots = self.requests, block.slots[rows]
        positions = requests.positions[slots] + result.kept[rows]
        counts = np.minimum(self._speculate, requests.ends[slots] - positions - 1)
        last = block.counts[rows] - 1
        fronts = Fronts(
            self._runner.chosen(block.states, rows * block.tokens.shape[1] + last),
            block.tokens[rows, last],
            positions,
            counts,
        )
        block.next_rows = rows
        block.next_drafts = found = drafted(self._runner.further, fronts, requests.params(slots))
        tokens = np.zeros((block.slots.size, found.tokens.shape[1]), np.int64)
        tokens[rows] = found.tokens
        published = np.zeros(block.slots.size, np.int64)
        published[rows] = np.where(requests.positions[slots] == 0, counts, 0)
        return Proposed(published, tokens)

    def scores(self, block: PaddleBlock, rows: Ids, counts: Ids, top_k: int, *, are_drafts: bool) -> Scores:
        """Compute the scores from the logits."""
        tokens, logits = (block.drafts, block.draft_logits) if are_drafts else (block.tokens, block.logits)
        mask = np.arange(tokens.shape[1]) < counts[:, None]
        return scores(logits[rows][mask], tokens[rows][mask], top_k)

    def carried(self, block: PaddleBlock, row: int) -> bytes:
        """Return the logits that a row's proposals were drawn from, and the keys and values of its tokens."""
        slot, drafts = int(block.slots[row]), block.next_drafts
        arrays: list[npt.NDArray[Any]] = []
        if drafts is not None:
            at = int(np.searchsorted(block.next_rows, row))
            arrays.append(drafts.logits[at, : drafts.counts[at]])
        arrays += self._runner.cache.read(int(self.requests.places[slot]), len(self.requests.texts[slot]))
        return b"".join(np.ascontiguousarray(array, "<f4").tobytes() for array in arrays)

    def advance(self, block: PaddleBlock, result: Outcome) -> None:
        """Keep the tokens and what was drafted; clear the places of what is no number."""
        requests, drafts = self.requests, block.next_drafts
        rows = zip(
            block.slots.tolist(), block.tokens.tolist(), result.kept.tolist(), result.statuses.tolist(), strict=True
        )
        for slot, tokens, kept, status in rows:
            requests.texts[slot] += tokens[:kept]
            requests.carried.pop(slot, None)
            if status == RowStatus.UNRECOVERABLE:
                _log.error("request ended: logits not finite", request_key=f"{requests.keys[slot]:016x}")
                self._runner.cache.clear(int(requests.places[slot]))
        if drafts is not None:
            slots, most = block.slots[block.next_rows], drafts.tokens.shape[1]
            requests.draft_counts[slots] = drafts.counts
            requests.drafts[slots, :most] = drafts.tokens
            requests.draft_logits[slots, :most] = drafts.logits

    def _drafts_of(self, slot: int) -> Sequence[int]:
        found: list[int] = self.requests.drafts[slot, : self.requests.draft_counts[slot]].tolist()
        return found

    def _write_carried(self, slots: Ids) -> None:
        failed: dict[int, Exception] = {}
        for slot in slots.tolist() if self.requests.carried else ():
            carried = self.requests.carried.get(slot)
            if carried is not None:
                try:
                    self._runner.cache.write(int(self.requests.places[slot]), carried.keys, carried.values)
                except Exception as error:  # noqa: BLE001 - it ends this request, and no other
                    failed[int(self.requests.keys[slot])] = error
        raise_failed(failed)

    def _verified(self, slots: Ids, decoding: int, lines: Tensor, firsts: Ids) -> PaddleBlock:
        """Return the tokens of slots whose lines begin at some places of all lines."""
        requests = self.requests
        draft_counts = requests.draft_counts[slots]
        most = int(draft_counts.max())
        params, draft_logits = requests.params(slots), requests.draft_logits[slots, :most]
        drafts = Drafts(requests.drafts[slots, :most], distribution(draft_logits, params).chances, draft_counts)
        wanted = firsts[:, None] + np.minimum(np.arange(most + 1), draft_counts[:, None])
        states = self._runner.chosen(lines, wanted.reshape(-1))
        logits = self._runner.logits(states).reshape(slots.size, most + 1, VOCABULARY_SIZE)
        sound = np.asarray(np.isfinite(logits).all(axis=(1, 2)))
        finite = np.where(sound[:, None, None], logits, 0)
        found = verified(distribution(finite, params), drafts, params, requests.positions[slots])
        return PaddleBlock(
            slots=slots,
            tokens=found.columns,
            counts=np.where(sound, found.counts, 0),
            drafts=drafts.columns[:decoding],
            draft_counts=np.where(sound, draft_counts, 0)[:decoding],
            states=states,
            logits=logits,
            draft_logits=draft_logits,
        )


def drafted(further: Further, fronts: Fronts, params: SamplingParams) -> Drafted:
    """Return as many drafts as each row wants to follow its last token."""
    most = int(fronts.counts.max(initial=0))
    found = np.zeros((fronts.tokens.size, most), np.int64)
    lines = np.zeros((fronts.tokens.size, most, VOCABULARY_SIZE), np.float32)
    states, tokens = fronts.states, fronts.tokens
    for place in range(most):
        states, lines[:, place] = further(place, states, tokens)
        numbers = params.uniforms(fronts.positions + place, DRAFT)
        found[:, place] = tokens = drawn(distribution(lines[:, place], params).chances, numbers)
    return Drafted(found, lines, fronts.counts)


def scores(logits: Logits, tokens: npt.NDArray[np.integer], top_k: int) -> Scores:
    """Return the logprob, rank and first alternatives of one token for each line of logits, which are all numbers.

    Alternatives are [tokens, top_k], the most probable first, ties by the lower id.
    """
    found = token_logprobs(logits, tokens, top_k)
    lines = (len(tokens), top_k)
    return Scores(
        found.logprobs,
        found.ranks,
        found.alternative_token_ids.reshape(lines),
        found.alternative_logprobs.reshape(lines),
    )
