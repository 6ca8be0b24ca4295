"""Recordings: what is written, what is read of it, and what is refused."""

from collections.abc import Iterator
from io import BufferedReader, BytesIO, RawIOBase
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.services.cli.helpers import BATCH, EPOCH, EVENT, hello, payloads, recording
from tokenbus_contracts.frames import write_frame
from tokenbus_contracts.generated.stream_pb2 import Heartbeat, PayloadKind, WorkerFrame
from tokenbus_services.recording import Entry, Recorder, RecordingError, entries, gap_entry, hello_entry, item_entry

ITEM = item_entry(EPOCH, 1, EVENT, b"payload")
BEGIN = hello_entry(EPOCH, hello(), 1)


class Pieces(RawIOBase):
    """A file that gives its bytes in pieces, as a pipe does."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        """Take the pieces; each must be smaller than a buffer."""
        self._pieces = pieces

    def readable(self) -> bool:
        """Return that it can be read."""
        return True

    def readinto(self, buffer: Any, /) -> int:  # noqa: ANN401 - any buffer
        """Read the next piece."""
        piece = next(self._pieces, b"")
        buffer[: len(piece)] = piece
        return len(piece)


def written(found: list[Entry]) -> bytes:
    """Return the recording that recording the entries again makes."""
    begin, *rest = found
    recorder = Recorder(begin.frame.epoch, begin.frame.hello)
    items = [each for each in rest if each.frame.WhichOneof("body") == "item"]
    return b"".join(
        recorder.add(each.frame.item.sequence, each.frame.item.payload_kind, each.payload) for each in items
    )


def fault(data: bytes) -> RecordingError:
    """Return why a recording is refused."""
    with pytest.raises(RecordingError) as caught:
        list(entries(BytesIO(data)))
    return caught.value


def outcome(data: bytes) -> tuple[list[Entry], int | None]:
    """Return what can be read of a recording, and where its fault is, if it has one."""
    found: list[Entry] = []
    try:
        found.extend(entries(BytesIO(data)))
    except RecordingError as error:
        return found, error.offset
    return found, None


ITEMS = st.lists(
    st.tuples(st.integers(1, 400), st.sampled_from([BATCH, EVENT]), st.binary(min_size=1, max_size=300)), min_size=1
)


@given(steps=ITEMS, first=st.integers(1, 2**61), piece=st.integers(1, 700))
def test_what_is_read_and_recorded_again_is_the_same_file(
    steps: list[tuple[int, PayloadKind, bytes]], first: int, piece: int
) -> None:
    """Whatever items there are, with whatever holes, recording what was read of a recording changes no byte."""
    recorder, data, sequence = Recorder(EPOCH, hello()), b"", first - 1
    for distance, kind, payload in steps:
        sequence += distance
        data += recorder.add(sequence, kind, payload)
    pieces = (data[begin : begin + piece] for begin in range(0, len(data), piece))
    found = list(entries(BufferedReader(Pieces(pieces))))
    assert written(found) == data
    assert [each.payload for each in found if each.payload] == [payload for _, _, payload in steps]
    assert recorder.items == len(steps)
    assert recorder.missing_items + recorder.items == recorder.last_sequence - recorder.first_sequence + 1


def test_recording_begins_with_the_hello_and_tells_no_secret() -> None:
    """A recording's hello says where it begins, and neither the worker's proof and ticket nor its requests of then."""
    told = hello()
    told.proof = told.handoff_ticket = b"hush"
    told.request_keys.append(5)
    begin, _ = entries(BytesIO(Recorder(EPOCH, told).add(41, EVENT, b"x")))
    assert (begin.frame.epoch, begin.frame.hello.worker_id) == (EPOCH, "worker-0")
    assert (begin.frame.hello.first_sequence, begin.frame.hello.next_sequence) == (41, 41)
    assert not begin.frame.hello.proof + begin.frame.hello.handoff_ticket
    assert not begin.frame.hello.request_keys


def test_what_was_not_seen_is_a_gap() -> None:
    """Items that were not seen are one gap in their place, and are counted."""
    recorder = Recorder(EPOCH, hello())
    data = recorder.add(1, EVENT, b"x") + recorder.add(5, EVENT, b"y")
    bodies = [each.frame.WhichOneof("body") for each in entries(BytesIO(data))]
    assert bodies == ["hello", "item", "gap", "item"]
    assert (recorder.gaps, recorder.missing_items) == (1, 3)


def test_what_was_seen_before_is_not_recorded_again() -> None:
    """An item that its worker sent again, as to a processor that was started again, is recorded once."""
    recorder = Recorder(EPOCH, hello())
    assert recorder.add(1, EVENT, b"x")
    assert recorder.add(2, EVENT, b"y")
    assert recorder.add(1, EVENT, b"x") == b""
    assert (recorder.items, recorder.repeated_items) == (2, 1)


def test_recording_that_ends_anywhere() -> None:
    """A recording that was cut off gives the entries before the cut, then the place of the one that is not whole."""
    data = recording(payloads(requests=1, tokens=3))
    begins = [each.offset for each in entries(BytesIO(data))]
    for cut in range(1, len(data)):
        found, offset = outcome(data[:cut])
        whole = [begin for begin, end in zip(begins, [*begins[1:], len(data)], strict=True) if end <= cut]
        assert [each.offset for each in found] == whole
        assert offset == (None if cut in begins else max(begin for begin in begins if begin < cut))
    assert fault(data[:-1]).reason.startswith("the file ends within the entry: its payload needs ")


def test_damaged_payload_is_refused_by_its_checksum() -> None:
    """A payload of which any byte was changed is refused, with the item and both checksums."""
    for place in range(len(ITEM) - len(b"payload"), len(ITEM)):
        damaged = bytearray(ITEM)
        damaged[place] ^= 1
        error = fault(BEGIN + bytes(damaged))
        assert error.offset == len(BEGIN)
        assert error.reason.startswith("item 1: a payload with the CRC-32 0x")


def test_damage_is_never_another_error() -> None:
    """Whichever byte of a recording is changed, it is read or refused, and nothing else happens."""
    data = recording(payloads(requests=1, tokens=3), without=range(2, 3))
    for place in range(len(data)):
        for change in (0x01, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[place] ^= change
            found, offset = outcome(bytes(damaged))
            assert found or offset == 0
            assert offset is None or 0 <= offset < len(data)


BEAT = write_frame(WorkerFrame(epoch=EPOCH, heartbeat=Heartbeat(sent_at_ns=1)))


@pytest.mark.parametrize(
    ("data", "offset", "reason"),
    [
        (b"", 0, "a recording begins with a hello, got an empty file"),
        (ITEM, 0, "a recording begins with a hello, got the frame item"),
        (BEGIN + BEGIN, len(BEGIN), "an item or a gap, got the frame hello"),
        (BEGIN + bytes([len(BEAT)]) + BEAT, len(BEGIN), "an item or a gap, got the frame heartbeat"),
        (BEGIN + item_entry(8, 1, EVENT, b"x"), len(BEGIN), "epoch 7, as in the hello, got 8"),
        (BEGIN + item_entry(EPOCH, 2, EVENT, b"x"), len(BEGIN), "sequence 1, got 2"),
        (BEGIN + ITEM + ITEM, len(BEGIN + ITEM), "sequence 2, got 1"),
        (BEGIN + gap_entry(EPOCH, 2, 4), len(BEGIN), "sequence 1, got 2"),
        (BEGIN + gap_entry(EPOCH, 1, 4) + ITEM, len(BEGIN + gap_entry(EPOCH, 1, 4)), "sequence 5, got 1"),
        (BEGIN + gap_entry(EPOCH, 1, 1).replace(b"\x10\x01", b"\x10\x00"), len(BEGIN), "gap.last_sequence"),
        (BEGIN + b"\xff\xff\xff\x01", len(BEGIN), "a frame of at most 2097152 bytes, got a larger one"),
        (BEGIN + b"\xff\xff\xff\xff", len(BEGIN), "a frame of at most 2097152 bytes, got a larger one"),
        (BEGIN + b"\x00", len(BEGIN), "epoch: at least 1, got 0"),
    ],
)
def test_what_is_no_recording(data: bytes, offset: int, reason: str) -> None:
    """What cannot follow is refused with its place, and what should stand there instead."""
    error = fault(data)
    assert error.offset == offset
    assert error.reason.startswith(reason)


def test_gap_that_ends_before_it_begins() -> None:
    """A gap's end is at or after its beginning."""
    data = BEGIN + ITEM + gap_entry(EPOCH, 2, 1)
    assert fault(data).reason == "a gap from 2 to 2 or later, got 1"


def test_frame_of_a_newer_minor_is_passed_over() -> None:
    """A frame whose body only a newer minor version knows is no fault, and nothing is said of it."""
    newer = WorkerFrame(epoch=EPOCH).SerializeToString() + b"\xfa\x01\x00"  # field 31, empty
    found = list(entries(BytesIO(BEGIN + bytes([len(newer)]) + newer + ITEM)))
    assert [each.frame.WhichOneof("body") for each in found] == ["hello", "item"]


def test_no_more_is_read_than_one_entry() -> None:
    """A reader that takes one entry has read no more than what holds it, however long the recording is."""
    read: list[int] = []

    def endless() -> Iterator[bytes]:
        yield BEGIN
        for sequence in range(1, 10**9):
            read.append(sequence)
            yield item_entry(EPOCH, sequence, EVENT, b"x")

    found = entries(BufferedReader(Pieces(endless())))
    for _ in range(11):
        next(found)
    assert read == list(range(1, 11))
