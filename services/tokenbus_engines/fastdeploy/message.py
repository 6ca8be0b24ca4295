"""Message: one step of the engine as its ops exchange it, and how its bytes are read. ops.c writes them.

The struct's sizes and magic numbers are FastDeploy's.
"""

import struct
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

SLOTS = 512
"""The most slots of a message."""
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
"""A tensor of paddle, or an array of numpy."""

HEADER = struct.Struct("<IIBBHiIIQQ")
_MAGIC = 0x51464254
_NO_SCORES, _NO_RANKS = np.zeros((0, 0), np.float32), np.zeros(0, np.int32)
_ITEM = 4


class Kind(IntEnum):
    """Which struct a message would be in: a get op reads one of them."""

    SPECULATED_SCORED = 1
    SINGLE_SCORED = 2
    SPECULATED = 3
    SINGLE = 4

    @property
    def is_scored(self) -> bool:
        """Whether tokens have columns, scores and ranks."""
        return self is Kind.SPECULATED_SCORED or self is Kind.SINGLE_SCORED

    @property
    def is_single(self) -> bool:
        """Whether each slot has one token, which may be a magic number instead."""
        return self is Kind.SINGLE or self is Kind.SINGLE_SCORED


class Header(NamedTuple):
    """The fields before a message's arrays."""

    magic: int
    size: int
    """Of the whole message, in bytes."""
    kind: int
    flag: int
    columns: int
    stop_flag: int
    slots: int
    entries: int
    """How many tokens there are in all slots."""
    sequence: int
    """Counted by the process that saved it."""
    stamp: int
    """When it was saved, in nanoseconds of the machine's monotonic clock."""


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
    """The message flag: 3 for a target, 4 for a draft."""
    counts: Ints
    """Of slots: how many tokens, or a magic count. Where each slot has one token: 1, and -9 where it was preempted."""
    tokens: Ints
    """Of tokens, slot after slot: a line of columns, the token's own id first."""
    scores: Floats = field(default_factory=lambda: _NO_SCORES)
    """As tokens, where the kind has them."""
    ranks: Ints = field(default_factory=lambda: _NO_RANKS)
    """Of tokens, where the kind has them."""
    lengths: Lengths | None = None
    is_first: bool = False
    """Whether a slot's tokens are a first token and draft ids that were not verified."""

    @property
    def slots(self) -> int:
        """How many slots it is about."""
        return self.counts.size

    @property
    def is_running(self) -> bool:
        """Whether there is something left to do."""
        return self.stop_flag > 0

    @property
    def token_counts(self) -> Ints:
        """Of slots: how many tokens, 0 for a magic count."""
        return np.ones_like(self.counts) if self.kind.is_single else np.maximum(self.counts, 0)

    def packed(self, sequence: int, stamp: int) -> bytes:
        """Return the message as bytes."""
        entries, columns = self.tokens.shape
        size = HEADER.size + _ITEM * _items(self.kind, self.slots, entries, columns)
        header = HEADER.pack(
            *(_MAGIC, size, self.kind, self.flag, columns, self.stop_flag, self.slots, entries, sequence, stamp)
        )
        # From Python 3.12 on an array is known to be a buffer; it was one before.
        counts: Any = b"" if self.kind is Kind.SINGLE else self.counts
        arrays: list[Any] = [header, counts, self.tokens, self.scores, self.ranks]
        return b"".join(arrays)

    def without(self, slots: Flags) -> "Message":
        """Return the message with some slots marked unrecoverable, and without their tokens."""
        if self.kind.is_single:
            tokens = self.tokens.copy()
            tokens[slots, 0] = UNRECOVERABLE
            return replace(self, tokens=tokens)
        kept = np.repeat(~slots, self.token_counts)
        return replace(
            self,
            counts=np.where(slots, np.int32(UNRECOVERABLE), self.counts),
            tokens=self.tokens[kept],
            scores=self.scores[kept] if self.kind.is_scored else self.scores,
            ranks=self.ranks[kept] if self.kind.is_scored else self.ranks,
        )


def unpacked(data: bytes | bytearray | memoryview) -> Message:
    """Return a message whose arrays are views of its bytes."""
    header = Header._make(HEADER.unpack_from(data))
    kind, (slots, entries, columns) = Kind(header.kind), (header.slots, header.entries, header.columns)
    at = 0 if kind is Kind.SINGLE else slots
    words = np.frombuffer(data, np.int32, (header.size - HEADER.size) // _ITEM, HEADER.size)
    table = entries * columns
    message = Message(
        kind=kind,
        stop_flag=header.stop_flag,
        flag=header.flag,
        counts=words[:at] if at else np.ones(slots, np.int32),
        tokens=words[at : at + table].reshape(entries, columns),
    )
    if kind.is_scored:
        message.scores = words[at + table : at + 2 * table].view(np.float32).reshape(entries, columns)
        message.ranks = words[at + 2 * table :]
    return message


def _items(kind: Kind, slots: int, entries: int, columns: int) -> int:
    scored = entries * (columns + 1) if kind.is_scored else 0
    return (0 if kind is Kind.SINGLE else slots) + entries * columns + scored


KINDS = {int(kind): kind for kind in Kind}
