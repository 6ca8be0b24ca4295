"""JournaledRetention: whenever a publisher dies, the next one has what was kept, no more and no less."""

import random
from collections.abc import Callable

import pytest

from tests.in_process.builders import BATCH, EVENT
from tokenbus.worker.process.journal import DROPPED_BYTES, JOURNAL_BYTES, JournaledRetention
from tokenbus.worker.process.records import Word
from tokenbus.worker.process.ring import Ring, ring_bytes
from tokenbus.worker.retention import Dropped, Retained

ITEMS, BYTES = 12, 4000


class DiedError(Exception):
    """The publisher's process ended here."""


class Shared:
    """The memory that outlives publishers."""

    def __init__(self) -> None:
        self.memory = memoryview(
            bytearray(ring_bytes(BYTES + ITEMS * JOURNAL_BYTES + DROPPED_BYTES, ITEMS + 1, DROPPED_BYTES))
        )
        self.words = memoryview(bytearray(8 * len(Word))).cast("Q")

    def publisher(self) -> JournaledRetention:
        journal = Ring(self.memory, ITEMS + 1)
        return JournaledRetention(ITEMS, BYTES, checksum=True, journal=journal, words=self.words)


def entries(retention: JournaledRetention) -> list[tuple[object, ...]]:
    return [
        (each.sequence, each.kind, each.payload) if isinstance(each, Retained) else (each.sequence, each.last_sequence)
        for each in retention
    ]


def facts(retention: JournaledRetention) -> tuple[object, ...]:
    return entries(retention), retention.next_sequence, retention.bytes, retention.first_sequence


@pytest.mark.parametrize("seed", range(3))
def test_next_publisher_has_the_same(seed: int) -> None:
    """Whatever was kept, dropped and acknowledged before."""
    draw, shared = random.Random(seed), Shared()  # noqa: S311 - as above
    retention = shared.publisher()
    for record in range(1, 300):
        retention.begin(record)
        for _ in range(draw.randint(0, 3)):
            payload = draw.randbytes(draw.randint(0, 900))
            if retention.has_room(len(payload)) and draw.random() < 0.8:
                retention.keep(draw.choice((BATCH, EVENT)), payload)
            else:
                retention.drop([record, record + 1])
        if draw.random() < 0.5:
            retention.acknowledge(draw.randint(max(0, retention.first_sequence - 2), retention.next_sequence - 1))
        after = shared.publisher()
        assert facts(after) == facts(retention)
        if draw.random() < 0.3:
            retention = after


def test_next_epoch_begins_with_nothing() -> None:
    """However far the one before was; what is kept from then on is there for the next publisher."""
    shared = Shared()
    retention = shared.publisher()
    retention.begin(1)
    retention.keep(EVENT, b"old")
    retention.drop([5])
    retention.restart()
    assert facts(shared.publisher()) == facts(retention) == ([], 1, 0, 1)
    retention.keep(EVENT, b"new")
    assert facts(shared.publisher()) == facts(retention) == ([(1, EVENT, b"new")], 2, 3, 1)


def test_dropped_requests_that_are_too_many_for_their_room_end_all() -> None:
    """A gap without names ends all requests of the stream: nothing is lost silently, and what is kept has its room."""
    shared = Shared()
    retention = shared.publisher()
    retention.begin(1)
    many = DROPPED_BYTES // 8 // 4
    for first in range(0, 6 * many, many):
        retention.drop(range(first, first + many))
        retention.keep(EVENT, b"between")
    runs = [each for each in shared.publisher() if isinstance(each, Dropped)]
    assert [len(run.request_ids) for run in runs] == [many, many, many, 0, 0, 0]
    assert facts(shared.publisher())[1:] == facts(retention)[1:]
    retention.acknowledge(retention.next_sequence - 1)
    retention.drop([5])
    assert list(shared.publisher()) == [Dropped(13, 13, frozenset({5}))]


@pytest.mark.parametrize("done", range(4))
def test_what_was_made_of_a_record_in_part_is_not_kept_twice(done: int) -> None:
    """A publisher dies when it has kept some items of a record; the next makes all of them again."""
    shared = Shared()
    first = shared.publisher()
    first.begin(1)
    first.keep(EVENT, b"before")

    def publish(retention: JournaledRetention, most: int) -> None:
        retention.begin(2)
        makes: list[Callable[[], object]] = [
            lambda: retention.keep(BATCH, b"one"),
            lambda: retention.drop([4]),
            lambda: retention.keep(EVENT, b"three"),
        ]
        for make in makes[:most]:
            make()

    publish(first, done)
    if done:
        first.acknowledge(first.next_sequence - 1)
    second = shared.publisher()
    publish(second, 3)
    assert second.next_sequence == 5
    kept = [(1, EVENT, b"before"), (2, BATCH, b"one"), (3, 3), (4, EVENT, b"three")]
    assert entries(second) == kept[done and done + 1 :]
    second.begin(3)
    second.keep(BATCH, b"four")
    assert second.next_sequence == 6


def test_death_between_the_journal_and_its_words_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Shared()
    retention = shared.publisher()
    retention.begin(8)

    def die(_: object) -> None:
        raise DiedError

    with monkeypatch.context() as patched:
        patched.setattr(JournaledRetention, "_note", die)
        with pytest.raises(DiedError):
            retention.keep(BATCH, b"one")
    after = shared.publisher()
    assert entries(after) == [(1, BATCH, b"one")]
    after.begin(8)
    assert after.has_room(10**9)
    after.keep(BATCH, b"one")
    assert not after.has_room(10**9)
    assert after.next_sequence == 2
