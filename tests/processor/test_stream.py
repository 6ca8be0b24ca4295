"""Stream: items put in order, and holes found and healed or named."""

from typing import Any
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.in_process.builders import EVENT, encoded, item_of
from tests.processor.streams import come, order, payload, stream, take
from tokenbus.processor.stream import ItemOutcome, LostItems
from tokenbus.testing import RowShape, row_shapes
from tokenbus_contracts.frames import write_frame
from tokenbus_contracts.generated.request_pb2 import Admitted, RequestEvent
from tokenbus_contracts.generated.stream_pb2 import GapReason

GONE, REFUSED = GapReason.GAP_REASON_RETENTION, GapReason.GAP_REASON_REFUSED
NO_REQUESTS: frozenset[int] = frozenset()


@given(st.lists(st.integers(1, 12), max_size=40))
def test_every_item_comes_out_once_and_in_order(arrivals: list[int]) -> None:
    """However often and in whatever order items come, each comes out once, after those before it (case 17)."""
    made = stream()
    found: list[int | tuple[int, int]] = []
    for sequence in arrivals:
        take(made, sequence)
        found += come(made)
    whole = 0
    while whole + 1 in arrivals:
        whole += 1
    assert found == list(range(1, whole + 1))
    assert made.counts.duplicates == len(arrivals) - len(set(arrivals))


def test_duplicate_with_other_bytes_is_divergent() -> None:
    made = stream(credit_items=2)
    take(made, 1, 2)
    other = payload(1, size=2)
    assert made.receive(item_of(other, 1, checksum=crc32(other)), other) is ItemOutcome.DIVERGENT
    come(made)
    made.grant()
    take(made, 3)
    assert made.receive(item_of(other, 1, checksum=crc32(other)), other) is ItemOutcome.DUPLICATE
    assert made.counts.divergences == 1


def test_damaged_item_is_asked_for_again() -> None:
    made = stream()
    data = payload(1)
    assert made.receive(item_of(data, 1, checksum=crc32(data) ^ 1), data) is ItemOutcome.DAMAGED
    assert come(made) == []
    assert made.missing(0.0) == (1, 1)
    assert take(made, 1) == [ItemOutcome.TAKEN]
    assert come(made) == [1]
    assert made.counts.damaged == 1


def test_checksum_of_zero_is_a_checksum() -> None:
    made = stream()
    assert made.receive(item_of(payload(1), 1, checksum=0), payload(1)) is ItemOutcome.DAMAGED


@pytest.mark.parametrize(
    "header",
    [{"worker_id": "other"}, {"epoch": 8}, {"sequence": 2}, {"selection": True}],
    ids=["worker", "epoch", "sequence", "selection"],
)
def test_batch_that_is_not_this_streams_is_refused(header: dict[str, Any]) -> None:
    made = stream()
    data = encoded(row_shapes([5]), **{"sequence": 1} | header)
    assert made.receive(item_of(data, 1, checksum=crc32(data)), data) is ItemOutcome.REFUSED
    (lost,) = order(made)
    assert isinstance(lost, LostItems)
    assert (lost.reason, lost.request_ids, lost.size) == (REFUSED, frozenset({5}), len(data))


def test_event_of_another_number_is_refused() -> None:
    made = stream()
    data = write_frame(
        RequestEvent(sequence=2, admitted=Admitted(request_id=1, worker_id="w", epoch=1, prompt_tokens=1))
    )
    assert made.receive(item_of(data, 1, EVENT, checksum=crc32(data)), data) is ItemOutcome.REFUSED
    assert "1, as its item, got 2" in str(made.refusal)


def test_refused_item_without_a_checksum_gets_one_more_try() -> None:
    made = stream()
    data = payload(1)[:-1]
    assert made.receive(item_of(data, 1), data) is ItemOutcome.REFUSED
    assert come(made) == []
    assert made.missing(0.0) == (1, 1)
    assert made.receive(item_of(data, 1), data) is ItemOutcome.REFUSED
    assert come(made) == [(1, 1)]


def test_hole_is_asked_for_in_time() -> None:
    """A hole is asked for at once, exactly, and again only when the time for an answer is over (case 17)."""
    made = stream(replay_timeout_ms=1000)
    take(made, 1, 4, 6)
    come(made)
    assert made.missing(10.0) == (2, 3)
    assert made.missing(10.999) is None
    assert made.missing(11.0) == (2, 3)
    take(made, 2)
    come(made)
    assert made.missing(11.0) == (3, 3)
    take(made, 3)
    come(made)
    assert made.missing(11.0) == (5, 5)
    assert made.counts.replays == 4


def test_attempts_are_counted_for_each_hole() -> None:
    made = stream(replay_attempts=1, replay_timeout_ms=1000)
    take(made, 2)
    assert made.missing(0.0) == (1, 1)
    take(made, 1, 4)
    come(made)
    assert made.missing(0.0) == (3, 3)


def test_gap_of_what_came_is_none() -> None:
    made = stream()
    take(made, 1, 2)
    come(made)
    made.declare_lost(1, 2, GONE, NO_REQUESTS)
    assert come(made) == []
    take(made, 4, 5)
    made.declare_lost(4, 5, GONE, NO_REQUESTS)
    made.declare_lost(2, 3, GONE, NO_REQUESTS)
    assert come(made) == [(3, 3), 4, 5]


def test_gap_over_waiting_items_swallows_them() -> None:
    made = stream()
    take(made, 3)
    made.declare_lost(1, 4, GONE, NO_REQUESTS)
    take(made, 5)
    left = made.credit.bytes - made._used_bytes
    assert come(made) == [(1, 4), 5]
    assert made.credit.bytes - made._used_bytes == left - len(payload(3)) - len(payload(5))


def test_refused_payload_names_its_requests_only_where_they_can_be_known() -> None:
    whole: dict[str, Any] = {"epoch": 8}
    for header, keys in ((whole, {5, 6}), (whole | {"part": (0, 2), "step_rows": 3}, set())):
        made = stream()
        data = encoded([RowShape(5), RowShape(6)], 1, **header)
        made.receive(item_of(data, 1, checksum=crc32(data)), data)
        (lost,) = order(made)
        assert isinstance(lost, LostItems)
        assert lost.request_ids == keys
    made = stream()
    made.receive(item_of(b"\xff", 1, checksum=crc32(b"\xff")), b"\xff")
    made.receive(item_of(b"\xff", 2, EVENT, checksum=crc32(b"\xff")), b"\xff")
    assert [entry.request_ids for entry in order(made) if isinstance(entry, LostItems)] == [NO_REQUESTS] * 2
