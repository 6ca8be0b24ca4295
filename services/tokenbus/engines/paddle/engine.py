"""PaddleEngine: computes prompt chunks, verifies the drafts of the network's heads, and drafts again."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus.engines.engine import BatchEngine, Block, EngineOptions, Outcome, Proposed, mask_of
from tokenbus.engines.paddle.runner import Piece, Runner, Tensor
from tokenbus.engines.paddle.tokenizer import VOCABULARY_SIZE, ByteTokenizer
from tokenbus.engines.paddle.weights import COMMITTED, WeightsError
from tokenbus.engines.prompt_scoring import PromptPiece, Scores, scored
from tokenbus.engines.requests import Request, SequenceRequests
from tokenbus.engines.sampling import (
    DRAFT,
    Drafts,
    Ids,
    Logits,
    SamplingParams,
    distribution,
    drawn,
    uniforms,
    verified,
)
from tokenbus.engines.scheduler import Plan
from tokenbus.logs import logger
from tokenbus.worker.step import Array
from tokenbus_contracts import RowStatus, SpeculativeMethod
from tokenbus_contracts.generated.request_pb2 import TokenScoring
from tokenbus_gpu_ops import token_logprobs

_log = logger("worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddleOptions(EngineOptions):
    """Options of the paddle engine."""

    weights: Path = COMMITTED
    device: str = "cpu"
    """Name of the device in Paddle, such as cpu, gpu or gpu:1."""
    max_running: int = 32
    context: int = 1024
    prefill_chunk: int = 256
    slice_steps: int = 256

    most_context: ClassVar[int] = 65_536


class Drafted(NamedTuple):
    """Drafts of the network's heads, with the logits from which the drafts were sampled."""

    rows: Ids
    """Row of each request in the step's output, or the request's slot if the request is continued."""
    tokens: Ids
    logits: Logits
    counts: Ids


class PaddleRequests(SequenceRequests):
    """Requests with their tokens and drafts."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.undrafted: set[int] = set()
        """Slots of continued requests that must recompute the drafts of the previous turn."""
        self.draft_counts = np.zeros(0, np.int64)
        self.drafts = np.zeros((0, heads), np.int64)
        self.draft_logits = np.zeros((0, heads, VOCABULARY_SIZE), np.float32)

    def remove(self, slots: Ids) -> None:
        super().remove(slots)
        self.undrafted.difference_update(slots.tolist())

    def _write(self, slot: int, request: Request) -> None:
        super()._write(slot, request)
        self.draft_counts[slot] = 0
        if request.output:
            self.undrafted.add(slot)


@dataclass(slots=True, kw_only=True, eq=False)
class PaddleBlock(Block):
    """Output of a step, with the states and logits of its tokens."""

    states: Tensor
    """State of the network at each token, of shape [slots * tokens, width]."""
    logits: Logits
    """Logits of the target, of shape [slots, tokens, vocabulary]."""
    draft_logits: Logits
    """Logits of the draft heads, of shape [slots, drafts, vocabulary]."""
    lines: Tensor
    """State of the network at every computed token, including prompt tokens."""
    chunks: Ids
    """Index of each chunk's first token in `lines`."""
    next_drafts: Drafted | None = field(default=None, init=False)
    continued: Drafted | None = None
    """Drafts that were recomputed for continued requests."""


class PaddleEngine(BatchEngine[PaddleBlock]):
    """An engine over bytes, with begin and end tokens."""

    token_scores = frozenset(TokenScoring.DESCRIPTOR.fields_by_name)
    _requests: PaddleRequests
    _method = SpeculativeMethod.MTP

    def __init__(self, options: PaddleOptions | None = None) -> None:
        """Create an engine, or raise WeightsError, DeviceError or ValueError."""
        options = options or PaddleOptions()
        self._runner = Runner(options.weights, options.device, slots=options.max_running, context=options.context)
        shape = self._runner.shape
        if options.speculate > shape.draft_heads:
            limit = f"at most {shape.draft_heads}, the number of draft heads in the weights"
            raise ValueError(f"speculate: {limit}, got {options.speculate}")
        requests = PaddleRequests(shape.draft_heads)
        super().__init__(options, ByteTokenizer(), requests)

    def load_weights(self, folder: Path) -> None:
        """Load the only safetensors file of a folder. The caches of open requests do not change."""
        files = sorted(folder.glob("*.safetensors"))
        if len(files) != 1:
            raise ValueError(f"load_weights.folder: a folder with one *.safetensors, got {len(files)}: {folder}")
        try:
            self._runner.reload(files[0])
        except WeightsError as error:
            raise ValueError(f"load_weights.folder: {error}") from None

    def _compute(self, plan: Plan) -> PaddleBlock:
        """Compute the plan, and verify the drafts of decoding slots."""
        requests = self._requests
        pieces, chunks = self._pieces(plan), self._chunks(plan)
        lines, begins = self._runner.compute([pieces, chunks])
        chunk_begins = begins[len(pieces) :]
        firsts = chunk_begins + plan.sizes - 1
        begins = np.concatenate([begins[: len(pieces)], firsts[np.isin(plan.computing, plan.first)]])
        slots = np.concatenate([plan.decode, plan.first])
        draft_counts = requests.draft_counts[slots]
        most = int(draft_counts.max(initial=0))
        params, draft_logits = requests.params(slots), requests.draft_logits[slots, :most]
        drafts = Drafts(requests.drafts[slots, :most], distribution(draft_logits, params), draft_counts)
        wanted = begins[:, None] + np.minimum(np.arange(most + 1), draft_counts[:, None])
        states, logits = None, np.zeros((0, most + 1, VOCABULARY_SIZE), np.float32)
        if slots.size:
            states = self._runner.chosen(lines, wanted.reshape(-1))
            logits = self._runner.logits(states).reshape(slots.size, most + 1, VOCABULARY_SIZE)
        sound = np.asarray(np.isfinite(logits).all(axis=(1, 2)))
        finite = np.where(sound[:, None, None], logits, 0)
        found = verified(distribution(finite, params), drafts, params, requests.positions[slots])
        decoding = plan.decode.size
        return PaddleBlock(
            slots=slots,
            tokens=found.columns,
            counts=np.where(sound, found.counts, 0),
            drafts=drafts.columns[:decoding],
            draft_counts=np.where(sound, draft_counts, 0)[:decoding],
            states=states,
            logits=logits,
            draft_logits=draft_logits,
            lines=lines,
            chunks=chunk_begins,
            continued=self._continued(plan, lines, firsts) if requests.undrafted else None,
        )

    def _continued(self, plan: Plan, lines: Tensor, last_lines: Ids) -> Drafted | None:
        """Recompute the drafts of continued requests, from the state before each request's last token."""
        requests = self._requests
        is_done = requests.missing[plan.computing] == plan.sizes
        is_due = is_done & np.isin(plan.computing, list(requests.undrafted))
        slots = plan.computing[is_due]
        if not slots.size:
            return None
        positions, states = requests.positions[slots], self._runner.chosen(lines, last_lines[is_due])
        counts = np.minimum(self._options.speculate, requests.ends[slots] - positions - 1)
        last = np.array([requests.token_ids[slot][-1] for slot in slots.tolist()])
        return Drafted(slots, *self._drafted(states, last, positions, counts, requests.params(slots)), counts)

    def _pieces(self, plan: Plan) -> list[Piece]:
        """Return the last token and the drafts of each decoding slot. The earlier tokens are already in the cache."""
        requests, found = self._requests, []
        for slot in plan.decode.tolist():
            place, text = int(requests.places[slot]), requests.token_ids[slot]
            drafts = requests.drafts[slot, : requests.draft_counts[slot]].tolist()
            found.append(Piece(place, len(text) - 1, [text[-1], *drafts]))
        return found

    def _chunks(self, plan: Plan) -> list[Piece]:
        requests = self._requests
        begins = requests.to_compute(plan.computing) - requests.missing[plan.computing]
        return [
            Piece(int(requests.places[slot]), begin, requests.token_ids[slot][begin : begin + size])
            for slot, begin, size in zip(plan.computing.tolist(), begins.tolist(), plan.sizes.tolist(), strict=True)
        ]

    def _propose(self, block: PaddleBlock, result: Outcome) -> Proposed | None:
        """Compute drafts for open requests. Only drafts after a first token are published before verification."""
        rows = (result.statuses == RowStatus.ACTIVE).nonzero()[0]
        if not rows.size:
            return None
        requests, slots = self._requests, block.slots[rows]
        positions = requests.positions[slots] + result.kept[rows]
        counts = np.minimum(self._options.speculate, requests.ends[slots] - positions - 1)
        last = block.counts[rows] - 1
        states = self._runner.chosen(block.states, rows * block.tokens.shape[1] + last)
        tokens, logits = self._drafted(states, block.tokens[rows, last], positions, counts, requests.params(slots))
        block.next_drafts = Drafted(rows, tokens, logits, counts)
        published = np.zeros(block.slots.size, np.int64)
        published[rows] = np.where(requests.positions[slots] == 0, counts, 0)
        every = np.zeros((block.slots.size, tokens.shape[1]), np.int64)
        every[rows] = tokens
        return Proposed(published, every)

    def _drafted(
        self, states: Tensor, last: Ids, positions: Ids, counts: Ids, params: SamplingParams
    ) -> tuple[Ids, Logits]:
        """Compute drafts and their logits from each row's state and last token."""
        most = int(counts.max())
        found = np.zeros((last.size, most), np.int64)
        lines = np.zeros((last.size, most, VOCABULARY_SIZE), np.float32)
        for head in range(most):
            states, lines[:, head] = self._runner.further(head, states, last)
            numbers = uniforms(params.seeds, positions + head, DRAFT)
            found[:, head] = last = drawn(distribution(lines[:, head], params), numbers)
        return found, lines

    def _scores(self, block: PaddleBlock, rows: Ids, counts: Ids, top_ks: Ids, *, are_drafts: bool) -> Scores:
        tokens, logits = (block.drafts, block.draft_logits) if are_drafts else (block.tokens, block.logits)
        mask = mask_of(counts, tokens.shape[1])
        found = token_logprobs(logits[rows][mask], tokens[rows][mask], np.repeat(top_ks, counts))
        return Scores(found.logprobs, found.ranks, found.alternative_token_ids, found.alternative_logprobs)

    def _extras(self, block: PaddleBlock, rows: Ids, asked: Sequence[TokenScoring]) -> dict[str, Array]:
        counts, logits = block.counts[rows], block.logits[rows]
        mask = mask_of(counts, block.tokens.shape[1])
        with np.errstate(divide="ignore"):  # log(0) is minus infinity
            drawn_from = np.log(distribution(logits, self._requests.params(block.slots[rows])))
        found = token_logprobs(
            logits[mask],
            block.tokens[rows][mask],
            token_counts=counts,
            other_logits=drawn_from[mask].astype(np.float32),
            other_logprobs=[each.other_logprobs for each in asked],
            entropies=[each.entropies for each in asked],
            given_token_ids=[token_id for each in asked for token_id in each.token_ids],
            given_counts=[len(each.token_ids) for each in asked],
            mask_bounds=[each.mask_bound for each in asked],
        )
        return dict(found.extra_columns)

    def _piece_scores(self, block: PaddleBlock, piece: PromptPiece) -> Scores:
        places = block.chunks[piece.chunk] + piece.skip + np.arange(piece.tokens.size)
        logits = self._runner.logits(self._runner.chosen(block.lines, places))
        if not np.isfinite(logits).all():
            raise FloatingPointError("a prompt's logits are not finite")
        return scored(logits, piece)

    def _keep(self, block: PaddleBlock, result: Outcome) -> None:
        requests, continued = self._requests, block.continued
        columns: Sequence[npt.NDArray[Any]] = (block.slots, block.tokens, result.kept, result.statuses)
        for slot, tokens, kept, status in zip(*(each.tolist() for each in columns), strict=True):
            requests.token_ids[slot] += tokens[:kept]
            if status == RowStatus.UNRECOVERABLE:
                _log.error("request ended: logits not finite", request_id=f"{requests.request_ids[slot]:016x}")
                self._runner.cache.clear(int(requests.places[slot]))
        if (drafts := block.next_drafts) is not None:
            self._keep_drafts(block.slots[drafts.rows], drafts)
        if continued is not None:
            self._keep_drafts(continued.rows, continued)
            requests.undrafted.difference_update(continued.rows.tolist())

    def _keep_drafts(self, slots: Ids, drafts: Drafted) -> None:
        requests, most = self._requests, drafts.tokens.shape[1]
        requests.draft_counts[slots] = drafts.counts
        requests.drafts[slots, :most] = drafts.tokens
        requests.draft_logits[slots, :most] = drafts.logits
