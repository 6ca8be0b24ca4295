"""Message: one step of the engine, whose bytes ops.c writes. Sizes and magic numbers are FastDeploy's."""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

SLOTS = 512
ALTERNATIVES = 20
COLUMNS = ALTERNATIVES + 1
"""The sampled token, and its alternatives: what FastDeploy's struct has room for."""
PREEMPTED = -9
UNRECOVERABLE = -3
NOTHING = -1
"""In the place of a token: there is none."""
TARGET, DRAFT = 3, 4
"""The message flags that are known. Others are carried, too."""

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
    """Which struct a message would be in: a get op reads one of them."""

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
    """Of slots: how much of its request is computed, and how long its prompt is. No get op has them."""

    decoder: Integers
    prompt: Integers


@dataclass(slots=True, kw_only=True, eq=False)
class Message:
    """One step of the engine by slot. Every number is as the struct would hold it, whatever it means."""

    kind: Kind
    stop_flag: int
    """The message id; negative when there is nothing left to do."""
    flag: int
    counts: Ints
    """Of slots: how many tokens, or a magic count. Where each slot has one token: 1, and -9 where it was preempted."""
    tokens: Ints
    """Of tokens, slot after slot: a line of columns, the token's own id first."""
    scores: Floats = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    """As tokens, where the kind has them."""
    ranks: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    """Of tokens, where the kind has them."""
    lengths: Lengths | None = None
    is_first: bool = False
    """Whether a slot's tokens are a first token and draft ids that were not verified."""

    @property
    def slots(self) -> int:
        return self.counts.size

    @property
    def token_counts(self) -> Ints:
        """Of slots: how many tokens, 0 for a magic count."""
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
