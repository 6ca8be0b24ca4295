"""Message: one step of the engine, whose bytes ops.c writes. Sizes and magic numbers are FastDeploy's."""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

SLOTS = 512
ALTERNATIVES = 20
COLUMNS = ALTERNATIVES + 1
"""The number of columns in FastDeploy's struct: the sampled token and its alternatives."""
PREEMPTED = -9
UNRECOVERABLE = -3
NOTHING = -1
"""Stands in the place of a missing token."""
TARGET, DRAFT = 3, 4
"""The known message flags. Others are passed on, too."""

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
"""`struct header` in ops.c: `size` is the whole message's, in bytes; `entries` counts the tokens of all slots."""


class Kind(IntEnum):
    """The struct that FastDeploy would use for a message; a get op reads only one of them."""

    SPECULATED_SCORED = 1
    SINGLE_SCORED = 2
    SPECULATED = 3
    SINGLE = 4

    @property
    def is_scored(self) -> bool:
        """Whether tokens have columns, scores and ranks."""
        return self in {Kind.SPECULATED_SCORED, Kind.SINGLE_SCORED}

    @property
    def is_single(self) -> bool:
        """Whether each slot has one token, which may be a magic number instead."""
        return self in {Kind.SINGLE, Kind.SINGLE_SCORED}


class Lengths(NamedTuple):
    """Of slots: the number of computed tokens of the request, and the length of its prompt. No get op returns them."""

    decoder: Integers
    prompt: Integers


@dataclass(slots=True, kw_only=True, eq=False)
class Message:
    """One step of the engine, by slot. All numbers are those in FastDeploy's struct, uninterpreted."""

    kind: Kind
    stop_flag: int
    """The message id; negative when there is nothing left to do."""
    flag: int
    counts: Ints
    """Of slots: the number of tokens, or a magic count.

    If each slot has one token, the count is 1, or -9 if the slot was preempted.
    """
    tokens: Ints
    """Of tokens, slot after slot: a line of ids, with the sampled token first."""
    scores: Floats = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    """In the same layout as the tokens, if the kind has scores."""
    ranks: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    """Of tokens, if the kind has ranks."""
    lengths: Lengths | None = None
    is_first: bool = False
    """Whether a slot's tokens are a first token followed by draft ids that are not verified."""

    @property
    def slots(self) -> int:
        return self.counts.size

    @property
    def token_counts(self) -> Ints:
        """Of slots: the number of tokens; 0 for a magic count."""
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
