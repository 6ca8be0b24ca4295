"""BatchEngine: continuous batching and speculative decoding. Subclasses run the model."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from tokenbus.engines.admission import check_range, continue_from, request_of
from tokenbus.engines.prompt_scoring import PromptPiece, ScoredPrompt, Scores, check_scoring
from tokenbus.engines.requests import Requests
from tokenbus.engines.sampling import Ids
from tokenbus.engines.scheduler import Plan, Scheduler
from tokenbus.plugins import Tokenizer
from tokenbus.tokenizer_probes import digest_of, encoder_of, probed
from tokenbus.worker import EngineStepError
from tokenbus.worker.step import Array, StepArrays
from tokenbus_contracts import BatchKind, RowStatus, SpeculativeMethod, StepPhase
from tokenbus_contracts.generated.request_pb2 import Generate, TokenScoring

Role = Literal["mixed", "prefill", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options of an engine. An option out of range raises ValueError."""

    role: Role = "mixed"
    """Role of the engine. A `prefill` engine computes only prompts and first tokens."""
    speculate: int = 3
    """Number of draft tokens per row and step, or 0 to disable speculation."""
    max_running: int = 256
    """Maximum number of requests in a step. Further requests wait."""
    context: int = 2048
    """Maximum length of a prompt and its output together, in tokens."""
    prefill_chunk: int = 512
    """Maximum number of prompt tokens in a step."""
    slice_steps: int = 0
    """Number of decode steps before a waiting request may preempt a running request, or 0 for no preemption."""
    max_top_logprobs: int = 20
    """Maximum number of alternatives per token."""

    most_context: ClassVar[int] = 1 << 20
    most_top_logprobs: ClassVar[int] = 127

    def __post_init__(self) -> None:
        if self.role not in get_args(Role):
            raise ValueError(f"role: one of {', '.join(get_args(Role))}, got {self.role!r}")
        # The contract allows 16 tokens per row: 15 drafts and the token after the drafts.
        check_range("speculate", self.speculate, 0, 15)
        check_range("context", self.context, 2, self.most_context)
        check_range("max_running", self.max_running, 1, 1024)
        check_range("prefill_chunk", self.prefill_chunk, 1, self.most_context)
        check_range("slice_steps", self.slice_steps, 0, 2**31 - 1)
        check_range("max_top_logprobs", self.max_top_logprobs, 0, self.most_top_logprobs)


@dataclass(slots=True, kw_only=True, eq=False)
class Block:
    """Output of a step. Engines add fields in subclasses."""

    slots: Ids
    """The decoding slots, followed by the slots that get their first token."""
    tokens: Ids
    """Token ids, an array of shape [slots, tokens]."""
    counts: Ids
    """Number of tokens of each slot, or 0 if the computation failed and the request must end."""
    drafts: Ids
    """Verified draft ids, an array of shape [decoding slots, drafts]."""
    draft_counts: Ids
    """Number of drafts of each decoding slot, or 0 for a slot without tokens."""


B = TypeVar("B", bound=Block)


class Outcome(NamedTuple):
    """Result of a step for each slot: the number of tokens to keep, the status and the stop."""

    kept: Ids
    statuses: npt.NDArray[np.uint8]
    stops: npt.NDArray[np.uint8]
    """Stop that ended each slot's request, encoded as in `StepArrays.stops`."""
    tails: dict[int, bytes]
    """For each slot whose request has stop strings, the last bytes of the output."""


class Proposed(NamedTuple):
    """Draft tokens that are published before their verification."""

    counts: Ids
    tokens: Ids
    """Draft token ids, an array of shape [slots, drafts]."""


def phase_of(decoding: int, prefilling: int) -> StepPhase:
    if decoding and prefilling:
        return StepPhase.MIXED
    return StepPhase.PREFILL if prefilling else StepPhase.DECODE


def batch_order(serials: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
    """Return each row's rank in the order of admission, or None if the rows are already in this order."""
    if (serials[1:] > serials[:-1]).all():
        return None
    places = np.empty(serials.size, np.int64)
    places[np.argsort(serials)] = np.arange(serials.size)
    return places


class BatchEngine(ABC, Generic[B]):
    """Computes steps of all running requests. Only `_keep` changes requests, so that a failed step can be repeated."""

    lora_adapters = ()
    continues_requests = True
    world_size = 1
    _method: ClassVar[SpeculativeMethod]

    def __init__(self, options: EngineOptions, tokenizer: Tokenizer, requests: Requests) -> None:
        self._options = options
        self._tokenizer = tokenizer
        self._end_token: int = getattr(tokenizer, "end_token", -1)
        self._requests = requests
        self.vocabulary_size = tokenizer.vocabulary_size
        self.max_model_tokens, self.role = options.context, options.role
        self._prompts: dict[int, ScoredPrompt] = {}
        """Prompts that are being scored, by slot."""
        self.weight_version = 0
        self._scheduler = Scheduler(
            requests,
            max_running=options.max_running,
            prefill_chunk=options.prefill_chunk,
            slice_steps=options.slice_steps,
        )

    @abstractmethod
    def _compute(self, plan: Plan) -> B:
        """Compute the chunks of the plan, verify the drafts of decoding slots, and sample first tokens."""

    def _propose(self, block: B, result: Outcome) -> Proposed | None:
        """Compute the next draft tokens, and return the drafts that are published before their verification."""
        del block, result
        return None

    @abstractmethod
    def _scores(self, block: B, rows: Ids, counts: Ids, top_ks: Ids, *, are_drafts: bool) -> Scores:
        """Return the scores of the first `counts` tokens, or drafts if `are_drafts` is set, of each row in `rows`."""

    @abstractmethod
    def _piece_scores(self, block: B, piece: PromptPiece) -> Scores:
        """Return the scores of a chunk's prompt tokens."""

    @abstractmethod
    def _keep(self, block: B, result: Outcome) -> None:
        """Store a step's output in the requests, whose positions have already advanced."""

    def _extras(self, block: B, rows: Ids, asked: Sequence[TokenScoring]) -> dict[str, Array]:
        """Return the extra scores of the given rows as columns of `StepArrays`."""
        raise NotImplementedError

    @cached_property
    def tokenizer_probes(self) -> Sequence[int]:
        """Token ids that the tokenizer returns for the probe texts."""
        return probed(encoder_of(self._tokenizer))

    @cached_property
    def tokenizer_digest(self) -> int:
        """Digest by which a client checks whether its own tokenizer is the same."""
        return digest_of(self._tokenizer, self.tokenizer_probes)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def admit(self, generate: Generate) -> int:
        options = self._options
        if self._requests.slot(generate.request_id) is not None:
            raise ValueError(f"request_id: {generate.request_id} is in use already")
        request = request_of(
            generate, self._tokenizer, context=options.context, max_top_logprobs=options.max_top_logprobs
        )
        if generate.continuation.token_ids:
            continue_from(request, generate.continuation.token_ids, self.vocabulary_size, self._end_token)
        prompt = None
        if generate.HasField("prompt_scoring"):
            check_scoring(generate, self.vocabulary_size, options.max_top_logprobs)
            prompt = ScoredPrompt(generate, list(request.prompt))
        slot = self._requests.add(request)
        if prompt is not None:
            self._prompts[slot] = prompt
        self._scheduler.add(slot)
        return len(request.prompt)

    def encode(self, text: str) -> Sequence[int]:
        return self._tokenizer.encode(text)

    def abort(self, request_id: int) -> None:
        slot = self._requests.slot(request_id)
        if slot is not None:
            self._scheduler.abort(slot)

    def pause(self, *, running: bool) -> None:
        self._scheduler.pause(running=running)

    def resume(self) -> None:
        self._scheduler.resume()

    def step(self) -> Sequence[StepArrays]:
        """Return a step's target batch and any draft batch. An EngineStepError means that no request has changed."""
        if not self.has_work:
            return []
        plan = self._scheduler.plan()
        try:
            block = self._compute(plan)
            result = self._outcome(block)
            proposed = self._propose(block, result)
            if self.role == "prefill":
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
        vars(self).clear()

    def _outcome(self, block: B) -> Outcome:
        """Cut each row at the end token, a stop or the maximum length, whichever comes first."""
        requests, slots, tokens = self._requests, block.slots, block.tokens
        room = np.minimum(block.counts, requests.ends[slots] - requests.positions[slots])
        is_end = (tokens == self._end_token) & ~requests.ignores_end[slots][:, None]
        stops = np.where(is_end.any(1), np.argmax(is_end, axis=1), tokens.shape[1])
        own = np.zeros(slots.size, np.uint8)
        tails: dict[int, bytes] = {}
        for row, slot in enumerate(slots.tolist()) if requests.stops else ():
            if slot in requests.stops:
                index, stop, tails[slot] = requests.stops[slot].find(tokens[row, : room[row]].tolist())
                if index is not None and index < stops[row]:
                    stops[row], own[row] = index, stop
        kept = np.minimum(room, stops + 1)
        statuses = np.full(slots.size, RowStatus.ACTIVE, np.uint8)
        statuses[requests.positions[slots] + kept >= requests.ends[slots]] = RowStatus.FINISHED_LENGTH
        statuses[stops < room] = RowStatus.FINISHED_STOP
        if self._prompts:
            alone = [slot in self._prompts and self._prompts[slot].is_alone for slot in slots.tolist()]
            kept[alone], statuses[alone] = 0, RowStatus.FINISHED_LENGTH
        statuses[block.counts == 0] = RowStatus.UNRECOVERABLE
        return Outcome(kept, statuses, own, tails)

    def _scored_pieces(self, plan: Plan, block: B) -> dict[int, Scores]:
        """Return the scores of the prompt tokens in the plan's chunks, by slot."""
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
        """Return the target batch, and the draft batch if requested. Rows are sorted by kind of computation."""
        requests = self._requests
        statuses = [result.statuses]
        others = (plan.prefilling, plan.preempted, plan.aborted)
        for status, group in zip((RowStatus.PREFILLING, RowStatus.PREEMPTED, RowStatus.ABORTED), others, strict=True):
            statuses.append(np.full(group.size, status, np.uint8))
        slots = np.concatenate([block.slots, *others])
        wanted = block.draft_counts * requests.wants_drafts[plan.decode]
        shared: dict[str, Any] = {
            "request_ids": requests.request_ids[slots],
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
        """Return score columns for the requests that want scores. `counts` may be shorter than `slots`."""
        scored = self._requests.scored[slots]
        if not scored.any():
            return {}
        top_ks = np.where(scored, self._requests.top_logprobs[slots], 0).astype(np.uint8)
        rows = (scored[: counts.size] & (counts > 0)).nonzero()[0]
        found = self._scores(block, rows, counts[rows], top_ks[rows].astype(np.int64), are_drafts=are_drafts)
        return {**found._asdict(), "scored": scored, "top_ks": top_ks}


def mask_of(counts: Ids, width: int) -> npt.NDArray[np.bool_]:
    """Return a mask of shape [rows, width] that is true in the first `counts` columns of each row."""
    return np.asarray(np.arange(width) < counts[:, None])


def _padded(counts: npt.NDArray[np.integer], rows: int) -> npt.NDArray[np.uint8]:
    """Return the counts, padded with zeros to `rows` elements."""
    found = np.zeros(rows, np.uint8)
    found[: counts.size] = counts
    return found
