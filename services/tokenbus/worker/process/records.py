"""What an engine's process and its publisher's tell each other: records, and words that outlive a publisher."""

import struct
from dataclasses import fields
from enum import IntEnum

from tokenbus.worker.publisher import WorkerCounts

READY, WAKE = b"R", b"W"
"""What goes over their socket: that the publisher has started, and that there is something to take, or room."""
UNKNOWN = -1
ADMITTED = struct.Struct("<QQq")
"""A request's id, the length of its prompt, and how many tokens of it were cached, or UNKNOWN."""
FAILED = struct.Struct("<QI")
"""A request's id, and the error's code; its message follows."""
IDS = struct.Struct("<I")
"""How many ids follow, and then the message."""


class Word(IntEnum):
    """A number that one side writes, and that a new publisher reads."""

    NEXT_SEQUENCE = 0
    """Of the stream's next item."""
    EMITTED = 1
    """The record that is being published, and how many items it has made so far."""
    FAILED_STEPS = 2
    ENGINE_ERRORS = 3
    """As `WorkerCounts` has both; the engine's process writes them."""
    STARTS = 4
    """How many publishers there were."""
    SIGNS = 5
    COMMANDS = 6
    KV_CACHE = 7
    """As `WorkerCounts` has the three; the engine's process writes them."""
    EPOCH = 8
    """The stream's, once a publisher has begun another one."""


class EngineRecord(IntEnum):
    """The kinds of records that the engine's process writes."""

    STEP = 1
    ADMITTED = 2
    FAILED = 3
    REFUSED = 4
    """A step whose arrays are none: why, and its requests."""
    LOST = 5
    """The requests of steps that found no room."""
    NO_MORE = 6
    """It takes no new requests."""
    LEAVE = 7
    """It hands nothing more over: the publisher is to leave when all is acknowledged."""
    SCORED = 8
    """A chunk of a prompt's scores, as the message that it is."""
    CONTROLLED = 9
    """What became of a command, as the message that it is."""
    PREFILLED = 10
    """A request's transfer state, as the message that it is."""


class PublisherRecord(IntEnum):
    """The kinds of records that the publisher's process writes."""

    GENERATE = 1
    ABORT = 2
    """A request that its client, or the processor, ends."""
    ENDED = 3
    """Requests that ended because their rows could not be published."""
    CONTROL = 4


class _Shared:
    """An attribute that is a word of the shared memory."""

    def __init__(self, word: Word) -> None:
        self._word = word

    def __get__(self, counts: "SharedCounts | None", _: type) -> int:
        return 0 if counts is None else counts.words[self._word]

    def __set__(self, counts: "SharedCounts", count: int) -> None:
        counts.words[self._word] = count


class SharedCounts(WorkerCounts):
    """A worker's counters, of which those of the engine's loop are where the publisher's metrics find them."""

    failed_steps, engine_errors = _Shared(Word.FAILED_STEPS), _Shared(Word.ENGINE_ERRORS)
    signs, commands, kv_cache = _Shared(Word.SIGNS), _Shared(Word.COMMANDS), _Shared(Word.KV_CACHE)

    def __init__(self, words: memoryview) -> None:
        """Use the words as they are, since the engine's process writes them too, and begin all other counts at zero."""
        self.words = words
        for count in fields(WorkerCounts):
            if not isinstance(vars(SharedCounts).get(count.name), _Shared):
                setattr(self, count.name, 0)
