"""Conversation: the numbered frames between one connection and its listener, in both directions.

NATS tells a publisher nothing of its subscribers, so what may be unread is bounded here: each side says how far it has
read, and the other keeps what is beyond the window. A frame whose number is not the next ends the conversation.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from tokenbus_services.bus.nats_frames import HEAD_BYTES, LEAST_PIECE, Frame, Kind, joined, pieces, split
from tokenbus_services.bus.transport import Parts, check_message
from tokenbus_services.settings import BusSettings

_WINDOW = 256
_WINDOW_BYTES = 1_048_576
"""The most that is sent ahead of what was read, in messages, and in bytes before the last of them."""
_READ_EACH = 4
"""How often within a window the reader says how far it is."""
_MOST_EMPTY = 64
"""How many frames in a row, between two heartbeats of this side, may carry nothing and acknowledge nothing."""


def most_frames(max_payload: int, settings: BusSettings) -> int:
    """Return how many frames a side may have sent that keeps to the window, although none of them was taken yet."""
    return 2 * _WINDOW + (_WINDOW_BYTES + settings.max_pending_bytes) // (max_payload - HEAD_BYTES)


class BrokenConversationError(Exception):
    """The conversation has ended: a frame is missing, or wrong, or too much is unread."""

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
