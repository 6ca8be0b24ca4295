"""FastDeploy's two ways from a step to its requests: a fixed struct through a System V queue, and pickle.

Written from that system's interface, not its code; where a choice was open, the one that is faster for the peer was
taken. Its token processor makes lists for every request; metrics, logging and resources are left out.
"""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Self

import numpy as np

from benchmarks.codec.peer import Peer, Queues
from benchmarks.sysv import Queue, queue_for
from benchmarks.workload import Array, Share, Step

_SLOTS, _DRAFT_TOKENS, _COLUMNS = 512, 6, 21
_TARGET = 3
_COLUMN_COUNT_SHIFT = 8
_SLOT = np.dtype(
    [
        ("tokens", "i4", (_DRAFT_TOKENS, _COLUMNS)),
        ("scores", "f4", (_DRAFT_TOKENS, _COLUMNS)),
        ("ranks", "i4", _DRAFT_TOKENS),
    ]
)
# The trailing pad is C's: the struct begins with a long, so its size is a multiple of eight.
STRUCT = np.dtype([("mtype", "i8"), ("meta", "i4", 3 + _SLOTS), ("mtext", _SLOT, _SLOTS), ("pad", "V4")])
STRUCT_BYTES = 530_456


class LogprobsLists(NamedTuple):
    """A request's tokens with their alternatives: one list a token, the sampled token first."""

    logprob_token_ids: list[list[int]]
    logprobs: list[list[float]]
    sampled_token_ranks: list[int]


@dataclass
class CompletionOutput:
    """A request's share of a step."""

    index: int
    send_idx: int
    token_ids: list[int]
    top_logprobs: LogprobsLists
    draft_token_ids: list[int] = field(default_factory=list)
    logprob: float | None = None


@dataclass
class RequestOutput:
    """What the engine hands on for a request."""

    request_id: str
    outputs: CompletionOutput
    finished: bool = False


class _FastDeploy(Peer):
    def plain(self, delivered: RequestOutput, top_k: int) -> Share:
        ids, logprobs, ranks = delivered.outputs.top_logprobs
        return Share(
            delivered.outputs.token_ids,
            [values[0] for values in logprobs],
            ranks,
            [values[1 : top_k + 1] for values in ids],
            [values[1 : top_k + 1] for values in logprobs],
        )


class SysVStruct(_FastDeploy):
    """The fixed struct through a System V message queue."""

    label = "FastDeploy SysV struct"

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._sent, self._got = np.zeros((), STRUCT), np.zeros((), STRUCT)
        if self._sent.nbytes != STRUCT_BYTES:
            raise ValueError(f"the struct has {self._sent.nbytes} bytes, not {STRUCT_BYTES}")
        self._sent["mtype"] = 1
        shape = (_SLOTS, _DRAFT_TOKENS, _COLUMNS)
        self._tokens, self._scores = np.zeros(shape, "i8"), np.zeros(shape, "f4")
        self._ranks = np.zeros(shape[:2], "i8")

    @classmethod
    @contextmanager
    def opened(cls) -> Iterator[Self]:
        with queue_for(STRUCT_BYTES - np.dtype("i8").itemsize) as queue:
            yield cls(queue)

    def carry(self, step: Step, queues: Queues) -> int:
        size = self.send(step)
        self.receive(step, queues)
        return size

    def send(self, step: Step) -> int:
        self._save(step)
        self._queue.send(self._sent)
        return self._sent.nbytes

    def send_end(self) -> None:
        self._sent["meta"][:3] = 1, _TARGET, 0
        self._queue.send(self._sent)

    def receive(self, step: Step, queues: Queues) -> bool:
        self._queue.receive(self._got)
        if not self._got["meta"][2]:
            return False
        slots, counts, columns = self._get()
        tokens, scores = self._tokens[:slots, :, :columns], self._scores[:slots, :, :columns]
        ranks = self._ranks[:slots]
        for slot in range(slots):
            token_ids = tokens[slot][:, 0].tolist()[: counts[slot]]
            lists = LogprobsLists([], [], [])
            outputs = CompletionOutput(slot, 0, [], lists)
            for place, token_id in enumerate(token_ids):
                outputs.token_ids.append(token_id)
                outputs.logprob = float(scores[slot, place, 0])
                lists.logprob_token_ids.append(tokens[slot, place, :].tolist())
                lists.logprobs.append(scores[slot, place, :].tolist())
                lists.sampled_token_ranks.append(ranks[slot, place].item())
            queues[step.keys[slot]].append(RequestOutput(step.request_ids[slot], outputs))
        return True

    def _save(self, step: Step) -> None:
        """Fill the struct as the engine's save op does: it blanks the columns that no request asked for."""
        rows, count, columns = step.case.rows, step.case.tokens_per_row, step.rectangle_ids.shape[1]
        meta, text = self._sent["meta"], self._sent["mtext"]
        meta[:3] = 1, _TARGET | columns << _COLUMN_COUNT_SHIFT, rows
        meta[3 : 3 + rows] = step.columns["token_counts"]
        tokens, scores = text["tokens"][:rows, :count], text["scores"][:rows, :count]
        tokens[..., :columns] = step.rectangle_ids.reshape(rows, count, columns)
        scores[..., :columns] = step.rectangle_logprobs.reshape(rows, count, columns)
        tokens[..., columns:] = -1
        scores[..., columns:] = 0
        text["ranks"][:rows, :count] = step.ranks.reshape(rows, count)

    def _get(self) -> tuple[int, list[int], int]:
        """Copy the struct to the output arrays as the engine's get op does."""
        meta, text = self._got["meta"], self._got["mtext"]
        columns, slots = int(meta[1]) >> _COLUMN_COUNT_SHIFT, int(meta[2])
        counts = meta[3 : 3 + slots].tolist()
        most = max(counts)
        self._tokens[:slots, :most, :columns] = text["tokens"][:slots, :most, :columns]
        self._scores[:slots, :most, :columns] = text["scores"][:slots, :most, :columns]
        self._ranks[:slots, :most] = text["ranks"][:slots, :most]
        return slots, counts, columns


class DecoderState(Enum):
    """What a transferred share holds."""

    TEXT = "text"


class LogprobsArrays(NamedTuple):
    """A request's tokens with their alternatives, as arrays."""

    logprob_token_ids: Array
    logprobs: Array
    sampled_token_ranks: Array


@dataclass
class StreamTransferData:
    """A request's share of a step, as it is pickled."""

    decoder_state: DecoderState
    batch_id: int
    tokens: Array
    logprobs: LogprobsArrays
    speculative_decoding: bool = True
    prompt_logprobs: None = None
    accept_tokens: None = None
    accept_num: None = None
    pooler_output: None = None


class Pickle(_FastDeploy):
    """The newer way: dataclasses of arrays, one a request, pickled; no socket."""

    label = "FastDeploy pickle"

    def carry(self, step: Step, queues: Queues) -> int:
        message = self.dumped(step)
        self.loaded(message, step, queues)
        return len(message)

    @staticmethod
    def dumped(step: Step) -> bytes:
        ids, logprobs, ranks, count = step.rectangle_ids, step.rectangle_logprobs, step.ranks, step.case.tokens_per_row
        shares = []
        for slot, start in enumerate(range(0, step.case.tokens, count)):
            own = slice(start, start + count)
            arrays = LogprobsArrays(ids[own], logprobs[own], ranks[own])
            shares.append(StreamTransferData(DecoderState.TEXT, slot, ids[own, 0], arrays))
        return pickle.dumps(shares, pickle.DEFAULT_PROTOCOL)

    @staticmethod
    def loaded(message: bytes, step: Step, queues: Queues) -> None:
        for data in pickle.loads(message):  # noqa: S301 - written by `dumped`
            lists = LogprobsLists(*(array.tolist() for array in data.logprobs))
            outputs = CompletionOutput(data.batch_id, 0, [], lists, logprob=lists.logprobs[0][0])
            for token_id in data.tokens.tolist():
                outputs.token_ids.append(token_id)
            queues[step.keys[data.batch_id]].append(RequestOutput(step.request_ids[data.batch_id], outputs))
