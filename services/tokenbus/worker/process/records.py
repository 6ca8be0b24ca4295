"""The records and words that an engine's process and its publisher's process exchange."""

import struct
from enum import IntEnum

from tokenbus.worker.publisher import WorkerCounts

READY, WAKE = b"R", b"W"
"""Bytes on the socket. READY: the publisher has started. WAKE: the reader has records, or the writer has free space."""
ID_COUNT = struct.Struct("<I")
"""Head of a REFUSED record, before the ids and the message."""


class Word(IntEnum):
    """Index of a number in the shared memory. One process writes the number, and the next publisher reads it."""

    NEXT_SEQUENCE = 0
    """Sequence of the stream's next item."""
    EMITTED = 1
    """Number of the record that is being published, and number of the items made from the record."""
    FAILED_STEPS = 2
    ENGINE_ERRORS = 3
    """Counter of `WorkerCounts`, which the engine's process writes."""
    STARTS = 4
    """Number of publishers that have started."""
    SIGNS = 5
    COMMANDS = 6
    KV_CACHE = 7
    """Counter of `WorkerCounts`, which the engine's process writes."""
    EPOCH = 8
    """Epoch of the stream if a publisher has begun a new epoch, and 0 otherwise."""


class EngineRecord(IntEnum):
    """Kinds of records that the engine's process writes."""

    STEP = 1
    EVENT = 2
    """An encoded RequestEvent."""
    REFUSED = 3
    """Requests of a step that was refused because its arrays are invalid, and the reason."""
    LOST = 4
    """Requests that lost rows because the ring was full. A record without ids means all requests of the stream."""
    NO_MORE = 5
    """Notice that the worker takes no new requests."""
    LEAVE = 6
    """Last record, after which the publisher leaves as soon as everything is acknowledged."""


class PublisherRecord(IntEnum):
    """Kinds of records that the publisher's process writes."""

    GENERATE = 1
    ABORT = 2
    """Id of a request that its client or the processor aborts."""
    ENDED = 3
    """Requests that ended because their rows could not be published."""
    CONTROL = 4


class _SharedCount:
    """Descriptor for an attribute whose value is a word of the shared memory."""

    def __init__(self, word: Word) -> None:
        self._word = word

    def __get__(self, counts: "SharedCounts | None", _: type) -> int:
        return 0 if counts is None else counts.words[self._word]

    def __set__(self, counts: "SharedCounts", count: int) -> None:
        counts.words[self._word] = count


class SharedCounts(WorkerCounts):
    """Counters of the engine's loop in shared memory, for the publisher's heartbeats and metrics."""

    failed_steps, engine_errors = _SharedCount(Word.FAILED_STEPS), _SharedCount(Word.ENGINE_ERRORS)
    signs, commands, kv_cache = _SharedCount(Word.SIGNS), _SharedCount(Word.COMMANDS), _SharedCount(Word.KV_CACHE)

    def __init__(self, words: memoryview) -> None:
        self.words = words
