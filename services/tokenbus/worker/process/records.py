"""The records and words that an engine's process and its publisher's process exchange."""

import struct
from enum import IntEnum

from tokenbus.worker.publisher import WorkerCounts

READY, WAKE = b"R", b"W"
"""The bytes on their socket: the publisher has started; there is a record to read, or room for one."""
ID_COUNT = struct.Struct("<I")
"""The head of a REFUSED record, before the ids and the message."""


class Word(IntEnum):
    """A number that one process writes, and that a new publisher reads."""

    NEXT_SEQUENCE = 0
    """Sequence of the stream's next item."""
    EMITTED = 1
    """The record that is being published, and the number of items made from it."""
    FAILED_STEPS = 2
    ENGINE_ERRORS = 3
    """As in `WorkerCounts`; written by the engine's process."""
    STARTS = 4
    """Publishers that have started."""
    SIGNS = 5
    COMMANDS = 6
    KV_CACHE = 7
    """As in `WorkerCounts`; written by the engine's process."""
    EPOCH = 8
    """The stream's epoch, if a publisher has begun a new one; else 0."""


class EngineRecord(IntEnum):
    """The kinds of records that the engine's process writes."""

    STEP = 1
    EVENT = 2
    """A RequestEvent."""
    REFUSED = 3
    """The requests of a step with invalid arrays, and the reason."""
    LOST = 4
    """The requests of steps for which there was no room; none: all requests."""
    NO_MORE = 5
    """The worker takes no new requests."""
    LEAVE = 6
    """The last record: the publisher leaves when everything is acknowledged."""


class PublisherRecord(IntEnum):
    """The kinds of records that the publisher's process writes."""

    GENERATE = 1
    ABORT = 2
    """A request that its client, or the processor, aborts."""
    ENDED = 3
    """Requests that ended because their rows could not be published."""
    CONTROL = 4


class _SharedCount:
    """An attribute that is a word of the shared memory."""

    def __init__(self, word: Word) -> None:
        self._word = word

    def __get__(self, counts: "SharedCounts | None", _: type) -> int:
        return 0 if counts is None else counts.words[self._word]

    def __set__(self, counts: "SharedCounts", count: int) -> None:
        counts.words[self._word] = count


class SharedCounts(WorkerCounts):
    """The counters of the engine's loop in shared memory, where the publisher's heartbeats and metrics read them."""

    failed_steps, engine_errors = _SharedCount(Word.FAILED_STEPS), _SharedCount(Word.ENGINE_ERRORS)
    signs, commands, kv_cache = _SharedCount(Word.SIGNS), _SharedCount(Word.COMMANDS), _SharedCount(Word.KV_CACHE)

    def __init__(self, words: memoryview) -> None:
        self.words = words
