"""BatchEngine: an engine with continuous batching and speculative decoding, whatever model computes its steps.

A decoder computes what the scheduler plans; all else is here: admission, hand-off, what ends a request, the arrays that
are published, and that a step that fails changes no request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from tokenbus_contracts import BatchKind, RowStatus, SpeculativeMethod, StepPhase
from tokenbus_contracts.generated.request_pb2 import Generate
from tokenbus_engines.admission import check_role, parameters_of
from tokenbus_engines.handoff import ModelTokenizer, RequestState, resume, unpacked
from tokenbus_engines.requests import Request, Requests
from tokenbus_engines.sampling import Ids
from tokenbus_engines.scheduler import Plan, Scheduler, SchedulerOptions
from tokenbus_services.plugins import digest_of
from tokenbus_services.worker import EngineStepError
from tokenbus_services.worker.step import Array, StepArrays


@dataclass(slots=True, kw_only=True, eq=False)
class Block:
    """What a step computed for some slots; a decoder adds what it needs later."""

    slots: Ids
    """Those that continue come first, then those with their first token."""
    tokens: Ids
    """A line for each slot."""
    counts: Ids
    """Of slots: how many tokens; 0 where none could be computed, and the request must end."""
    drafts: Ids
    """A line for each slot that continues: what was verified."""
    draft_counts: Ids
    """Of slots that continue: how many drafts; 0 where there are no tokens."""


B = TypeVar("B", bound=Block)


class Outcome(NamedTuple):
    """Of a block's slots: how many tokens are kept, and what becomes of the request."""

    kept: Ids
    statuses: npt.NDArray[np.uint8]
    stops: npt.NDArray[np.uint8]
    """Which of its own stops ended it, as `StepArrays.stops` has it."""
    tails: dict[int, bytes]
    """By slot: the end of the output's bytes, of requests with stops of their own."""


class Proposed(NamedTuple):
    """Draft tokens of a block's slots that are published before they are verified."""

    counts: Ids
    tokens: Ids
    """A line for each slot."""


class Scores(NamedTuple):
    """Of tokens: how likely the model has them; alternatives in a line each, ties by the lower id."""

    logprobs: Array
    ranks: Array
    alternative_token_ids: npt.NDArray[Any]
    alternative_logprobs: npt.NDArray[Any]


class Decoder(Protocol[B]):
    """Computes steps with a model. It changes a request only in `advance`, so that a step can be computed again."""

    method: SpeculativeMethod
    fingerprint: str
    """Two models whose tokens may differ have different fingerprints."""
    most_carried: int
    """The most bytes that a hand-off carries."""

    @property
    def requests(self) -> Requests:
        """The requests, with what the decoder keeps of each."""

    @property
    def tokenizer(self) -> ModelTokenizer:
        """The model's tokenizer."""

    def read_carried(self, request: Request, carried: bytes) -> None:
        """Check the bytes that a hand-off carries, and put what they hold into the request."""

    def compute(self, plan: Plan) -> B:
        """Compute a plan's chunks, verify the drafts of slots that continue, and draw first tokens."""

    def propose(self, block: B, result: Outcome) -> Proposed | None:
        """Draft what follows, and return what is published of it."""

    def scores(self, block: B, rows: Ids, counts: Ids, top_k: int, *, are_drafts: bool) -> Scores:
        """Return the scores of some of a block's rows' tokens, or drafts: as many of each as `counts` says."""

    def carried(self, block: B, row: int) -> bytes:
        """Return the bytes that the decode engine gets for a row's request."""

    def advance(self, block: B, result: Outcome) -> None:
        """Keep what a step computed, after the engine advanced the positions."""


def phase_of(decoding: int, prefilling: int) -> StepPhase:
    """Return the phase of a step that computes so many rows of each kind."""
    if decoding and prefilling:
        return StepPhase.MIXED
    return StepPhase.PREFILL if prefilling else StepPhase.DECODE


def batch_order(serials: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
    """Return each row's place in the order of admission, or None where the rows are in that order."""
    if (serials[1:] > serials[:-1]).all():
        return None
    places = np.empty(serials.size, np.int64)
    places[np.argsort(serials)] = np.arange(serials.size)
    return places


def raise_failed(failed: dict[int, Exception]) -> None:
    """Raise an EngineStepError that names the requests that failed, by their keys, if any did."""
    if failed:
        error = next(iter(failed.values()))
        raise EngineStepError(f"{type(error).__name__}: {error}", failed) from error


class BatchEngine(Generic[B]):
    """Computes steps for all running requests at once, each with its own sampling parameters."""

    def __init__(self, options: SchedulerOptions, decoder: Decoder[B]) -> None:
        self._options = options
        self._decoder = decoder
        self._requests = decoder.requests
        self._scheduler = Scheduler(self._requests, options)

    lora_adapters = ()
    """None: a decoder's model is as it is."""

    @property
    def vocabulary_size(self) -> int:
        """How many token ids it has."""
        return self._decoder.tokenizer.vocabulary_size

    @property
    def max_model_tokens(self) -> int:
        """How many tokens a request's prompt and output may have together."""
        return self._options.context

    @cached_property
    def tokenizer_digest(self) -> int:
        """A digest that tells whether a client has the same tokenizer."""
        return digest_of(self._decoder.tokenizer)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return len(self._requests) > 0

    def admit(self, generate: Generate, state: bytes | None = None) -> int:
        """Take a request, and return how long its prompt is in tokens; a ValueError says what is wrong with it."""
        decoder = self._decoder
        if generate.request_key in self._requests:
            raise ValueError(f"request_key: one that is not in use, got {generate.request_key}")
        request = parameters_of(generate, self._options, decoder.tokenizer, Request)
        check_role(self._options.role, state)
        if state is not None:
            found, carried = unpacked(state, decoder.most_carried)
            resume(request, found, decoder.fingerprint, decoder.tokenizer)
            decoder.read_carried(request, carried)
        self._scheduler.add(self._requests.add(request))
        return len(request.prompt)

    def abort(self, key: int) -> None:
        """End a request at the next step; one that is not known needs no end."""
        slot = self._requests.slot(key)
        if slot is not None:
            self._scheduler.abort(slot)

    def step(self) -> Sequence[StepArrays]:
        """Compute a step: the target's batch, then the draft's if a request wants it.

        Requests change only once all is computed: an EngineStepError leaves them as they were, and names those that
        failed alone.
        """
        if not self.has_work:
            return []
        plan = self._scheduler.plan()
        try:
            block = self._decoder.compute(plan)
            result = self._outcome(block)
            proposed = self._decoder.propose(block, result)
            states = self._handed_off(block, result, proposed) if self._options.role == "prefill" else {}
            made = self._arrays(plan, block, result, proposed)
            made[0].states = states
        except Exception as error:
            self._scheduler.undo(plan)
            if isinstance(error, EngineStepError):
                raise
            raise EngineStepError(f"{type(error).__name__}: {error}") from error
        self._advance(plan, block, result)
        return made

    def close(self) -> None:
        """Let go of the model and the requests."""
        del self._decoder, self._requests, self._scheduler

    def _outcome(self, block: Block) -> Outcome:
        """Return how many tokens of each row are kept, and whether its request continues.

        The first of what ends it counts: the end token, one of its own stops, or its length. An EngineStepError names
        the requests whose stops could not be looked for.
        """
        requests, slots, tokens = self._requests, block.slots, block.tokens
        room = np.minimum(block.counts, requests.ends[slots] - requests.positions[slots])
        is_end = (tokens == self._decoder.tokenizer.end_token) & ~requests.ignores_end[slots][:, None]
        stops = np.where(is_end.any(1), np.argmax(is_end, axis=1), tokens.shape[1])
        own = np.zeros(slots.size, np.uint8)
        tails: dict[int, bytes] = {}
        failed: dict[int, Exception] = {}
        for row, slot in enumerate(slots.tolist()) if requests.stops else ():
            if slot not in requests.stops:
                continue
            try:
                place, stop, tails[slot] = requests.stops[slot].find(tokens[row, : room[row]].tolist())
            except Exception as error:  # noqa: BLE001 - it ends this request, and no other
                failed[int(requests.keys[slot])] = error
                continue
            if place is not None and place < stops[row]:
                stops[row], own[row] = place, stop
        raise_failed(failed)
        kept = np.minimum(room, stops + 1)
        statuses = np.full(slots.size, RowStatus.ACTIVE, np.uint8)
        statuses[requests.positions[slots] + kept >= requests.ends[slots]] = RowStatus.FINISHED_LENGTH
        statuses[stops < room] = RowStatus.FINISHED_STOP
        statuses[block.counts == 0] = RowStatus.UNRECOVERABLE
        return Outcome(kept, statuses, own, tails)

    def _handed_off(self, block: B, result: Outcome, proposed: Proposed | None) -> dict[int, bytes]:
        """Hand off the requests that have not ended, and return a state for each by its key."""
        requests = self._requests
        rows = (result.statuses == RowStatus.ACTIVE).nonzero()[0]
        result.statuses[rows] = RowStatus.HANDED_OFF
        states: dict[int, bytes] = {}
        failed: dict[int, Exception] = {}
        for row, slot in zip(rows.tolist(), block.slots[rows].tolist(), strict=True):
            key = int(requests.keys[slot])
            try:
                states[key] = RequestState(
                    model=self._decoder.fingerprint,
                    prompt=str(requests.digests[slot]),
                    tokens=block.tokens[row, : result.kept[row]].tolist(),
                    seed=int(requests.seeds[slot]),
                    proposals=[] if proposed is None else proposed.tokens[row, : proposed.counts[row]].tolist(),
                ).packed(self._decoder.carried(block, row))
            except Exception as error:  # noqa: BLE001 - it ends this request, and no other
                failed[key] = error
        raise_failed(failed)
        return states

    def _arrays(self, plan: Plan, block: B, result: Outcome, proposed: Proposed | None) -> list[StepArrays]:
        """Return the target's batch, whose rows are sorted by what was computed for them, and the draft's if wanted."""
        requests = self._requests
        statuses = [result.statuses]
        others = (plan.prefilling, plan.preempted, plan.aborted)
        for status, group in zip((RowStatus.PREFILLING, RowStatus.PREEMPTED, RowStatus.ABORTED), others, strict=True):
            statuses.append(np.full(group.size, status, np.uint8))
        slots = np.concatenate([block.slots, *others])
        wanted = block.draft_counts * requests.wants_drafts[plan.decode]
        shared: dict[str, Any] = {
            "request_keys": requests.keys[slots],
            "positions": requests.positions[slots],
            "index_to_batch_id": batch_order(requests.serials[slots]),
            "phase": phase_of(plan.decode.size, plan.computing.size),
            "method": self._decoder.method,
        }
        target = StepArrays(
            **shared,
            token_counts=_padded(block.counts, slots.size),
            token_ids=block.tokens[_mask(block.counts, block.tokens.shape[1])],
            statuses=np.concatenate(statuses),
            stops=_padded(result.stops, slots.size) if requests.stops else None,
            kept_counts=_padded(result.kept, slots.size) if (result.kept < block.counts).any() else None,
            draft_token_counts=_padded(block.draft_counts, slots.size),
            draft_follows=bool(wanted.any()),
            **self._scores(block, slots, block.counts),
        )
        if proposed is not None:
            target.proposal_token_ids = proposed.tokens[_mask(proposed.counts, proposed.tokens.shape[1])]
            target.proposal_counts = _padded(proposed.counts, slots.size)
        if not target.draft_follows:
            return [target]
        draft = StepArrays(
            **shared,
            token_counts=_padded(wanted, slots.size),
            token_ids=block.drafts[_mask(wanted, block.drafts.shape[1])],
            kind=BatchKind.DRAFT,
            **self._scores(block, slots, wanted, are_drafts=True),
        )
        return [target, draft]

    def _scores(self, block: B, slots: Ids, counts: Ids, *, are_drafts: bool = False) -> dict[str, Array]:
        """Return the scores of the tokens of requests that want them; `counts` are of the first of the slots."""
        scored = self._requests.scored[slots]
        if not scored.any():
            return {}
        top_ks = np.where(scored, self._requests.top_logprobs[slots], 0).astype(np.uint8)
        most = int(top_ks.max())
        rows = (scored[: counts.size] & (counts > 0)).nonzero()[0]
        wanted = top_ks[rows]
        found = self._decoder.scores(block, rows, counts[rows], most, are_drafts=are_drafts)
        scores: dict[str, Array] = {"logprobs": found.logprobs, "ranks": found.ranks, "scored": scored}
        if not most:
            return scores
        ids, logprobs = found.alternative_token_ids, found.alternative_logprobs
        if (wanted < most).any():
            cut = np.arange(most) < np.repeat(wanted, counts[rows])[:, None]
            ids, logprobs = ids[cut], logprobs[cut]
        else:
            ids, logprobs = ids.ravel(), logprobs.ravel()
        return scores | {"alternative_token_ids": ids, "alternative_logprobs": logprobs, "top_ks": top_ks}

    def _advance(self, plan: Plan, block: B, result: Outcome) -> None:
        """Apply a computed step to the requests, and forget those that ended."""
        requests = self._requests
        requests.positions[block.slots] += result.kept
        for slot, tail in result.tails.items():
            requests.stops[slot].tail = tail
        self._decoder.advance(block, result)
        ended = block.slots[result.statuses != RowStatus.ACTIVE]
        self._scheduler.advance(plan, ended)
        if ended.size or plan.aborted.size:
            requests.remove(np.concatenate([ended, plan.aborted]))


def _mask(counts: Ids, width: int) -> npt.NDArray[np.bool_]:
    return np.asarray(np.arange(width) < counts[:, None])


def _padded(counts: npt.NDArray[np.integer], rows: int) -> npt.NDArray[np.uint8]:
    """Return counts, and zeros for the rows behind those that have any."""
    found = np.zeros(rows, np.uint8)
    found[: counts.size] = counts
    return found
