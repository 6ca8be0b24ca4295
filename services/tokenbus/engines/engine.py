"""BatchEngine: continuous batching and speculative decoding. A subclass computes what the scheduler plans."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from tokenbus.engines.admission import check_range, request_of
from tokenbus.engines.continuation import ModelTokenizer, continue_from
from tokenbus.engines.prompt_scoring import PieceScores, PromptPiece, ScoredPrompt, check_scoring
from tokenbus.engines.requests import Requests
from tokenbus.engines.sampling import Ids
from tokenbus.engines.scheduler import Plan, Scheduler
from tokenbus.tokenizer_probes import digest_of, encoder_of, probed
from tokenbus.worker import EngineStepError
from tokenbus.worker.step import Array, StepArrays
from tokenbus_contracts import BatchKind, RowStatus, SpeculativeMethod, StepPhase
from tokenbus_contracts.generated.request_pb2 import Generate, TokenScoring

Role = Literal["mixed", "prefill", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How an engine runs. An option out of range is a ValueError with the option, the limit and the value."""

    role: Role = "mixed"
    """prefill: prompts and first tokens; mixed and decode: all tokens."""
    speculate: int = 3
    """How many tokens are drafted for a row in a step; 0: none, and each row gets one token a step."""
    max_running: int = 256
    """The most requests in a step; others wait."""
    context: int = 2048
    """The most tokens of a request's prompt and output together."""
    prefill_chunk: int = 512
    """The most tokens of prompts in a step."""
    slice_steps: int = 0
    """After how many steps with tokens a request makes way for one that waits; 0: never."""
    max_top_logprobs: int = 20
    """The most alternatives that a request may ask for."""

    most_context: ClassVar[int] = 1 << 20
    most_top_logprobs: ClassVar[int] = 127

    def __post_init__(self) -> None:
        if self.role not in get_args(Role):
            raise ValueError(f"role: one of {', '.join(get_args(Role))}, got {self.role!r}")
        # With the token after the drafts, as many as the contract lets a row have.
        check_range("speculate", self.speculate, 0, 15)
        check_range("context", self.context, 2, self.most_context)
        check_range("max_running", self.max_running, 1, 1024)
        check_range("prefill_chunk", self.prefill_chunk, 1, self.most_context)
        check_range("slice_steps", self.slice_steps, 0, 2**31 - 1)
        check_range("max_top_logprobs", self.max_top_logprobs, 0, self.most_top_logprobs)


@dataclass(slots=True, kw_only=True, eq=False)
class Block:
    """What a step computed for some slots; an engine adds what it needs later."""

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
    """Of tokens: how likely the model has them; alternatives one token's after the other, ties by the lower id."""

    logprobs: Array
    ranks: Array
    alternative_token_ids: Array
    alternative_logprobs: Array


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


class BatchEngine(ABC, Generic[B]):
    """Computes steps for all running requests. A subclass changes them only in `_keep`: a step can be repeated."""

    lora_adapters = ()
    continues_requests = True
    world_size = 1
    _method: ClassVar[SpeculativeMethod]
    """How it drafts, where it does."""

    def __init__(self, options: EngineOptions, tokenizer: ModelTokenizer, requests: Requests) -> None:
        self._options = options
        self._tokenizer = tokenizer
        self._requests = requests
        self._prompts: dict[int, ScoredPrompt] = {}
        """The prompts to score, by slot."""
        self.weight_version = 0
        self._scheduler = Scheduler(
            requests,
            max_running=options.max_running,
            prefill_chunk=options.prefill_chunk,
            slice_steps=options.slice_steps,
        )

    @abstractmethod
    def _compute(self, plan: Plan) -> B:
        """Compute a plan's chunks, verify the drafts of slots that continue, and draw first tokens."""

    @abstractmethod
    def _propose(self, block: B, result: Outcome) -> Proposed | None:
        """Draft what follows, and return what is published of it."""

    @abstractmethod
    def _scores(self, block: B, rows: Ids, counts: Ids, top_ks: Ids, *, are_drafts: bool) -> Scores:
        """Return the scores of some of a block's rows' tokens, or drafts: as many of each as `counts` says."""

    @abstractmethod
    def _piece_scores(self, block: B, piece: PromptPiece) -> PieceScores:
        """Return the scores of some of a prompt's tokens, which a chunk of the block's plan was computed for."""

    @abstractmethod
    def _keep(self, block: B, result: Outcome) -> None:
        """Keep what a step computed, after the positions advanced."""

    def _extras(self, block: B, rows: Ids, asked: Sequence[TokenScoring]) -> dict[str, Array]:
        """Compute what some rows' requests want to know of their tokens, named in `token_scores`."""
        raise NotImplementedError

    @property
    def vocabulary_size(self) -> int:
        """How many token ids it has."""
        return self._tokenizer.vocabulary_size

    @property
    def max_model_tokens(self) -> int:
        """How many tokens a request's prompt and output may have together."""
        return self._options.context

    @cached_property
    def tokenizer_probes(self) -> Sequence[int]:
        """What its tokenizer makes of certain texts."""
        return probed(encoder_of(self._tokenizer))

    @cached_property
    def tokenizer_digest(self) -> int:
        """A digest that tells whether a client has the same tokenizer."""
        return digest_of(self._tokenizer, self.tokenizer_probes)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self._scheduler.has_work

    def admit(self, generate: Generate) -> int:
        """Take a request, and return how long its prompt is in tokens; a ValueError says what is wrong with it."""
        options = self._options
        if self._requests.slot(generate.request_id) is not None:
            raise ValueError(f"request_id: one that is not in use, got {generate.request_id}")
        request = request_of(
            generate, self._tokenizer, context=options.context, max_top_logprobs=options.max_top_logprobs
        )
        if generate.continuation.token_ids:
            continue_from(request, generate.continuation.token_ids, self._tokenizer)
        prompt = None
        if generate.HasField("prompt_scoring"):
            check_scoring(generate, self.vocabulary_size, options.max_top_logprobs)
            prompt = ScoredPrompt(generate, list(request.prompt))
        slot = self._requests.add(request)
        if prompt is not None:
            self._prompts[slot] = prompt
        self._scheduler.add(slot)
        return len(request.prompt)

    def abort(self, key: int) -> None:
        """End a request at the next step; one that is not known needs no end."""
        slot = self._requests.slot(key)
        if slot is not None:
            self._scheduler.abort(slot)

    def pause(self, *, running: bool) -> None:
        """Begin no new request, and if `running` compute nothing at all."""
        self._scheduler.pause(running=running)

    def resume(self) -> None:
        """Compute all requests."""
        self._scheduler.resume()

    def step(self) -> Sequence[StepArrays]:
        """Compute the target's batch, then the draft's if wanted; an EngineStepError changes no request."""
        if not self.has_work:
            return []
        plan = self._scheduler.plan()
        try:
            block = self._compute(plan)
            result = self._outcome(block)
            proposed = self._propose(block, result)
            if self._options.role == "prefill":
                result.statuses[result.statuses == RowStatus.ACTIVE] = RowStatus.HANDED_OFF
            made = self._arrays(plan, block, result, proposed)
            scored = self._scored_pieces(plan, block)
            whole = [slot for slot in plan.first.tolist() if slot in self._prompts]
            made[0].prompt_scores = [self._prompts[slot].whole(scored.get(slot)) for slot in whole]
        except Exception as error:
            self._scheduler.undo(plan)
            raise EngineStepError(f"{type(error).__name__}: {error}") from error
        requests = self._requests
        requests.positions[block.slots] += result.kept
        for slot, tail in result.tails.items():
            requests.stops[slot].tail = tail
        self._keep(block, result)
        for slot, scores in scored.items():
            self._prompts[slot].keep(scores)
        ended = block.slots[result.statuses != RowStatus.ACTIVE]
        self._scheduler.advance(plan, ended)
        gone = np.concatenate([ended, plan.aborted])
        for slot in (*gone.tolist(), *plan.first.tolist()) if self._prompts else ():
            self._prompts.pop(slot, None)
        requests.remove(gone)
        return made

    def close(self) -> None:
        """Let go of the model and the requests."""
        vars(self).clear()

    def _outcome(self, block: B) -> Outcome:
        """Return how many tokens each row keeps: the first of end token, own stop and length ends it."""
        requests, slots, tokens = self._requests, block.slots, block.tokens
        room = np.minimum(block.counts, requests.ends[slots] - requests.positions[slots])
        is_end = (tokens == self._tokenizer.end_token) & ~requests.ignores_end[slots][:, None]
        stops = np.where(is_end.any(1), np.argmax(is_end, axis=1), tokens.shape[1])
        own = np.zeros(slots.size, np.uint8)
        tails: dict[int, bytes] = {}
        for row, slot in enumerate(slots.tolist()) if requests.stops else ():
            if slot in requests.stops:
                place, stop, tails[slot] = requests.stops[slot].find(tokens[row, : room[row]].tolist())
                if place is not None and place < stops[row]:
                    stops[row], own[row] = place, stop
        kept = np.minimum(room, stops + 1)
        statuses = np.full(slots.size, RowStatus.ACTIVE, np.uint8)
        statuses[requests.positions[slots] + kept >= requests.ends[slots]] = RowStatus.FINISHED_LENGTH
        statuses[stops < room] = RowStatus.FINISHED_STOP
        if self._prompts:
            alone = [slot in self._prompts and self._prompts[slot].is_alone for slot in slots.tolist()]
            kept[alone], statuses[alone] = 0, RowStatus.FINISHED_LENGTH
        statuses[block.counts == 0] = RowStatus.UNRECOVERABLE
        return Outcome(kept, statuses, own, tails)

    def _scored_pieces(self, plan: Plan, block: B) -> dict[int, PieceScores]:
        """Return, by slot, the scores of the prompts' tokens that a plan's chunks say something of."""
        if not self._prompts:
            return {}
        begins = self._requests.to_compute(plan.computing) - self._requests.missing[plan.computing]
        chunks = zip(plan.computing.tolist(), begins.tolist(), plan.sizes.tolist(), strict=True)
        found = {}
        for place, (slot, begin, size) in enumerate(chunks):
            piece = self._prompts[slot].piece(place, begin, size) if slot in self._prompts else None
            if piece is not None:
                found[slot] = self._piece_scores(block, piece)
        return found

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
            "request_ids": requests.keys[slots],
            "positions": requests.positions[slots],
            "index_to_batch_id": batch_order(requests.serials[slots]),
            "phase": phase_of(plan.decode.size, plan.computing.size),
            "weight_version": self.weight_version,
            "method": self._method if self._options.speculate else SpeculativeMethod.NONE,
        }
        target = StepArrays(
            **shared,
            token_counts=_padded(block.counts, slots.size),
            token_ids=block.tokens[mask_of(block.counts, block.tokens.shape[1])],
            statuses=np.concatenate(statuses),
            stops=_padded(result.stops, slots.size) if requests.stops else None,
            kept_counts=_padded(result.kept, slots.size) if (result.kept < block.counts).any() else None,
            draft_token_counts=_padded(block.draft_counts, slots.size),
            draft_follows=bool(wanted.any()),
            **self._scored(block, slots, block.counts),
            **self._extra_arrays(block, slots.size),
        )
        if proposed is not None:
            target.proposal_token_ids = proposed.tokens[mask_of(proposed.counts, proposed.tokens.shape[1])]
            target.proposal_counts = _padded(proposed.counts, slots.size)
        if not target.draft_follows:
            return [target]
        draft = StepArrays(
            **shared,
            token_counts=_padded(wanted, slots.size),
            token_ids=block.drafts[mask_of(wanted, block.drafts.shape[1])],
            kind=BatchKind.DRAFT,
            **self._scored(block, slots, wanted, are_drafts=True),
        )
        return [target, draft]

    def _extra_arrays(self, block: B, rows: int) -> dict[str, Array]:
        """Return what requests want to know of the target's tokens beside logprobs, of so many rows."""
        wanted = self._requests.token_scorings
        asking = [row for row, slot in enumerate(block.slots.tolist()) if slot in wanted and block.counts[row]]
        if not asking:
            return {}
        made = self._extras(block, np.array(asking), [wanted[slot] for slot in block.slots[asking].tolist()])
        for name in ("extras", "given_counts", "mask_bounds"):
            of_all = np.zeros(rows, np.uint32)
            of_all[asking] = made.get(name, 0)
            made[name] = of_all
        return made

    def _scored(self, block: B, slots: Ids, counts: Ids, *, are_drafts: bool = False) -> dict[str, Array]:
        """Return the scores of the tokens of requests that want them; `counts` are of the first of the slots."""
        scored = self._requests.scored[slots]
        if not scored.any():
            return {}
        top_ks = np.where(scored, self._requests.top_logprobs[slots], 0).astype(np.uint8)
        rows = (scored[: counts.size] & (counts > 0)).nonzero()[0]
        found = self._scores(block, rows, counts[rows], top_ks[rows].astype(np.int64), are_drafts=are_drafts)
        return {**found._asdict(), "scored": scored, "top_ks": top_ks}


def mask_of(counts: Ids, width: int) -> npt.NDArray[np.bool_]:
    """Return which of so many columns a line has, of counts of lines."""
    return np.asarray(np.arange(width) < counts[:, None])


def _padded(counts: npt.NDArray[np.integer], rows: int) -> npt.NDArray[np.uint8]:
    """Return counts, and zeros for the rows behind those that have any."""
    found = np.zeros(rows, np.uint8)
    found[: counts.size] = counts
    return found
