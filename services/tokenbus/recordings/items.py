"""StreamItem: one item of a worker's stream; docs/recording.md defines its encoding in recordings and logs."""

import os
import re
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from io import SEEK_END
from pathlib import Path
from typing import BinaryIO, cast
from zlib import crc32

from google.protobuf.descriptor import Descriptor

from tokenbus_contracts import ContractError, Limits, LogprobBatch, decode
from tokenbus_contracts.frames import read_frame, write_frame
from tokenbus_contracts.generated.request_pb2 import RequestEvent
from tokenbus_contracts.generated.stream_pb2 import Gap, GapReason, Hello, Item, PayloadKind, WorkerFrame
from tokenbus_contracts.schema import max_bytes_of
from tokenbus_contracts.wire import varint

_LIMITS = Limits.schema()
_LARGEST_FRAME = max_bytes_of(cast("Descriptor", WorkerFrame.DESCRIPTOR))
_MORE = 0x80
"""The high bit of a varint byte, which announces a further byte; the other seven bits are part of the number."""
_POSITION = re.compile(r"([0-9]{1,19})\.([0-9]{1,20})")
_MOST_LIVES = 4096


@dataclass(eq=False)
class StreamItem:
    """One item of a worker's stream, as the worker published it.

    Example:
        async def tokens_of(log: str, request_id: int) -> list[int]:
            items = [item async for item in tokenbus.read_log(log, request_id=request_id)]
            rows = [row for item in items if item.batch is not None for row in item.batch.rows()]
            return [int(token) for row in rows if row.request_id == request_id for token in row.token_ids]
    """

    hello: Hello
    """Handshake of the worker, with its id, model, vocabulary, limits and schema version."""
    epoch: int
    sequence: int
    kind: PayloadKind
    payload: bytes
    missing_items: int = 0
    """Number of items of this epoch that are missing directly before this item."""
    position: str = ""
    """Position in the recording or log; a reader with `after=position` continues after this item."""
    logged_at: datetime | None = None
    """Time at which the log's server stored the item, or None if the item is not from a log."""

    @property
    def worker_id(self) -> str:
        """Id of the worker."""
        return self.hello.worker_id

    @property
    def schema_version(self) -> str:
        """Schema version of the worker, such as `1.0`."""
        return f"{self.hello.schema_major}.{self.hello.schema_minor}"

    @cached_property
    def batch(self) -> LogprobBatch | None:
        """Decoded batch, or None if the item is no batch; raises ContractError for an invalid batch."""
        return decode(self.payload, _LIMITS) if self.kind == PayloadKind.PAYLOAD_KIND_LOGPROB_BATCH else None

    @cached_property
    def event(self) -> RequestEvent | None:
        """Decoded event, or None if the item is no event; raises ContractError for an invalid event."""
        return read_frame(RequestEvent, self.payload) if self.kind == PayloadKind.PAYLOAD_KIND_REQUEST_EVENT else None

    def has_request(self, request_id: int) -> bool:
        """Return whether the item has a row or an event of a request; an invalid item has none.

        Args:
            request_id: the request's id.

        Returns:
            True if the item concerns the request.

        Example:
            def of_both(item: tokenbus.StreamItem) -> bool:
                return item.has_request(1) and item.has_request(2)
        """
        try:
            if self.batch is not None:
                return request_id in self.batch.request_ids
            body = self.event.WhichOneof("event") if self.event is not None else None
            return body is not None and getattr(self.event, body).request_id == request_id
        except ContractError:
            return False


class RecordingError(ValueError):
    """A recording is broken; the message has the file, the byte offset of the entry, and the reason."""

    def __init__(self, offset: int, reason: str, file: str = "") -> None:
        super().__init__(offset, reason, file)
        self.offset = offset
        self.reason = reason
        self.file = file

    def __str__(self) -> str:
        return f"{self.file}: byte {self.offset}: {self.reason}".removeprefix(": ")


def public_hello(hello: Hello) -> Hello:
    """Return a copy of a worker's hello without the proof and the open requests."""
    public = Hello()
    public.CopyFrom(hello)
    for name in ("proof", "request_ids", "request_owners"):
        public.ClearField(name)
    return public


class SequenceTracker:
    """Tracks the last sequence of each worker incarnation, to count missing items and detect repeated items."""

    def __init__(self) -> None:
        self._lives: OrderedDict[tuple[str, int], tuple[int, int]] = OrderedDict()
        """Last sequence, and number of items missing since the last delivered item, by incarnation."""

    def __contains__(self, life: tuple[str, int]) -> bool:
        return life in self._lives

    def count(self, item: StreamItem, *, is_given: bool = True) -> bool:
        """Set the item's `missing_items`, or return False for a repeated item."""
        life = item.worker_id, item.epoch
        last, missing = self._lives.pop(life, (item.sequence - item.missing_items - 1, 0))
        if item.sequence <= last:
            self._lives[life] = last, missing
            return False
        item.missing_items = missing + item.sequence - last - 1
        self.set(life, item.sequence, 0 if is_given else item.missing_items)
        return True

    def set(self, life: tuple[str, int], last: int, missing: int = 0) -> None:
        self._lives[life] = last, missing
        if len(self._lives) > _MOST_LIVES:
            self._lives.popitem(last=False)


def hello_entry(epoch: int, hello: Hello, first_sequence: int) -> bytes:
    """Return the encoded hello that begins a recording at `first_sequence`."""
    public = public_hello(hello)
    public.first_sequence = public.next_sequence = first_sequence
    return _delimited(write_frame(WorkerFrame(epoch=epoch, hello=public)))


def item_entry(epoch: int, sequence: int, kind: PayloadKind, payload: bytes) -> bytes:
    item = Item(sequence=sequence, payload_kind=kind, payload_bytes=len(payload), payload_crc32=crc32(payload))
    return _delimited(write_frame(WorkerFrame(epoch=epoch, item=item))) + payload


def gap_entry(epoch: int, first: int, last: int) -> bytes:
    """Return an entry in place of missing items."""
    gap = Gap(first_sequence=first, last_sequence=last, reason=GapReason.GAP_REASON_RETENTION)
    return _delimited(write_frame(WorkerFrame(epoch=epoch, gap=gap)))


def _delimited(message: bytes) -> bytes:
    return varint(len(message)) + message


@dataclass(slots=True)
class Recorder:
    """Encodes a recording of one worker incarnation."""

    epoch: int
    hello: Hello
    first_sequence: int = 0
    """First sequence of the recording, set by the caller or else by the first item."""
    last_sequence: int = 0
    items: int = 0
    payload_bytes: int = 0
    gaps: int = 0
    repeated_items: int = 0

    @property
    def missing_items(self) -> int:
        """Number of missing items before the last item."""
        return self.last_sequence - self.first_sequence + 1 - self.items if self.items else 0

    def add(self, item: StreamItem) -> bytes:
        """Return the encoded bytes of an item, or nothing for a repeated item."""
        data = b""
        if not self.items:
            self.first_sequence = self.first_sequence or item.sequence
            self.last_sequence = self.first_sequence - 1
            data = hello_entry(self.epoch, self.hello, self.first_sequence)
        elif item.sequence <= self.last_sequence:
            self.repeated_items += 1  # the worker has resent the item to a restarted processor
            return data
        if item.sequence > self.last_sequence + 1:
            self.gaps += 1
            data += gap_entry(self.epoch, self.last_sequence + 1, item.sequence - 1)
        self.last_sequence = item.sequence
        self.items += 1
        self.payload_bytes += len(item.payload)
        return data + item_entry(self.epoch, item.sequence, item.kind, item.payload)


def read_recording(path: str | os.PathLike[str], *, after: str | None = None) -> Iterator[StreamItem]:
    """Iterate over the items of a recording by `tokenbus record`, with one item in memory at a time.

    Args:
        path: the file.
        after: the `position` of an item, after which reading continues; default: the beginning.

    Returns:
        an iterator of `StreamItem`.

    Raises:
        OSError: the file cannot be read.
        RecordingError: the recording is broken; all items before the fault are returned first.
        ValueError: `after` is not a position.

    Example:
        def tokens_of(path: str) -> int:
            return sum(item.batch.token_ids.size for item in tokenbus.read_recording(path) if item.batch is not None)
    """
    position = None
    if after is not None:
        if (match := _POSITION.fullmatch(after)) is None:
            raise ValueError(f"after: expected the position of an item of a recording, got {after[:80]!r}")
        position = int(match[1]), int(match[2])
    return _read_file(Path(path), position)


def _read_file(path: Path, position: tuple[int, int] | None) -> Iterator[StreamItem]:
    with path.open("rb") as file:
        yield from read_items(file, name=str(path), after=position)


def read_items(file: BinaryIO, *, name: str = "", after: tuple[int, int] | None = None) -> Iterator[StreamItem]:
    """Yield the items of a recording after the position `after`, a pair of byte offset and sequence.

    The byte offset is the end of an entry. `name` is the file's name in errors. Raises RecordingError.
    """
    entries = _Entries(file, name)
    try:
        begin = entries.next()
    except RecordingError as error:
        raise entries.error(f"not a recording: no hello at the beginning: {error.reason}") from None
    if begin is None or begin.WhichOneof("body") != "hello":
        got = "an empty file" if begin is None else f"the frame {begin.WhichOneof('body')}"
        raise entries.error(f"not a recording: expected a hello at the beginning, got {got}")
    expected, missing = begin.hello.next_sequence, 0
    if after is not None:
        entries.seek(after[0])
        expected = after[1] + 1
    while (frame := entries.next()) is not None:
        if frame.epoch != begin.epoch:
            raise entries.error(f"epoch {begin.epoch}, as in the hello, got {frame.epoch}")
        if frame.WhichOneof("body") is None:  # a newer minor version added this kind of frame
            continue
        last = entries.last_sequence(frame, expected)
        if frame.HasField("gap"):
            missing += last + 1 - expected
        else:
            payload, kind = entries.payload(frame.item), frame.item.payload_kind
            yield StreamItem(begin.hello, begin.epoch, last, kind, payload, missing, f"{entries.end}.{last}")
            missing = 0
        expected = last + 1
    if missing:
        raise entries.error("an item after the gap, got the file's end")


class _Entries:
    """Reads the entries of a recording."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self._name = name
        self.end = 0
        """Byte offset of the end of the last entry."""
        self._begin = 0
        """Byte offset of the last entry."""

    def error(self, reason: str) -> RecordingError:
        return RecordingError(self._begin, reason, self._name)

    def seek(self, offset: int) -> None:
        """Continue with the entry at an offset; raises RecordingError for an offset beyond the end of the file."""
        if (size := self._file.seek(0, SEEK_END)) < offset:
            raise self.error(f"position {offset} is beyond the file's end, {size}")
        self._file.seek(offset)
        self.end = offset

    def next(self) -> WorkerFrame | None:
        """Return the next frame, or None at the end of the file."""
        if not (byte := self._file.read(1)):
            return None
        self._begin, self.end = self.end, self.end + 1
        size = byte[0] % _MORE
        for shift in (7, 14):
            if byte[0] >= _MORE:
                byte = self._read(1, "its size")
                size |= byte[0] % _MORE << shift
        if size > _LARGEST_FRAME or byte[0] >= _MORE:
            raise self.error(f"a frame of at most {_LARGEST_FRAME} bytes, got a larger one")
        data = self._read(size, "its frame")
        try:
            return read_frame(WorkerFrame, data)
        except ContractError as error:
            raise self.error(str(error)) from None

    def last_sequence(self, frame: WorkerFrame, expected: int) -> int:
        """Return the last sequence of an item or a gap; raises RecordingError if the first is not `expected`."""
        match frame.WhichOneof("body"):
            case "item":
                first = last = frame.item.sequence
            case "gap":
                first, last = frame.gap.first_sequence, frame.gap.last_sequence
            case body:
                raise self.error(f"expected an item or a gap, got the frame {body}")
        if first != expected:
            raise self.error(f"sequence {expected}, got {first}")
        if last < first:
            raise self.error(f"a gap from {first} to {first} or later, got {last}")
        return last

    def payload(self, item: Item) -> bytes:
        payload = self._read(item.payload_bytes, "its payload")
        if item.HasField("payload_crc32") and item.payload_crc32 != (found := crc32(payload)):
            limit = f"item {item.sequence}: a payload with the CRC-32 {item.payload_crc32:#010x}"
            raise self.error(f"{limit}, got {found:#010x}")
        return payload

    def _read(self, size: int, part: str) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            raise self.error(f"the file ends within the entry: {part} needs {size} bytes, got {len(data)}")
        self.end += size
        return data
