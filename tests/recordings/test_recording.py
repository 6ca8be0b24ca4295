"""Recordings: their encoding, reading them back, and refusing broken ones."""

from collections.abc import Iterable, Iterator
from io import BufferedReader, BytesIO, RawIOBase
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tokenbus
from tests.cli.helpers import BATCH, EPOCH, EVENT, hello, payloads, recording
from tests.pages import blocks
from tokenbus.cli import main
from tokenbus.recordings.items import (
    Recorder,
    RecordingError,
    SequenceTracker,
    StreamItem,
    gap_entry,
    hello_entry,
    item_entry,
    read_items,
)
from tokenbus_contracts.frames import write_frame
from tokenbus_contracts.generated.stream_pb2 import Heartbeat, PayloadKind, WorkerFrame

ITEM = item_entry(EPOCH, 1, EVENT, b"payload")
BEGIN = hello_entry(EPOCH, hello(), 1)


class Pieces(RawIOBase):
    """A file that gives its bytes in pieces, as a pipe does."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:  # noqa: ANN401 - any buffer
        piece = next(self._pieces, b"")
        buffer[: len(piece)] = piece
        return len(piece)


def read(data: bytes) -> list[StreamItem]:
    return list(read_items(BytesIO(data)))


def recorded(items: Iterable[StreamItem]) -> bytes:
    (first, *rest) = items
    recorder = Recorder(first.epoch, first.hello)
    return b"".join(recorder.add(item) for item in (first, *rest))


def item(sequence: int, payload: bytes = b"x", kind: PayloadKind = EVENT) -> StreamItem:
    return StreamItem(hello(), EPOCH, sequence, kind, payload)


def end_of(item: StreamItem) -> int:
    return int(item.position.split(".")[0])


def fault(data: bytes) -> RecordingError:
    with pytest.raises(RecordingError) as caught:
        read(data)
    return caught.value


def outcome(data: bytes) -> tuple[list[StreamItem], int | None]:
    """Return the items that can be read of a recording, and where its fault is, if it has one."""
    found: list[StreamItem] = []
    try:
        found.extend(read_items(BytesIO(data)))
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
    recorder, data, sequence = Recorder(EPOCH, hello()), b"", first - 1
    for distance, kind, payload in steps:
        sequence += distance
        data += recorder.add(item(sequence, payload, kind))
    pieces = (data[begin : begin + piece] for begin in range(0, len(data), piece))
    found = list(read_items(BufferedReader(Pieces(pieces))))
    assert recorded(found) == data
    assert [each.payload for each in found] == [payload for _, _, payload in steps]
    assert [each.missing_items for each in found] == [0, *(distance - 1 for distance, *_ in steps[1:])]
    assert recorder.items == len(steps)
    assert recorder.missing_items + recorder.items == recorder.last_sequence - recorder.first_sequence + 1


def test_recording_begins_with_the_hello_and_tells_no_secret() -> None:
    told = hello()
    told.proof = b"hush"
    told.request_ids.append(5)
    (found,) = read(Recorder(EPOCH, told).add(item(41)))
    assert (found.epoch, found.worker_id) == (EPOCH, "worker-0")
    assert (found.hello.first_sequence, found.hello.next_sequence) == (41, 41)
    assert not found.hello.proof
    assert not found.hello.request_ids


def test_what_was_not_seen_is_a_gap_and_what_was_seen_before_is_not_recorded_again() -> None:
    recorder = Recorder(EPOCH, hello())
    data = b"".join(recorder.add(item(sequence)) for sequence in (1, 5, 1))
    assert data == BEGIN + b"".join(
        [item_entry(EPOCH, 1, EVENT, b"x"), gap_entry(EPOCH, 2, 4), item_entry(EPOCH, 5, EVENT, b"x")]
    )
    assert (recorder.items, recorder.gaps, recorder.missing_items, recorder.repeated_items) == (2, 1, 3, 1)


def test_recording_that_ends_anywhere() -> None:
    data = recording(payloads(requests=1, tokens=3))
    ends = [0, len(BEGIN), *(end_of(each) for each in read(data))]
    for cut in range(1, len(data)):
        found, offset = outcome(data[:cut])
        assert [end_of(each) for each in found] == [end for end in ends[2:] if end <= cut]
        assert offset == (None if cut in ends else max(end for end in ends if end < cut))
    assert fault(data[:-1]).reason.startswith("the file ends within the entry: its payload needs ")


def test_damaged_payload_is_refused_by_its_checksum() -> None:
    for place in range(len(ITEM) - len(b"payload"), len(ITEM)):
        damaged = bytearray(ITEM)
        damaged[place] ^= 1
        error = fault(BEGIN + bytes(damaged))
        assert error.offset == len(BEGIN)
        assert error.reason.startswith("item 1: a payload with the CRC-32 0x")


def test_damage_is_never_another_error() -> None:
    data = recording(payloads(requests=1, tokens=3), without=range(2, 3))
    for place in range(len(data)):
        for change in (0x01, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[place] ^= change
            found, offset = outcome(bytes(damaged))
            assert found or offset is not None
            assert offset is None or 0 <= offset < len(data)


BEAT = write_frame(WorkerFrame(epoch=EPOCH, heartbeat=Heartbeat(sent_at_ns=1)))


@pytest.mark.parametrize(
    ("data", "offset", "reason"),
    [
        (b"", 0, "not a recording: expected a hello at the beginning, got an empty file"),
        (ITEM, 0, "not a recording: expected a hello at the beginning, got the frame item"),
        (BEGIN + BEGIN, len(BEGIN), "expected an item or a gap, got the frame hello"),
        (BEGIN + bytes([len(BEAT)]) + BEAT, len(BEGIN), "expected an item or a gap, got the frame heartbeat"),
        (BEGIN + item_entry(8, 1, EVENT, b"x"), len(BEGIN), "epoch 7, as in the hello, got 8"),
        (BEGIN + item_entry(EPOCH, 2, EVENT, b"x"), len(BEGIN), "sequence 1, got 2"),
        (BEGIN + ITEM + ITEM, len(BEGIN + ITEM), "sequence 2, got 1"),
        (BEGIN + gap_entry(EPOCH, 2, 4), len(BEGIN), "sequence 1, got 2"),
        (BEGIN + gap_entry(EPOCH, 1, 4) + ITEM, len(BEGIN + gap_entry(EPOCH, 1, 4)), "sequence 5, got 1"),
        (BEGIN + gap_entry(EPOCH, 1, 1).replace(b"\x10\x01", b"\x10\x00"), len(BEGIN), "gap.last_sequence"),
        (BEGIN + b"\xff\xff\xff\x01", len(BEGIN), "a frame of at most 2097152 bytes, got a larger one"),
        (BEGIN + b"\xff\xff\xff\xff", len(BEGIN), "a frame of at most 2097152 bytes, got a larger one"),
        (BEGIN + b"\x00", len(BEGIN), "epoch: at least 1, got 0"),
        (BEGIN + ITEM + gap_entry(EPOCH, 2, 4), len(BEGIN + ITEM), "an item after the gap, got the file's end"),
        (BEGIN + ITEM + gap_entry(EPOCH, 2, 1), len(BEGIN + ITEM), "a gap from 2 to 2 or later, got 1"),
    ],
)
def test_what_is_no_recording(data: bytes, offset: int, reason: str) -> None:
    error = fault(data)
    assert error.offset == offset
    assert error.reason.startswith(reason)


def test_frame_of_a_newer_minor_is_passed_over() -> None:
    newer = WorkerFrame(epoch=EPOCH).SerializeToString() + b"\xfa\x01\x00"  # field 31, empty
    assert len(read(BEGIN + bytes([len(newer)]) + newer + ITEM)) == 1


def test_no_more_is_read_than_one_entry() -> None:
    read: list[int] = []

    def endless() -> Iterator[bytes]:
        yield BEGIN
        for sequence in range(1, 10**9):
            read.append(sequence)
            yield item_entry(EPOCH, sequence, EVENT, b"x")

    found = read_items(BufferedReader(Pieces(endless())))
    for _ in range(10):
        next(found)
    assert read == list(range(1, 11))


def test_what_is_missing_is_counted_once() -> None:
    tracker = SequenceTracker()

    def count(sequence: int, missing_items: int = 0, *, is_given: bool = True) -> int | None:
        found = item(sequence)
        found.missing_items = missing_items
        return found.missing_items if tracker.count(found, is_given=is_given) else None

    assert count(3, missing_items=2) == 2
    assert count(8, missing_items=4, is_given=False) == 4
    assert count(8, missing_items=4) is None
    assert count(9) == 4
    assert count(10, missing_items=9) == 0
    assert count(13) == 2


# Through the public name.


def test_reader_goes_on_behind_any_position(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    path.write_bytes(recording(without=range(4, 6)))
    found = [(each.sequence, each.missing_items) for each in tokenbus.read_recording(path)]
    assert found == [(1, 0), (2, 0), (3, 0), (6, 2)]
    for taken, each in enumerate(tokenbus.read_recording(path), start=1):
        behind = tokenbus.read_recording(str(path), after=each.position)
        assert [(later.sequence, later.missing_items) for later in behind] == found[taken:]


def test_page_reads_a_recording(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    for block in blocks("python", of="docs/recording.md"):
        exec(block.text, names)  # noqa: S102 - it is on a page of ours
    path = tmp_path / "steps"
    path.write_bytes(recording(payloads(requests=2, tokens=9)))
    assert names["tokens_of"](str(path)) == 18
    *_, last = tokenbus.read_recording(path)
    assert names["tokens_of"](str(path), last.position) == 0
    assert main(["export", str(path), "--to", str(tmp_path / "parquet")]) == 0
    logprobs = [
        float(logprob)
        for each in tokenbus.read_recording(path)
        if each.batch is not None
        for logprob in each.batch.logprobs
    ]
    assert names["mean_logprob"](str(tmp_path / "parquet")) == pytest.approx(sum(logprobs) / 18)


def test_position_that_cannot_be(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    path.write_bytes(recording())
    with pytest.raises(ValueError, match="after: expected the position of an item of a recording, got '1'"):
        tokenbus.read_recording(path, after="1")
    *_, last = tokenbus.read_recording(path)
    assert list(tokenbus.read_recording(path, after=last.position)) == []
    with pytest.raises(tokenbus.RecordingError, match=f"position 1{end_of(last)} is beyond the file's end"):
        list(tokenbus.read_recording(path, after=f"1{last.position}"))


@pytest.mark.parametrize("name", ["recorded", "logged"])
def test_files_of_earlier_releases_are_read_and_written_alike(name: str) -> None:
    """A recording, and a message of a durable log, that an earlier version wrote: today's writer makes the same bytes.

    So versions of processors and readers of one log mix, as in a rolling restart.
    """
    path = Path(__file__).parent / "files" / f"{name}.tokenbus"
    items = list(tokenbus.read_recording(path))
    parts = [hello_entry(EPOCH, items[0].hello, items[0].hello.next_sequence)]
    for each in items:
        if each.missing_items:
            parts.append(gap_entry(EPOCH, each.sequence - each.missing_items, each.sequence - 1))
        parts.append(item_entry(EPOCH, each.sequence, each.kind, each.payload))
    assert b"".join(parts) == path.read_bytes()
    assert sum(each.missing_items for each in items) == {"recorded": 2, "logged": 6}[name]
    assert items[-1].batch is not None
    assert items[-1].has_request(1)
