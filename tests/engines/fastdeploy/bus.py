"""Saving and getting over a queue of a test's own, beside that engine's own queue."""

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engines.fastdeploy import engine
from tests.engines.fastdeploy.kernel import KernelQueue, Saved
from tests.engines.fastdeploy.theirs import GETS
from tests.engines.fastdeploy.undefined import Array, Mask
from tests.support.settings import publishing_in
from tokenbus.engines import fastdeploy
from tokenbus.engines.fastdeploy.message import Kind
from tokenbus.engines.fastdeploy.process import PROCESS
from tokenbus.settings import Settings
from tokenbus_contracts import ContractError

_STAIN = 0xA5
MOST_SECONDS = 20.0
"""After so long a message that does not come is a failure, not a reason to wait on."""


def settings_in(folder: Path, **overrides: object) -> Settings:
    usual = {"worker.id": "fastdeploy-1", "limits.max_rows": 1024, "processor.request_timeout_ms": 86_400_000}
    return publishing_in(folder, usual, overrides)


@contextmanager
def speaking(form: str | None, folder: Path, *, is_got: bool = True, **overrides: object) -> Iterator[None]:
    """Have the drop-in speak a form, over addresses in a folder; without `is_got` no queue has a get side."""
    fastdeploy.configure(fastdeploy.Options(settings=settings_in(folder, **overrides), form=form))
    try:
        assert not is_got or is_empty()  # both queues have a get side from now on
        yield
    finally:
        fastdeploy.close()
        fastdeploy.configure(fastdeploy.Options())


def as_tensors(values: list[Any]) -> list[Any]:
    return [engine.Tensor(value) if isinstance(value, np.ndarray) else value for value in values]


def save(op: str, given: Mapping[Any, Any], *, tensors: bool = False) -> None:
    """Call a save op with its arguments by position; they are copied, as it may change them."""
    values = [value.copy() if isinstance(value, np.ndarray) else value for value in given.values()]
    getattr(fastdeploy, op)(*(as_tensors(values) if tensors else values))


KINDS = {
    "speculate_get_output_topk": Kind.SPECULATED_SCORED,
    "get_output_topk": Kind.SINGLE_SCORED,
    "speculate_get_output": Kind.SPECULATED,
    "get_output": Kind.SINGLE,
    "get_output_ep": Kind.SINGLE,
}
"""What each get op reads."""


def is_empty() -> bool:
    return all(PROCESS.receiver(kind).get(0.0, lambda found: found) is None for kind in (Kind.SINGLE, Kind.SPECULATED))


class Getter:
    """Gets message after message into the same tensors, as the engine's token processor does."""

    def __init__(self, op: str, *, tensors: bool = False, k: int = 20) -> None:
        self.op = op
        self.k = k
        made = stained(op)
        self.outputs: list[Any] = as_tensors(made) if tensors else made

    def get(self, *, wait: bool = True, rank: int = 0, op: str = "") -> None:
        """Get the next message, by another op of the same tensors if one is named."""
        named = op or self.op
        k = [self.k] if named.endswith("_topk") else []
        getattr(fastdeploy, named)(*self.outputs, *k, rank, wait)

    def arrays(self) -> list[Array]:
        return [output if isinstance(output, np.ndarray) else output.numpy() for output in self.outputs]


class Beside:
    """The drop-in and FastDeploy's ops over the kernel's queue: the same calls to both, and the same tensors out."""

    def __init__(self, kernel: KernelQueue, *, tensors: bool = False, k: int = 20) -> None:
        self.kernel = kernel
        self._tensors = tensors
        self._getters = {op: Getter(op, tensors=tensors, k=k) for op in set(GETS.values())}
        self._expected = {op: stained(op) for op in set(GETS.values())}

    def save(self, op: str, given: Mapping[str, Any], message_id: int = 1) -> None:
        save(op, given, tensors=self._tensors)
        self.kernel.save(op, given, message_id)

    def get(self, head: Saved | None = None, *, by: str = "", rank: int = 0) -> Getter:
        """Get what was saved first, or a queue's head, on both sides, and compare every element of the tensors."""
        op = GETS[(head or self.kernel.heads[0]).op]
        getter = self._getters[op]
        getter.get(op=by, rank=rank)
        self.compare(op, self.kernel.get(self._expected[op], getter.k, head, by, rank=rank))
        return getter

    def get_nothing(self, op: str) -> None:
        self._getters[op].get(wait=False)
        assert self.kernel.ops.get(op, self._expected[op], self._getters[op].k) == -errno.ENOMSG
        self.compare(op, [])

    def get_on_idle_rank(self, op: str, rank: int) -> None:
        """Get on a rank that reads nothing, whatever waits: neither side touches anything."""
        self._getters[op].get(wait=False, rank=rank)
        assert self.kernel.ops.get(op, self._expected[op], rank=rank) == 0
        self.compare(op, [])

    def get_another_kind(self, head: Saved, op: str) -> None:
        """Get a queue's head by an op that reads another kind: the drop-in consumes it, names it, and goes on.

        FastDeploy's op consumes it where it is smaller, and goes on with what is then in its struct. Where it is larger
        the message stays, every get from then on finds nothing, and nothing comes any more.
        """
        limit = f"one of {KINDS[op].name.lower()}, as this op reads it"
        with pytest.raises(ContractError) as refused:
            self._getters[op].get()
        dropped = f"{KINDS[GETS[head.op]].name.lower()}, which is dropped"
        assert str(refused.value) == f"{op}.message: {limit}, got {dropped}"
        self.compare(op, [])
        if self.kernel.ops.get(op, stained(op)) == -errno.E2BIG:
            assert self.kernel.ops.get(GETS[head.op], stained(GETS[head.op])) > 0
        self.kernel.forget(head)

    def compare(self, op: str, undefined: Mask) -> None:
        """Assert that the tensors of a get op are the same, but for what FastDeploy leaves undefined."""
        for at, (found, expected) in enumerate(zip(self._getters[op].arrays(), self._expected[op], strict=True)):
            same_bytes(op, at, found, expected, undefined)

    def get_all(self) -> None:
        while len(self.kernel):
            self.get()
        assert is_empty()


def stained(op: str) -> list[Array]:
    """Return a get op's tensors with the same odd number in every place: one that is touched shows."""
    made = engine.outputs(op)
    for array in made:
        array.view(np.uint8)[...] = _STAIN
    return made


def same_bytes(op: str, at: int, found: Array, expected: Array, undefined: Mask) -> None:
    for output, places in undefined:
        if output == at:
            expected.reshape(-1)[places] = found.reshape(-1)[places]
    if found.tobytes() != expected.tobytes():
        differs = found.reshape(-1).view(np.uint8) != expected.reshape(-1).view(np.uint8)
        place = int(np.flatnonzero(differs)[0]) // found.itemsize
        pair = f"{found.reshape(-1)[place]}, where FastDeploy has {expected.reshape(-1)[place]}"
        raise AssertionError(f"{op}: output {at} has at {place} {pair}")
