"""Recordings: one worker's stream as a file, and back. Pure functions of bytes; docs/recording.md has the format."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import cast
from zlib import crc32

from google.protobuf.descriptor import Descriptor

from tokenbus_contracts import ContractError
from tokenbus_contracts.frames import read_frame, write_frame
from tokenbus_contracts.generated.stream_pb2 import Gap, GapReason, Hello, Item, PayloadKind, WorkerFrame
from tokenbus_contracts.schema import max_bytes_of

_LARGEST_FRAME = max_bytes_of(cast("Descriptor", WorkerFrame.DESCRIPTOR))
_LONGEST_SIZE = 3
"""Bytes of the varint of the largest frame's size."""
_MORE = 0x80
_BITS = 7


class RecordingError(ValueError):
    """A recording is broken: the offset of the entry that cannot be read, in bytes, and the reason."""

    def __init__(self, offset: int, reason: str) -> None:
        """Keep both."""
        super().__init__(offset, reason)
        self.offset = offset
        self.reason = reason

    def __str__(self) -> str:
        """Return one line with both."""
        return f"byte {self.offset}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Entry:
    """One frame of a recording, the payload that follows it if it is an item's, and where it begins, in bytes."""

    offset: int
    frame: WorkerFrame
    payload: bytes = b""


def hello_entry(epoch: int, hello: Hello, first_sequence: int) -> bytes:
    """Return the first entry of a recording that starts at a sequence, without the worker's proof of identity."""
    begun = Hello()
    begun.CopyFrom(hello)
    for name in ("proof", "handoff_ticket", "handoff_server_key", "request_keys", "request_owners"):
        begun.ClearField(name)
    begun.first_sequence = begun.next_sequence = first_sequence
    return _framed(WorkerFrame(epoch=epoch, hello=begun))


def item_entry(epoch: int, sequence: int, kind: PayloadKind, payload: bytes) -> bytes:
    """Return an item as it is recorded."""
    item = Item(sequence=sequence, payload_kind=kind, payload_bytes=len(payload), payload_crc32=crc32(payload))
    return _framed(WorkerFrame(epoch=epoch, item=item)) + payload


def gap_entry(epoch: int, first: int, last: int) -> bytes:
    """Return what is recorded in place of items that were not seen."""
    gap = Gap(first_sequence=first, last_sequence=last, reason=GapReason.GAP_REASON_RETENTION)
    return _framed(WorkerFrame(epoch=epoch, gap=gap))


def entries(chunks: Iterable[bytes]) -> Iterator[Entry]:
    """Yield the entries of a recording that comes in pieces of any size; its first fault is a RecordingError.

    No more of it is held than one entry and one piece.
    """
    reader = _Reader(chunks)
    order = _Order()
    while (size := reader.size()) is not None:
        entry = reader.entry(size)
        order.check(entry)
        if entry.frame.WhichOneof("body") is not None:  # else a newer minor's
            yield entry
    if order.epoch is None:
        raise RecordingError(0, "a recording begins with a hello, got an empty file")


class Recorder:
    """Writes the items of one stream as a recording."""

    def __init__(self, epoch: int, hello: Hello) -> None:
        """Take the stream's epoch and hello; nothing is recorded before the first item."""
        self._hello = hello
        self.epoch = epoch
        self.first_sequence = 0
        self.last_sequence = 0
        self.items = 0
        self.payload_bytes = 0
        self.missing_items = 0
        self.gaps = 0
        self.repeated_items = 0

    def add(self, sequence: int, kind: PayloadKind, payload: bytes) -> bytes:
        """Return the bytes to write for an item; none for one that was seen before."""
        if self.items and sequence <= self.last_sequence:
            self.repeated_items += 1  # its worker sent it again, to a processor that was started again
            return b""
        before = b""
        if not self.items:
            self.first_sequence = sequence
            before = hello_entry(self.epoch, self._hello, sequence)
        elif sequence > self.last_sequence + 1:
            self.gaps += 1
            self.missing_items += sequence - self.last_sequence - 1
            before = gap_entry(self.epoch, self.last_sequence + 1, sequence - 1)
        self.last_sequence = sequence
        self.items += 1
        self.payload_bytes += len(payload)
        return before + item_entry(self.epoch, sequence, kind, payload)


def _framed(frame: WorkerFrame) -> bytes:
    data = write_frame(frame)
    size, head = len(data), bytearray()
    while size >= _MORE:
        head.append(size % _MORE | _MORE)
        size >>= _BITS
    return bytes([*head, size]) + data


class _Reader:
    """Reads entries off the front of the bytes that have come."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._held = bytearray()
        self._offset = 0
        """Of what is held, in the recording."""
        self._begin = 0
        """Of the entry that is being read."""

    def size(self) -> int | None:
        """Take the size of the next frame; None at the end."""
        self._begin = self._offset
        if not self._has(1):
            return None
        size = 0
        for place in range(_LONGEST_SIZE):
            (byte,) = self._take(1, "its size")
            size |= (byte % _MORE) << (_BITS * place)
            if byte < _MORE:
                break
        else:
            raise RecordingError(self._begin, f"a frame of at most {_LARGEST_FRAME} bytes, got a larger one")
        if size > _LARGEST_FRAME:
            raise RecordingError(self._begin, f"a frame of at most {_LARGEST_FRAME} bytes, got {size}")
        return size

    def entry(self, size: int) -> Entry:
        """Take a frame of that size, and the payload that it announces."""
        data = self._take(size, "its frame")
        try:
            frame = read_frame(WorkerFrame, data)
        except ContractError as error:
            raise RecordingError(self._begin, str(error)) from None
        payload = b""
        if frame.WhichOneof("body") == "item":
            payload = self._take(frame.item.payload_bytes, "its payload")
            found = crc32(payload)
            if frame.item.HasField("payload_crc32") and frame.item.payload_crc32 != found:
                limit = f"item {frame.item.sequence}: a payload with the CRC-32 {frame.item.payload_crc32:#010x}"
                raise RecordingError(self._begin, f"{limit}, got {found:#010x}")
        return Entry(self._begin, frame, payload)

    def _has(self, size: int) -> bool:
        while len(self._held) < size:
            chunk = next(self._chunks, None)
            if chunk is None:
                return False
            self._held += chunk
        return True

    def _take(self, size: int, what: str) -> bytes:
        if not self._has(size):
            raise RecordingError(
                self._begin, f"the file ends within the entry: {what} needs {size} bytes, got {len(self._held)}"
            )
        taken = bytes(memoryview(self._held)[:size])
        del self._held[:size]
        self._offset += size
        return taken


class _Order:
    """Checks which entry may come next."""

    def __init__(self) -> None:
        self.epoch: int | None = None
        self._expected = 0

    def check(self, entry: Entry) -> None:
        """Refuse an entry that does not follow the one before."""
        frame, body = entry.frame, entry.frame.WhichOneof("body")
        if self.epoch is None:
            if body != "hello":
                raise RecordingError(entry.offset, f"a recording begins with a hello, got {_named(body)}")
            self.epoch, self._expected = frame.epoch, frame.hello.next_sequence
            return
        if frame.epoch != self.epoch:
            raise RecordingError(entry.offset, f"epoch {self.epoch}, as in the hello, got {frame.epoch}")
        if body == "item":
            self._follow(entry, frame.item.sequence, frame.item.sequence)
        elif body == "gap":
            self._follow(entry, frame.gap.first_sequence, frame.gap.last_sequence)
        elif body is not None:
            raise RecordingError(entry.offset, f"an item or a gap, got {_named(body)}")

    def _follow(self, entry: Entry, first: int, last: int) -> None:
        if first != self._expected:
            raise RecordingError(entry.offset, f"sequence {self._expected}, got {first}")
        if last < first:
            raise RecordingError(entry.offset, f"a gap from {first} to {first} or later, got {last}")
        self._expected = last + 1


def _named(body: str | None) -> str:
    return "a frame that a newer minor version brought" if body is None else f"the frame {body}"
