"""The oracle: FastDeploy's ops in C through the kernel's own queues, of which an id has two.

Nothing here uses the drop-in's ops.
"""

import os
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple, NoReturn

import pytest

from benchmarks.errors import NotRunError
from benchmarks.sysv import queue_for
from tests.engines.fastdeploy.theirs import GETS, Queues, Theirs, compiled
from tests.engines.fastdeploy.undefined import Array, Given, Mask, flat, undefined

STRUCT_BYTES = 530_456
NEEDED = "NEEDS_SYSV"
"""Set to 1, a kernel that refuses its queue is a failure and not a skip: .ci/run sets it."""
_MOST_WAITING = 16
"""How many structs each queue holds: beyond that a save waits, as that engine then stalls."""
compiled()  # at collection: most tests may not start a process, such as a compiler


class Saved(NamedTuple):
    number: int
    """Counted over both queues."""
    op: str
    given: Given


def skip(why: NotRunError) -> NoReturn:
    """Skip a test that the kernel has no queue for; where one is needed, raise why instead."""
    if os.environ.get(NEEDED) == "1":
        raise why
    pytest.skip(str(why))


@contextmanager
def queue(form: str = "develop") -> Iterator["KernelQueue"]:
    """Yield an id's two queues in the kernel, with the ops of a form; skip the test where the kernel refuses them."""
    with ExitStack() as stack:
        try:
            queues = Queues(*(stack.enter_context(queue_for(_MOST_WAITING * STRUCT_BYTES)) for _ in range(2)))
            ops = Theirs(form, queues)
        except NotRunError as why:
            skip(why)
        yield KernelQueue(ops)


class KernelQueue:
    """FastDeploy's ops on one id; the messages in its queues are counted here, as a get would wait for ever."""

    def __init__(self, ops: Theirs) -> None:
        self.ops = ops
        self._saved = 0
        self._waiting: dict[int, deque[Saved]] = {queue.identity: deque() for queue in ops.queues}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def heads(self) -> list[Saved]:
        return sorted((waiting[0] for waiting in self._waiting.values() if waiting), key=lambda saved: saved.number)

    def save(self, op: str, given: Given, message_id: int = 1) -> None:
        if self.ops.save(op, given, message_id=message_id, is_flat=is_flat(given)):
            self._saved += 1
            self._waiting[self.ops.queues.of(op).identity].append(Saved(self._saved, op, dict(given)))

    def get(self, outputs: list[Array], k: int = 20, head: Saved | None = None, op: str = "", **how: int) -> Mask:
        """Get what was saved first, or a queue's head, by the op that reads it; return what of it is undefined."""
        found = head or self.heads[0]
        assert self.ops.get(op or GETS[found.op], outputs, k, **how) > 0
        self.forget(found)
        return undefined(self.ops.form, found.op, found.given, k)

    def forget(self, head: Saved) -> None:
        waiting = self._waiting[self.ops.queues.of(head.op).identity]
        assert waiting[0] is head
        waiting.popleft()


def is_flat(given: Given) -> bool:
    """Tell whether a column of sampled tokens stands for a flat array, as the drop-in decides it by the counts.

    FastDeploy takes it for lines of one token, and in a slot with more reads its neighbours'. No release passes one.
    """
    sampled, counts = given.get("sampled_token_ids"), given.get("token_num_per_batch")
    if sampled is None or counts is None or sampled.ndim == 1 or sampled.shape[1] > 1:
        return False
    return bool(sampled.shape[0] < counts.size or (flat(counts) > 1).any())
