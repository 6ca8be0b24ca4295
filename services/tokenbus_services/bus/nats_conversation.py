"""Conversation: the numbered frames between one connection and its listener over NATS, in both directions.

NATS carries payloads of at most the server's `max_payload` bytes, may drop one, and tells a publisher nothing of its
subscribers. So each payload is a frame with a number, which shows what is missing; a message goes in as many frames as
it needs; and each side says how far it has read, while the other keeps what is beyond the window.
"""

import asyncio
import struct
from collections import deque
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import NamedTuple

from tokenbus_services.bus.errors import MessageError
from tokenbus_services.bus.transport import Parts, check_message
from tokenbus_services.settings import BusSettings

VERSION = b"tokenbus 1"
"""The payload of OPEN: another version is another protocol."""
_HEAD = struct.Struct("<BQQ")
_COUNT = struct.Struct("<I")
_MOST_PARTS = 1024
LEAST_PAYLOAD = 1024
"""The least `max_payload` of a server with which a conversation is of use."""
LEAST_PIECE = LEAST_PAYLOAD // 2
"""The least bytes of a frame that is not the last of its message."""
_WINDOW = 256
_WINDOW_BYTES = 1_048_576
"""The most that is sent ahead of what was read, in messages, and in bytes before the last of them."""
_READ_EACH = 4
"""How often within a window the reader says how far it is."""
_MOST_EMPTY = 64
"""How many frames in a row, between two heartbeats of this side, may carry nothing and acknowledge nothing."""


class Kind(IntEnum):
    """What a frame is."""

    OPEN = 1
    """Begins a conversation; it is repeated until a listener answers."""
    WELCOME = 2
    """Answers it."""
    MORE = 3
    """A message's bytes, but for the last of them."""
    LAST = 4
    """A message's last bytes."""
    READ = 5
    """Nothing but how far was read."""
    END = 6
    """The sender has left the conversation, or knows of none."""


class Frame(NamedTuple):
    """One payload."""

    kind: Kind
    number: int
    """Within the conversation, from 1 in each direction; 0: OPEN, WELCOME and END, which may come at any time."""
    read: int
    """The number of the last frame whose message the sender's application has taken."""
    data: bytes = b""

    def packed(self) -> bytes:
        """Return its bytes."""
        return _HEAD.pack(self.kind, self.number, self.read) + self.data


HELLO = Frame(Kind.OPEN, 0, 0, VERSION).packed()
"""A peer's first frame; the id that it drew stands behind it."""
WELCOME = Frame(Kind.WELCOME, 0, 0).packed()
END = Frame(Kind.END, 0, 0).packed()


def unpacked(payload: bytes) -> Frame:
    """Return a payload's frame; raises ValueError if it is none."""
    if len(payload) < _HEAD.size:
        raise ValueError(f"a frame of at least {_HEAD.size} bytes, got {len(payload)}")
    kind, number, read = _HEAD.unpack_from(payload)
    return Frame(Kind(kind), number, read, payload[_HEAD.size :])


def joined(parts: Parts, most: int) -> bytes:
    """Return a message as one text of bytes; raises MessageError if it is larger than `most`, or has too many parts."""
    if len(parts) > _MOST_PARTS:
        raise MessageError(f"at most {_MOST_PARTS} parts", len(parts))
    message = b"".join((struct.pack(f"<{len(parts) + 1}I", len(parts), *map(len, parts)), *parts))
    if len(message) > most:
        raise MessageError(f"at most {most} bytes", len(message))
    return message


def split(message: bytes, max_part_bytes: int) -> list[bytes]:
    """Return the parts of a message; raises ValueError if it is none, or has a part that is too large."""
    count = _COUNT.unpack_from(message)[0] if len(message) >= _COUNT.size else 0
    if not 1 <= count <= _MOST_PARTS or len(message) < (count + 1) * _COUNT.size:
        raise ValueError(f"1 to {_MOST_PARTS} parts, got {count} in {len(message)} bytes")
    sizes = struct.unpack_from(f"<{count}I", message, _COUNT.size)
    start = (count + 1) * _COUNT.size
    if max(sizes) > max_part_bytes or start + sum(sizes) != len(message):
        raise ValueError(f"parts of at most {max_part_bytes} bytes that fill the message, got one of {max(sizes)}")
    parts = []
    for size in sizes:
        parts.append(message[start : start + size])
        start += size
    return parts


def pieces(message: bytes, max_payload: int) -> Iterator[tuple[Kind, bytes]]:
    """Yield a message's bytes as they fit into frames, each with its kind."""
    size = max_payload - _HEAD.size
    if len(message) <= size:
        yield Kind.LAST, message
        return
    for start in range(0, len(message), size):
        yield Kind.LAST if start + size >= len(message) else Kind.MORE, message[start : start + size]


def most_frames(max_payload: int, settings: BusSettings) -> int:
    """Return how many frames a side may have sent that keeps to the window, although none of them was taken yet."""
    return 2 * _WINDOW + (_WINDOW_BYTES + settings.max_pending_bytes) // (max_payload - _HEAD.size)


class BrokenConversationError(ValueError):
    """The conversation has ended: a frame is missing, or wrong, or too much is unread; `kind` is the exceeded bound."""

    def __init__(self, reason: str, kind: str = "") -> None:
        super().__init__(reason)
        self.kind = kind


class Conversation:
    """One side of it. What is queued outlives it: the next conversation sends that."""

    def __init__(self, queue: deque[bytes], settings: BusSettings) -> None:
        """Take the messages that wait to be sent; nothing is sent before `begin`."""
        self.inbox: deque[tuple[int, int, list[bytes]]] = deque()  # bounded by the window, and by:
        """Messages that were not read: the number of the last frame, the bytes, and the parts."""
        self.unread_bytes = 0
        self.most_unread_bytes = settings.max_pending_bytes
        self._settings = settings
        self._queue = queue
        self._publish: Callable[[bytes], None] | None = None
        self._max_payload = 0
        self._sent = self._received = self._read = self._acknowledged = 0  # numbers of frames
        self._in_flight: deque[tuple[int, int]] = deque()  # bounded by the window
        self._in_flight_bytes = 0
        self.sent = asyncio.Event()
        """Set while nothing is queued."""
        if not queue:
            self.sent.set()
        self._unfinished = bytearray()  # not a list: frames of a byte each would take forty times as much
        self._unsaid = self._unsaid_bytes = 0
        self._empty = 0

    def begin(self, publish: Callable[[bytes], None], max_payload: int) -> None:
        """Send what is queued, and what comes, in payloads of so many bytes."""
        self._publish, self._max_payload = publish, max_payload
        self._fill_window()

    def end(self) -> None:
        """Send and take nothing more; what was received whole can still be read."""
        self._publish = None
        self.unread_bytes -= len(self._unfinished)
        self._unfinished.clear()

    def drop_unread(self) -> None:
        """Forget what was received."""
        self.inbox.clear()
        self._unfinished.clear()
        self.unread_bytes = 0

    def send(self, parts: Parts) -> bool:
        """Queue a message, and send it as soon as the window lets it; False: the queue is full."""
        check_message(parts, self._settings.max_part_bytes)
        if len(self._queue) >= self._settings.high_water_mark:
            return False
        self.sent.clear()
        self._queue.append(joined(parts, self._settings.max_pending_bytes))
        self._fill_window()
        return True

    def take(self, frame: Frame) -> None:
        """Take a frame; raises BrokenConversationError."""
        if frame.number != self._received + 1:
            raise BrokenConversationError(f"frame {frame.number} came, expected {self._received + 1}")
        self._received = frame.number
        if frame.read > self._sent:
            raise BrokenConversationError(f"it has read frame {frame.read}, of {self._sent}")
        self._count_empty(frame)
        while self._in_flight and self._in_flight[0][0] <= frame.read:
            self._in_flight_bytes -= self._in_flight.popleft()[1]
        if frame.kind is not Kind.READ:
            self._take_piece(frame)
        self._fill_window()

    def _count_empty(self, frame: Frame) -> None:
        """Refuse an endless run of frames that no bound on bytes or messages would stop."""
        if frame.kind is Kind.MORE and len(frame.data) < LEAST_PIECE:
            raise BrokenConversationError(
                f"{len(frame.data)} bytes of a longer message, at least {LEAST_PIECE}", "bytes"
            )
        self._empty = self._empty + 1 if frame.kind is Kind.READ and frame.read == self._acknowledged else 0
        self._acknowledged = frame.read
        if self._empty > _MOST_EMPTY:
            raise BrokenConversationError(f"more than {_MOST_EMPTY} frames that say nothing", "bytes")

    def beat(self) -> None:
        """Learn that a heartbeat's interval has passed."""
        self._empty = 0

    def _take_piece(self, frame: Frame) -> None:
        self.unread_bytes += len(frame.data)
        if self.unread_bytes > self.most_unread_bytes:
            reason = f"{self.unread_bytes} bytes that are unfinished or unread, more than {self.most_unread_bytes}"
            raise BrokenConversationError(reason, "bytes")
        if frame.kind is Kind.MORE:
            self._unfinished += frame.data
            return
        if len(self.inbox) >= _WINDOW:
            raise BrokenConversationError(f"more than {_WINDOW} messages that are unread", "bytes")
        message = bytes(self._unfinished + frame.data) if self._unfinished else frame.data
        self._unfinished.clear()
        try:
            self.inbox.append((frame.number, len(message), split(message, self._settings.max_part_bytes)))
        except ValueError as error:
            raise BrokenConversationError(str(error), "bytes") from None

    def read(self) -> list[bytes]:
        """Return the oldest message of the inbox, and tell the sender now and then how far that is."""
        self._read, size, parts = self.inbox.popleft()
        self.unread_bytes -= size
        self._unsaid += 1
        self._unsaid_bytes += size
        if self._unsaid * _READ_EACH >= _WINDOW or self._unsaid_bytes * _READ_EACH >= _WINDOW_BYTES:
            self.say_read()
        return parts

    def say_read(self) -> None:
        """Tell the other side how far was read, and that this one is there."""
        self._send(Kind.READ, b"")

    def _fill_window(self) -> None:
        while self._publish is not None and self._queue:
            if len(self._in_flight) >= _WINDOW or self._in_flight_bytes >= _WINDOW_BYTES:
                return
            message = self._queue.popleft()
            for kind, piece in pieces(message, self._max_payload):
                self._send(kind, piece)
            self._in_flight.append((self._sent, len(message)))
            self._in_flight_bytes += len(message)
        if not self._queue:
            self.sent.set()

    def _send(self, kind: Kind, data: bytes) -> None:
        if self._publish is not None:
            self._sent += 1
            self._unsaid = self._unsaid_bytes = 0
            self._publish(Frame(kind, self._sent, self._read, data).packed())
