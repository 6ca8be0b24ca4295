"""Retention: what a worker keeps until it is acknowledged, within its bounds."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.in_process.builders import BATCH
from tokenbus.worker import retention as module
from tokenbus.worker.retention import Dropped, Retained, Retention


def made(items: int = 8, size: int = 100, *, checksum: bool = True) -> Retention:
    return Retention(items, size, checksum=checksum)


def kept(count: int, *, items: int = 8) -> Retention:
    retention = made(items)
    for number in range(count):
        retention.keep(BATCH, bytes([number]))
    return retention


def retained(entry: Retained | Dropped | None) -> Retained:
    assert isinstance(entry, Retained)
    return entry


def dropped(entry: Retained | Dropped | None) -> Dropped:
    assert isinstance(entry, Dropped)
    return entry


def test_room_in_bytes_ends_exactly_at_the_bound() -> None:
    """As many bytes fit as the bound says, and not one more; acknowledged bytes make room again (case 20)."""
    retention = made(size=10)
    retention.keep(BATCH, bytes(7))
    assert retention.has_room(3)
    assert not retention.has_room(4)
    retention.keep(BATCH, bytes(3))
    assert retention.has_room(0)
    assert not retention.has_room(1)
    retention.acknowledge(1)
    assert retention.has_room(7)
    assert not retention.has_room(8)


def test_last_place_is_for_telling_of_a_loss() -> None:
    """One place less than the bound is for items: the last one always takes a run of dropped items (case 21)."""
    retention = kept(2, items=4)
    assert retention.has_room(1)
    retention.keep(BATCH, b"x")
    assert not retention.has_room(1)
    for key in range(100):
        retention.drop([key])
    assert len(retention) == 4
    run = dropped(retention.find(103))
    assert (run.sequence, run.last_sequence, run.request_ids) == (4, 103, frozenset(range(100)))


def test_run_on_its_way_out_does_not_change() -> None:
    retention = made()
    retention.drop([1])
    before = dropped(retention.find(1))
    retention.drop([2])
    assert before.last_sequence == 1
    assert before.request_ids == {1}
    assert dropped(retention.find(1)).request_ids == {1, 2}


def test_too_many_keys_become_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_REQUEST_IDS", 3)
    retention = made()
    retention.drop([1, 2])
    retention.drop([3])
    assert dropped(retention.find(1)).request_ids == {1, 2, 3}
    retention.drop([4])
    assert not dropped(retention.find(1)).request_ids
    retention.drop([5])
    assert not dropped(retention.find(1)).request_ids


def test_loss_of_unknown_requests_after_a_named_one_names_none() -> None:
    retention = made()
    retention.drop([5])
    retention.drop(())
    assert dropped(retention.find(1)) == Dropped(1, 2, frozenset())


def test_acknowledging_lets_go_through_the_sequence() -> None:
    retention = kept(4)
    assert retention.acknowledge(2)
    assert (len(retention), retention.bytes, retention.first_sequence) == (2, 2, 3)
    assert retention.find(2) is None
    assert retained(retention.find(3)).payload == b"\x02"
    assert not retention.acknowledge(2)
    assert not retention.acknowledge(0)
    assert retention.acknowledge(4)
    assert (len(retention), retention.bytes, retention.first_sequence) == (0, 0, 5)


def test_share_used_is_the_fuller_of_the_two() -> None:
    retention = made(items=4, size=100)
    retention.keep(BATCH, bytes(50))
    assert retention.share_used() == 0.5
    retention.keep(BATCH, b"")
    retention.keep(BATCH, b"")
    assert retention.share_used() == 0.75


@given(st.lists(st.sampled_from(["keep", "drop", "acknowledge"]), max_size=40), st.randoms(use_true_random=False))
def test_find_is_what_a_plain_search_finds(actions: list[str], rng: Random) -> None:
    retention, plain = made(items=1000), dict[int, bytes | None]()
    for action in actions:
        sequence = retention.next_sequence
        if action == "keep":
            plain[sequence] = retention.keep(BATCH, b"%d" % sequence).payload
        elif action == "drop":
            retention.drop([sequence])
            plain[sequence] = None
        else:
            through = rng.randrange(sequence + 1)
            retention.acknowledge(through)
            covered = retention.find(through)
            keep_from = covered.sequence if covered is not None else through + 1
            plain = {each: payload for each, payload in plain.items() if each >= min(keep_from, through + 1)}
    for sequence in range(retention.next_sequence + 2):
        found = retention.find(sequence)
        if sequence not in plain:
            assert found is None
        elif plain[sequence] is None:
            run = dropped(found)
            assert run.sequence <= sequence <= run.last_sequence
            assert sequence in run.request_ids
        else:
            assert retained(found).payload == plain[sequence]
