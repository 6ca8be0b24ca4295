"""Recordings: one worker's stream as a file, and back. Pure functions of bytes; docs/recording.md has the format."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, cast
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
    for name in ("proof", "handoff_ticket", "handoff_key", "handoff_server_key", "request_keys", "request_owners"):
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


def entries(file: BinaryIO) -> Iterator[Entry]:
    """Yield the entries of a recording; its first fault is a RecordingError. No more than one entry is held."""
    reader = _Reader(file)
    begin = reader.entry()
    if begin is None or (body := begin.frame.WhichOneof("body")) != "hello":
        got = "an empty file" if begin is None else _named(body)
        raise RecordingError(0, f"a recording begins with a hello, got {got}")
    yield begin
    expected = begin.frame.hello.next_sequence
    while (entry := reader.entry()) is not None:
        expected = _sequence_after(entry, begin.frame.epoch, expected)
        if entry.frame.WhichOneof("body") is not None:  # else a newer minor's
            yield entry


@dataclass(slots=True)
class Recorder:
    """Writes the items of one stream, of an epoch and a hello, as a recording; nothing before the first item."""

    epoch: int
    hello: Hello
    first_sequence: int = 0
    last_sequence: int = 0
    items: int = 0
    payload_bytes: int = 0
    missing_items: int = 0
    gaps: int = 0
    repeated_items: int = 0

    def add(self, sequence: int, kind: PayloadKind, payload: bytes) -> bytes:
        """Return the bytes to write for an item; none for one that was seen before."""
        if self.items and sequence <= self.last_sequence:
            self.repeated_items += 1  # its worker sent it again, to a processor that was started again
            return b""
        before = b""
        if not self.items:
            self.first_sequence = sequence
            before = hello_entry(self.epoch, self.hello, sequence)
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
    """Reads a file entry by entry."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._offset = 0
        self._begin = 0
        """Of the entry that is being read."""

    def entry(self) -> Entry | None:
        """Take the next frame and the payload that it announces; None at the end."""
        self._begin = self._offset
        first = self._file.read(1)
        if not first:
            return None
        self._offset += 1
        data = self._take(self._size(first[0]), "its frame")
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

    def _size(self, byte: int) -> int:
        """Return the size of a frame, of which the first byte was read."""
        size, place = byte % _MORE, 1
        while byte >= _MORE:
            if place == _LONGEST_SIZE:
                raise RecordingError(self._begin, f"a frame of at most {_LARGEST_FRAME} bytes, got a larger one")
            (byte,) = self._take(1, "its size")
            size |= (byte % _MORE) << (_BITS * place)
            place += 1
        if size > _LARGEST_FRAME:
            raise RecordingError(self._begin, f"a frame of at most {_LARGEST_FRAME} bytes, got {size}")
        return size

    def _take(self, size: int, what: str) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            raise RecordingError(
                self._begin, f"the file ends within the entry: {what} needs {size} bytes, got {len(data)}"
            )
        self._offset += size
        return data


def _sequence_after(entry: Entry, epoch: int, expected: int) -> int:
    """Return the sequence that follows an entry; one that does not have the expected sequence is refused."""
    frame, body = entry.frame, entry.frame.WhichOneof("body")
    if frame.epoch != epoch:
        raise RecordingError(entry.offset, f"epoch {epoch}, as in the hello, got {frame.epoch}")
    match body:
        case None:
            return expected
        case "item":
            first = last = frame.item.sequence
        case "gap":
            first, last = frame.gap.first_sequence, frame.gap.last_sequence
        case _:
            raise RecordingError(entry.offset, f"an item or a gap, got {_named(body)}")
    if first != expected:
        raise RecordingError(entry.offset, f"sequence {expected}, got {first}")
    if last < first:
        raise RecordingError(entry.offset, f"a gap from {first} to {first} or later, got {last}")
    return last + 1


def _named(body: str | None) -> str:
    return "a frame that a newer minor version brought" if body is None else f"the frame {body}"
