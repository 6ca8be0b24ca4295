"""Ring: records come out as they went in, whichever process dies, and never more than there is room for."""

import random

import pytest

from tokenbus.worker.process.ring import Ring, ring_bytes

MOST = 20


def memory_for(size: int, largest: int) -> memoryview:
    return memoryview(bytearray(ring_bytes(size, MOST, largest)))


@pytest.mark.parametrize("largest", [1, 50, 300_000])
@pytest.mark.parametrize("seed", range(2))
def test_records_come_in_order_though_each_side_begins_anew(largest: int, seed: int) -> None:
    """What was written and not taken is there for the next reader and writer, with the room that was asked for."""
    draw = random.Random(seed)  # noqa: S311 - a test can be run again
    size, freed = 3 * largest, []
    memory = memory_for(size, largest)

    def reader() -> Ring:
        return Ring(memory, MOST, lambda *of: freed.append(of))

    writing, reading = Ring(memory, MOST), reader()
    waiting: list[bytes] = []
    for _ in range(600):
        if draw.random() < 0.55:
            data = draw.randbytes(draw.randint(0, largest))
            fits = writing.has_room(len(data))
            assert fits or len(waiting) == MOST or sum(map(len, waiting)) + len(data) > size
            if fits:
                assert writing.put(7, data[:10], memoryview(data[10:])) == reading.taken + len(waiting) + 1
                waiting.append(data)
        elif record := reading.next():
            assert (record.kind, bytes(record.data)) == (7, waiting.pop(0))
            reading.take(record)
        assert len(writing) == len(waiting)
        assert reading.is_empty == (not waiting)
        if draw.random() < 0.1:
            writing, reading = Ring(memory, MOST), reader()
    for begin, length in freed:
        assert begin % 4096 == length % 4096 == 0
    assert bool(freed) == (largest > 1000)


def test_record_is_there_once_it_is_committed() -> None:
    memory = memory_for(1000, 100)
    writing, reading = Ring(memory, MOST), Ring(memory, MOST)
    writing.room(5)[:] = b"never"
    assert reading.next() is None
    assert Ring(memory, MOST).put(1, b"other") == 1
    assert [bytes(record.data) for record in reading.waiting()] == [b"other"]


def test_taken_records_are_not_given_twice_where_the_reader_died_halfway() -> None:
    """It says how many were taken first, and then where it is: the next reader heeds both."""
    memory = memory_for(1000, 100)
    writing, reading = Ring(memory, MOST), Ring(memory, MOST)
    for data in (b"a", b"b"):
        writing.put(1, data)
    first = reading.next()
    assert first is not None
    reading._words[2] = first.number
    after = Ring(memory, MOST)
    assert [bytes(record.data) for record in after.waiting()] == [b"b"]


def test_number_of_records_is_bounded() -> None:
    ring = Ring(memory_for(10_000, 100), MOST)
    for _ in range(MOST):
        ring.put(1)
    assert not ring.has_room(0)
    record = ring.next()
    assert record is not None
    ring.take(record)
    assert ring.has_room(0)


def test_records_that_were_taken_can_be_read_again_until_others_are_written() -> None:
    ring = Ring(memory_for(1000, 100), MOST)
    before = ring.tail
    for data in (b"a", b"b"):
        ring.put(1, data)
        record = ring.next()
        assert record is not None
        ring.take(record)
    assert [bytes(record.data) for record in ring.waiting(before)] == [b"a", b"b"]
