"""Message: one step of the engine, as bytes that ops.c writes. FastDeploy defines the sizes and magic numbers."""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

SLOTS = 512
ALTERNATIVES = 20
COLUMNS = ALTERNATIVES + 1
"""Number of columns in FastDeploy's struct: the sampled token and its alternatives."""
PREEMPTED = -9
UNRECOVERABLE = -3
NOTHING = -1
"""Placeholder for a missing token."""
TARGET, DRAFT = 3, 4
"""Known message flags. Messages with unknown flags are passed on, too."""

Integers = npt.NDArray[np.int64]
Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]
Tensor = Any

HEADER = np.dtype(
    {
        "names": ["magic", "size", "kind", "flag", "columns", "stop_flag", "slots", "entries", "sequence", "stamp"],
        "formats": ["u4", "u4", "u1", "u1", "u2", "i4", "u4", "u4", "u8", "u8"],
    }
)
"""Layout of `struct header` in ops.c, where `size` counts the message's bytes and `entries` counts its tokens."""


class Kind(IntEnum):
    """Kind of struct that FastDeploy would use for a message. Each get op reads only one kind."""

    SPECULATED_SCORED = 1
    SINGLE_SCORED = 2
    SPECULATED = 3
    SINGLE = 4

    @property
    def is_scored(self) -> bool:
        """Whether each token has alternatives, their scores, and a rank."""
        return self in {Kind.SPECULATED_SCORED, Kind.SINGLE_SCORED}

    @property
    def is_single(self) -> bool:
        """Whether each slot has exactly one token or magic number."""
        return self in {Kind.SINGLE, Kind.SINGLE_SCORED}


class Lengths(NamedTuple):
    """Numbers of computed tokens and of prompt tokens of each slot's request, which get ops do not return."""

    decoder: Integers
    prompt: Integers


@dataclass(slots=True, kw_only=True, eq=False)
class Message:
    """One step of the engine for all slots. All numbers are stored exactly as in FastDeploy's struct."""

    kind: Kind
    stop_flag: int
    """The message id, which is negated when no work remains."""
    flag: int
    counts: Ints
    """Number of tokens of each slot, or a magic count.

    For a kind with one token per slot, the count is 1, or -9 if the slot was preempted.
    """
    tokens: Ints
    """Array with one row per token, slot after slot: the id of the sampled token, then the ids of any alternatives."""
    scores: Floats = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    """Scores in the layout of `tokens`, if the kind has scores."""
    ranks: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    """Rank of each token, if the kind has ranks."""
    lengths: Lengths | None = None
    is_first: bool = False
    """Whether each slot has a first token followed by unverified draft ids."""

    @property
    def slots(self) -> int:
        return self.counts.size

    @property
    def token_counts(self) -> Ints:
        """Number of entries of each slot in `tokens`."""
        return np.ones_like(self.counts) if self.kind.is_single else np.maximum(self.counts, 0)


def unpacked(data: bytes | bytearray | memoryview) -> Message:
    """Return a message whose arrays are views of its bytes."""
    header = np.frombuffer(data, HEADER, 1)[0]
    kind, slots, entries = Kind(header["kind"]), int(header["slots"]), int(header["entries"])
    columns = int(header["columns"])
    at, table = 0 if kind is Kind.SINGLE else slots, entries * columns
    words = np.frombuffer(data, np.int32, (int(header["size"]) - HEADER.itemsize) // 4, HEADER.itemsize)
    message = Message(
        kind=kind,
        stop_flag=int(header["stop_flag"]),
        flag=int(header["flag"]),
        counts=words[:at] if at else np.ones(slots, np.int32),
        tokens=words[at : at + table].reshape(entries, columns),
    )
    if kind.is_scored:
        message.scores = words[at + table : at + 2 * table].view(np.float32).reshape(entries, columns)
        message.ranks = words[at + 2 * table :]
    return message
