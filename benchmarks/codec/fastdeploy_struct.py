"""FastDeploy's struct of fixed size, through a System V message queue."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import numpy as np

from benchmarks.codec.fastdeploy import CompletionOutput, FastDeploy, LogprobsLists, RequestOutput
from benchmarks.codec.peer import Queues
from benchmarks.sysv import Queue, queue_for
from benchmarks.workload import Step

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


class SysVStruct(FastDeploy):
    """The fixed struct through a System V message queue."""

    name = "fastdeploy_sysv"
    label = "FastDeploy SysV struct"
    short = "SysV"
    includes = (
        f"fill the {STRUCT_BYTES:,}-byte struct (numpy), msgsnd and msgrcv through a real queue, copy into the "
        "output arrays (numpy), then per request lists of tokens, logprobs, ranks and alternatives, token by token"
    )

    def __init__(self, queue: Queue) -> None:
        """Use a queue that somebody else removes."""
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
        """Yield the peer on a queue of its own, or raise NotRunError."""
        with queue_for(STRUCT_BYTES - np.dtype("i8").itemsize) as queue:
            yield cls(queue)

    def carry(self, step: Step, queues: Queues) -> int:
        """Save, get, and build the outputs."""
        size = self.send(step)
        self.receive(step, queues)
        return size

    def send(self, step: Step) -> int:
        """Save, and return the bytes of the message."""
        self._save(step)
        self._queue.send(self._sent)
        return self._sent.nbytes

    def send_end(self) -> None:
        """Send a struct without slots."""
        self._sent["meta"][:3] = 1, _TARGET, 0
        self._queue.send(self._sent)

    def receive(self, step: Step, queues: Queues) -> bool:
        """Get, and build the outputs for the step's requests; False: it was the end."""
        self._queue.receive(self._got)
        if not self._got["meta"][2]:
            return False
        slots, counts, columns = self._get()
        tokens, scores = self._tokens[:slots, :, :columns], self._scores[:slots, :, :columns]
        ranks = self._ranks[:slots]
        for slot in range(slots):
            token_ids = tokens[slot][:, 0].tolist()[: counts[slot]]
            outputs = CompletionOutput(slot, 0, [])
            lists = LogprobsLists([], [], [])
            for place, token_id in enumerate(token_ids):
                outputs.token_ids.append(token_id)
                outputs.logprob = float(scores[slot, place, 0])
                lists.logprob_token_ids.append(tokens[slot, place, :].tolist())
                lists.logprobs.append(scores[slot, place, :].tolist())
                lists.sampled_token_ranks.append(ranks[slot, place].item())
            outputs.top_logprobs = lists
            queues[step.keys[slot]].append(RequestOutput(step.request_ids[slot], outputs))
        return True

    def _save(self, step: Step) -> None:
        """Fill the struct as the engine's save op does: the columns that nobody asked for are blanked."""
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
