"""StreamItem: one item of a worker's stream, and its encoding in recordings and in the messages of a durable log.

docs/recording.md has the format.
"""

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
"""The bit of a varint's byte that says that another byte follows."""
_BITS = 7
"""How many bits of a number each byte of a varint has."""
_LONGEST_SIZE = 3 * _BITS
"""How many bits the size of a frame may have."""
_POSITION = re.compile(r"([0-9]{1,19})\.([0-9]{1,20})")
_MOST_LIVES = 4096


@dataclass(eq=False)
class StreamItem:
    """One item of a worker's stream, as the worker published it.

    Example:
        async def tokens_of(log: str, request_id: int) -> list[int]:
            items = [item async for item in tokenbus.read_log(log, request_id=request_id)]
            rows = [row for item in items if item.batch is not None for row in item.batch.rows()]
            return [int(token) for row in rows if row.key == request_id for token in row.token_ids]
    """

    hello: Hello
    """The worker's handshake: its id, model, vocabulary, limits and schema version."""
    epoch: int
    sequence: int
    kind: PayloadKind
    payload: bytes
    missing_items: int = 0
    """How many items of this epoch are missing between the item before, as far as the reader had it, and this one."""
    position: str = ""
    """Its place in the recording or log: a reader with `after=position` goes on behind this item."""
    logged_at: datetime | None = None
    """When the log's server took it; None: the item is not from a log."""

    @property
    def worker_id(self) -> str:
        """The worker that published it."""
        return self.hello.worker_id

    @property
    def schema_version(self) -> str:
        """The worker's version of the schema, as `1.0`."""
        return f"{self.hello.schema_major}.{self.hello.schema_minor}"

    @cached_property
    def batch(self) -> LogprobBatch | None:
        """The batch; None if the item is none. Raises ContractError for a batch that breaks the contract."""
        return decode(self.payload, _LIMITS) if self.kind == PayloadKind.PAYLOAD_KIND_LOGPROB_BATCH else None

    @cached_property
    def event(self) -> RequestEvent | None:
        """The request event; None if the item is none. Raises ContractError for one that breaks the contract."""
        return read_frame(RequestEvent, self.payload) if self.kind == PayloadKind.PAYLOAD_KIND_REQUEST_EVENT else None

    def has_request(self, request_id: int) -> bool:
        """Return whether the item has a row or an event of a request.

        Args:
            request_id: the request's id.

        Returns:
            whether it has; False for an item that breaks the contract.

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
    """A recording is broken: its file, if it has one, the entry's offset in bytes, and the reason."""

    def __init__(self, offset: int, reason: str, file: str = "") -> None:
        super().__init__(offset, reason, file)
        self.offset = offset
        self.reason = reason
        self.file = file

    def __str__(self) -> str:
        """Return one line with all three."""
        return f"{self.file}: byte {self.offset}: {self.reason}".removeprefix(": ")


def public_hello(hello: Hello) -> Hello:
    """Return a copy of a worker's hello without secrets, and without the requests that it had then."""
    shown = Hello()
    shown.CopyFrom(hello)
    for name in ("proof", "request_ids", "request_owners"):
        shown.ClearField(name)
    return shown


class Lives:
    """How far each life of a worker was read; it counts the items that are missing before the next one."""

    def __init__(self) -> None:
        self._lives: OrderedDict[tuple[str, int], tuple[int, int]] = OrderedDict()
        """The last item's sequence, and how many items are missing since the last one that was given."""

    def __contains__(self, life: tuple[str, int]) -> bool:
        """Return whether items of a life were read."""
        return life in self._lives

    def count(self, item: StreamItem, *, is_given: bool = True) -> bool:
        """Set how many items are missing before an item; return False for an item that was read before."""
        life = item.worker_id, item.epoch
        last, missing = self._lives.pop(life, (item.sequence - item.missing_items - 1, 0))
        if item.sequence <= last:
            self._lives[life] = last, missing
            return False
        item.missing_items = missing + item.sequence - last - 1
        self.set(life, item.sequence, 0 if is_given else item.missing_items)
        return True

    def set(self, life: tuple[str, int], last: int, missing: int = 0) -> None:
        """Set how far a life was read."""
        self._lives[life] = last, missing
        if len(self._lives) > _MOST_LIVES:
            self._lives.popitem(last=False)


def hello_entry(epoch: int, hello: Hello, first_sequence: int) -> bytes:
    """Return the first entry of a recording that starts at a sequence."""
    begun = public_hello(hello)
    begun.first_sequence = begun.next_sequence = first_sequence
    return _delimited(write_frame(WorkerFrame(epoch=epoch, hello=begun)))


def item_entry(epoch: int, sequence: int, kind: PayloadKind, payload: bytes) -> bytes:
    """Return the entry of an item."""
    item = Item(sequence=sequence, payload_kind=kind, payload_bytes=len(payload), payload_crc32=crc32(payload))
    return _delimited(write_frame(WorkerFrame(epoch=epoch, item=item))) + payload


def gap_entry(epoch: int, first: int, last: int) -> bytes:
    """Return the entry that stands in place of missing items."""
    gap = Gap(first_sequence=first, last_sequence=last, reason=GapReason.GAP_REASON_RETENTION)
    return _delimited(write_frame(WorkerFrame(epoch=epoch, gap=gap)))


def _delimited(message: bytes) -> bytes:
    """Return a message behind its size as a varint."""
    return varint(len(message)) + message


@dataclass(slots=True)
class Recorder:
    """Encodes the items of one life of a worker as a recording."""

    epoch: int
    hello: Hello
    first_sequence: int = 0
    """Where the recording begins; 0: with the first item. Items that are missing from there on are a gap."""
    last_sequence: int = 0
    items: int = 0
    payload_bytes: int = 0
    gaps: int = 0
    repeated_items: int = 0

    @property
    def missing_items(self) -> int:
        """How many items are missing up to the last one."""
        return self.last_sequence - self.first_sequence + 1 - self.items if self.items else 0

    def add(self, item: StreamItem) -> bytes:
        """Return the bytes to write for an item; none for an item that was added before."""
        data = b""
        if not self.items:
            self.first_sequence = self.first_sequence or item.sequence
            self.last_sequence = self.first_sequence - 1
            data = hello_entry(self.epoch, self.hello, self.first_sequence)
        elif item.sequence <= self.last_sequence:
            self.repeated_items += 1  # its worker sent it again, to a processor that was started again
            return data
        if item.sequence > self.last_sequence + 1:
            self.gaps += 1
            data += gap_entry(self.epoch, self.last_sequence + 1, item.sequence - 1)
        self.last_sequence = item.sequence
        self.items += 1
        self.payload_bytes += len(item.payload)
        return data + item_entry(self.epoch, item.sequence, item.kind, item.payload)


def read_recording(path: str | os.PathLike[str], *, after: str | None = None) -> Iterator[StreamItem]:
    """Iterate over the items of a recording that `tokenbus record` wrote. It holds one item at a time.

    Args:
        path: the file.
        after: the `position` of the last item that was taken, to go on behind it; default: the beginning.

    Returns:
        an iterator of each item as a `StreamItem`.

    Raises:
        OSError: the file cannot be read.
        RecordingError: the recording is broken; the items before the fault were given.
        ValueError: `after` is not a position.

    Example:
        def tokens_of(path: str) -> int:
            return sum(item.batch.token_ids.size for item in tokenbus.read_recording(path) if item.batch is not None)
    """
    place = None
    if after is not None:
        if (match := _POSITION.fullmatch(after)) is None:
            raise ValueError(f"after: the position of an item of a recording, got {after[:80]!r}")
        place = int(match[1]), int(match[2])
    return _read_file(Path(path), place)


def _read_file(path: Path, place: tuple[int, int] | None) -> Iterator[StreamItem]:
    with path.open("rb") as file:
        yield from read_items(file, name=str(path), after=place)


def read_items(file: BinaryIO, *, name: str = "", after: tuple[int, int] | None = None) -> Iterator[StreamItem]:
    """Yield the items of a recording, holding one at a time; an item's position is `END.SEQUENCE`, END in bytes.

    `name` is the file's in errors, and `after` the position to go on behind. Raises RecordingError at the first fault.
    """
    entries = _Entries(file, name)
    try:
        begin = entries.next()
    except RecordingError as error:
        raise entries.error(f"no recording, which begins with a hello: {error.reason}") from None
    if begin is None or begin.WhichOneof("body") != "hello":
        got = "an empty file" if begin is None else f"the frame {begin.WhichOneof('body')}"
        raise entries.error(f"a recording begins with a hello, got {got}")
    expected, missing = begin.hello.next_sequence, 0
    if after is not None:
        entries.seek(after[0])
        expected = after[1] + 1
    while (frame := entries.next()) is not None:
        if frame.epoch != begin.epoch:
            raise entries.error(f"epoch {begin.epoch}, as in the hello, got {frame.epoch}")
        if frame.WhichOneof("body") is None:  # a newer minor version's
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
        raise entries.error("an item behind the gap, got the file's end")


class _Entries:
    """Reads the entries of a file, one after the other."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self._name = name
        self.end = 0
        """How many bytes were read."""
        self._begin = 0
        """Where the last entry begins."""

    def error(self, reason: str) -> RecordingError:
        """Return an error about the last entry."""
        return RecordingError(self._begin, reason, self._name)

    def seek(self, place: int) -> None:
        """Go on with the entry at a place; raises RecordingError if the file ends before it."""
        if (size := self._file.seek(0, SEEK_END)) < place:
            raise self.error(f"position {place} is beyond the file's end, {size}")
        self._file.seek(place)
        self.end = place

    def next(self) -> WorkerFrame | None:
        """Return the next frame; None at the end."""
        if not (byte := self._file.read(1)):
            return None
        self._begin, self.end = self.end, self.end + 1
        size, bits = byte[0] % _MORE, _BITS
        while byte[0] >= _MORE and bits < _LONGEST_SIZE:
            byte = self._take(1, "its size")
            size |= byte[0] % _MORE << bits
            bits += _BITS
        if size > _LARGEST_FRAME or byte[0] >= _MORE:
            raise self.error(f"a frame of at most {_LARGEST_FRAME} bytes, got a larger one")
        data = self._take(size, "its frame")
        try:
            return read_frame(WorkerFrame, data)
        except ContractError as error:
            raise self.error(str(error)) from None

    def last_sequence(self, frame: WorkerFrame, expected: int) -> int:
        """Return the sequence of the item, or the last one of the gap, that a frame has; it begins with `expected`."""
        match frame.WhichOneof("body"):
            case "item":
                first = last = frame.item.sequence
            case "gap":
                first, last = frame.gap.first_sequence, frame.gap.last_sequence
            case body:
                raise self.error(f"an item or a gap, got the frame {body}")
        if first != expected:
            raise self.error(f"sequence {expected}, got {first}")
        if last < first:
            raise self.error(f"a gap from {first} to {first} or later, got {last}")
        return last

    def payload(self, item: Item) -> bytes:
        """Return the payload of the item whose frame was read."""
        payload = self._take(item.payload_bytes, "its payload")
        if item.HasField("payload_crc32") and item.payload_crc32 != (found := crc32(payload)):
            limit = f"item {item.sequence}: a payload with the CRC-32 {item.payload_crc32:#010x}"
            raise self.error(f"{limit}, got {found:#010x}")
        return payload

    def _take(self, size: int, what: str) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            raise self.error(f"the file ends within the entry: {what} needs {size} bytes, got {len(data)}")
        self.end += size
        return data
