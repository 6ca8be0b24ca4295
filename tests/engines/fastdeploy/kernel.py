"""The oracle: FastDeploy's ops in C through the kernel's own queue, and what of a message they leave undefined.

`structs` reads and writes FastDeploy's structs themselves, so that either side of the drop-in can be tried with the
other side of FastDeploy. Nothing of the drop-in's ops is used here.
"""

import os
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest

from benchmarks.errors import NotRunError
from benchmarks.fastdeploy.theirs import GETS, Queues, Theirs, compiled
from benchmarks.sysv import queue_for

SLOTS, SPECULATIVE_SLOTS, TOKENS, COLUMNS = 512, 256, 6, 21
STRUCT_BYTES = 530_456
NEEDED = "NEEDS_SYSV"
"""Set to 1, a kernel that refuses its queue is a failure and not a skip: CI sets it."""
_MOST_WAITING = 16
"""How many structs each queue holds: beyond that a save waits, as that engine then stalls."""
_TOPK = {"speculate_save_output_topk", "mtp_save_first_token_with_topk"}
Array = np.ndarray[Any, np.dtype[Any]]
Given = Mapping[str, Any]
compiled()  # while tests are collected: only some of them may start a compiler


@contextmanager
def queue(form: str = "develop") -> Iterator["KernelQueue"]:
    """Yield an id's two queues in the kernel, with the ops of a form; skip the test where the kernel refuses them."""
    with ExitStack() as stack:
        try:
            queues = Queues(*(stack.enter_context(queue_for(_MOST_WAITING * STRUCT_BYTES)) for _ in range(2)))
            ops = Theirs(form, queues)
        except NotRunError as why:
            if os.environ.get(NEEDED) == "1":
                raise
            pytest.skip(str(why))
        yield KernelQueue(ops)


class KernelQueue:
    """FastDeploy's ops on one id; the messages in its queues are counted here, as a get would wait for ever."""

    def __init__(self, ops: Theirs) -> None:
        """Save and get by some ops."""
        self.ops = ops
        self._waiting: deque[tuple[str, Given]] = deque()

    def __len__(self) -> int:
        """Return how many messages are in both queues."""
        return len(self._waiting)

    @property
    def next_op(self) -> str:
        """The op that gets the message that was saved first."""
        return GETS[self._waiting[0][0]]

    def save(self, op: str, given: Given, message_id: int = 1) -> None:
        """Do what a save op does with its arguments by name."""
        if self.ops.save(op, given, message_id=message_id, is_flat=is_flat(given)):
            self._waiting.append((op, dict(given)))

    def get(self, outputs: list[Array], k: int = 20) -> list[tuple[int, Array]]:
        """Do what the next message's get op does with its tensors; return the places that it leaves undefined."""
        op, given = self._waiting.popleft()
        assert self.ops.get(GETS[op], outputs, k) > 0
        return undefined(op, given)


def flat(array: Any) -> Array:  # noqa: ANN401 - an array, or a list
    """Return an array element by element."""
    found: Array = np.asarray(array).reshape(-1)
    return found


def is_flat(given: Given) -> bool:
    """Tell whether sampled tokens lie one behind the other, as before #5927, and not in a line for each slot."""
    sampled, counts = given.get("sampled_token_ids"), given.get("token_num_per_batch")
    if sampled is None or counts is None or sampled.ndim == 1 or sampled.shape[1] > 1:
        return sampled is not None and counts is not None and sampled.ndim == 1
    return bool(sampled.shape[0] < counts.size or (flat(counts) > 1).any())


def undefined(op: str, given: Given) -> list[tuple[int, Array]]:
    """Return which places of which outputs have whatever a message before it left in FastDeploy's struct.

    - A first token's drafts have an id alone: the columns, scores and ranks beside it are not written.
    - A negative count becomes another one by the first token's + 1: -3 is then -2, at which requests hang.
    - Without scores, the six places of a slot are copied whether it has so many tokens or not.
    - A first token's op without scores writes nothing of a slot at a later step, nor behind the last slot.
    """
    if op == "mtp_save_first_token_with_topk":
        return _of_first_tokens(given)
    if op == "speculate_save_output":
        counts = np.zeros(SPECULATIVE_SLOTS, np.int64)
        counts[: flat(given["accept_num"]).size] = _effective(given, flat(given["accept_num"]))
        return [(0, 2 + SPECULATIVE_SLOTS + np.flatnonzero(_places() >= counts[:, None]))]
    if op == "mtp_save_first_token":
        steps = flat(given["step_idx"])
        counts = np.full(SPECULATIVE_SLOTS, -1)
        counts[: steps.size] = np.where(steps == 1, 2, np.where(steps == 0, 0, -1))
        counts[: steps.size][_is_prefilling(given, steps.size)] = 0
        behind = 2 + SPECULATIVE_SLOTS + np.flatnonzero(_places() >= counts[:, None])
        return [(0, 2 + np.flatnonzero(counts < 0)), (0, behind)]
    return []


def _of_first_tokens(given: Given) -> list[tuple[int, Array]]:
    numbers = flat(given["token_num_per_batch"])
    kept = _effective(given, numbers)
    drafts = np.zeros((SLOTS, TOKENS), np.bool_)
    for slot in np.flatnonzero(kept > 0):
        drafts[slot, 1 : kept[slot] + 1] = True
    entries = np.flatnonzero(drafts)
    lines = entries[:, None] * COLUMNS + np.arange(COLUMNS)
    is_preempted = flat(given.get("preempted_idx", np.zeros_like(numbers)))[: numbers.size] == 1
    is_negative = (kept < 0) & ~is_preempted
    return [
        (0, 3 + np.flatnonzero(is_negative)),
        (0, 3 + SLOTS + lines[:, 1:].reshape(-1)),
        (1, lines.reshape(-1)),
        (2, entries),
    ]


def _places() -> Array:
    return np.broadcast_to(np.arange(TOKENS), (SPECULATIVE_SLOTS, TOKENS))


def _is_prefilling(given: Given, slots: int) -> Array:
    if "seq_lens_decoder" not in given or not given.get("skip_chunk_prefill", True):
        return np.zeros(slots, np.bool_)
    found: Array = flat(given["seq_lens_decoder"])[:slots] < flat(given["prompt_lens"])[:slots]
    return found


def _effective(given: Given, numbers: Array) -> Array:
    """Return the counts as a struct has them."""
    found = np.where(_is_prefilling(given, numbers.size), 0, numbers)
    if "preempted_idx" in given:
        found = np.where(flat(given["preempted_idx"])[: numbers.size] == 1, -9, found)
    return found
