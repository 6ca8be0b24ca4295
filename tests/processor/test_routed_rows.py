"""Routed rows: every row of a step goes to its route, whatever the rows hold and however they are made."""

import random

import numpy as np
import pytest

from tests.in_process.builders import settings
from tokenbus.delivery import PendingAck, Step
from tokenbus.processor.client_frames import output_frames
from tokenbus.processor.requests import RequestTable
from tokenbus.processor.routed_rows import RoutedRows, split_message, split_rows
from tokenbus.processor.send_queue import Budget, SendQueue
from tokenbus.processor.session import Session
from tokenbus.testing import RowShape, batch
from tokenbus_contracts import ContractError, Limits, LogprobBatch, decode, encode, native
from tokenbus_contracts.native import RequestColumns

_STREAM, _RUNNING = 5, 1
needs_library = pytest.mark.skipif(not native.available(), reason="not run: the compiled check is not installed")


class Table:
    """Columns by slot, as a request table has them, for the rows of a batch in slots of their own."""

    def __init__(self, made: LogprobBatch, routes: list[int], random_: random.Random) -> None:
        size = made.row_count + 3
        self.slots = np.array(random_.sample(range(size), made.row_count), np.intp)
        self.route, self.stream = np.full(size, 7, np.int32), np.full(size, -1, np.int32)
        self.state, self.next_position = np.zeros(size, np.uint8), np.zeros(size, np.int64)
        self.route[self.slots], self.stream[self.slots], self.state[self.slots] = routes, _STREAM, _RUNNING
        self.next_position[self.slots] = made.positions
        self.running = RequestColumns.of(
            streams=self.stream, shares=self.route, states=self.state, positions=self.next_position, running=_RUNNING
        )


def shape(random_: random.Random, key: int) -> RowShape:
    return RowShape(key, random_.randint(0, 9), tokens=random_.randint(1, 3), top_k=random_.choice([0, 0, 2, 5]))


def written(made: LogprobBatch, part: RoutedRows, limits: Limits) -> list[tuple[bytes, bytes]]:
    """Return the messages for a part's consumer, each with the ids of its requests."""
    frames = output_frames(made.select(part.rows), None, PendingAck(), limits)
    return [(bytes(frame.parts[0]), frame.ids) for frame in frames]


@pytest.mark.parametrize("as_message", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_parts_have_each_row_once(seed: int, as_message: bool) -> None:  # noqa: FBT001
    random_ = random.Random(seed)  # noqa: S311 - it picks test data
    count = random_.randint(1, 20)
    indices = random_.sample(range(count), count) if seed % 2 else range(count)
    made = batch([shape(random_, key) for key in range(1, count + 1)], indices=indices)
    made = decode(encode(made)) if as_message else made
    routes = np.array(random_.choices((1, 4, 9), k=count), np.int32)
    limits = settings({"limits.max_rows": random_.choice([3, 512])}).limits
    parts = split_rows(made, routes)
    assert [part.route for part in parts] == sorted(set(routes.tolist()))
    for part in parts:
        expected = made.select(np.flatnonzero(routes == part.route)).in_batch_order()
        assert made.select(part.rows) == expected
        messages = written(made, part, limits)
        found = [decode(message) for message, _ in messages]
        assert LogprobBatch.joined(found).columns.keys() == expected.columns.keys()
        assert LogprobBatch.joined(found) == expected
        assert all(each.row_count <= limits.max_rows for each in found)
        ids = [each.request_ids.tobytes() for each in found]
        assert [of_message for _, of_message in messages] == ids


@needs_library
@pytest.mark.parametrize("seed", range(20))
def test_native_split_equals_the_slow_one(seed: int) -> None:
    random_ = random.Random(seed)  # noqa: S311 - it picks test data
    count = random_.randint(1, 40)
    indices = random_.sample(range(count), count) if seed % 2 else range(count)
    made = decode(encode(batch([shape(random_, key) for key in range(1, count + 1)], indices=indices)))
    routes = random_.choices(range(-1, 99) if seed % 3 else (-1, 0, 1, 4, 9), k=count)
    table, limits = Table(made, routes, random_), settings({}).limits
    found = split_message(made, table.slots, table.running, _STREAM, 1)
    assert found is not None
    expected = split_rows(made, np.array(routes, np.int32))
    assert [part.route for part in found] == [part.route for part in expected]
    for mine, other in zip(found, expected, strict=True):
        assert mine.rows.tolist() == other.rows.tolist()
        if mine.route > 0:
            assert [(mine.message, mine.request_ids)] == written(made, other, limits)


@needs_library
@pytest.mark.parametrize("fault", ["slot", "beyond", "stream", "state", "position"])
def test_nothing_is_split_where_a_row_is_not_next(fault: str) -> None:
    random_ = random.Random(0)  # noqa: S311 - it picks test data
    made = decode(encode(batch([shape(random_, key) for key in range(1, 100)])))
    table = Table(made, [1] * 99, random_)
    last = table.slots[-1]
    match fault:
        case "slot":
            table.slots[-1] = -1
        case "beyond":
            table.slots[-1] = table.route.size
        case "stream":
            table.stream[last] = 6
        case "state":
            table.state[last] = 0
        case "position":
            table.next_position[last] += 1
    assert split_message(made, table.slots, table.running, _STREAM, 1) is None


@needs_library
def test_message_above_the_limit_is_refused() -> None:
    random_ = random.Random(0)  # noqa: S311 - it picks test data
    made = decode(encode(batch([shape(random_, key) for key in range(1, 100)])))
    table = Table(made, [1] * 99, random_)
    (part,) = split_message(made, table.slots, table.running, _STREAM, 1) or []
    session = Session(
        name="",
        proof=b"",
        log_fields={},
        id=1,
        owner=1,
        route=1,
        send_queue=SendQueue(9, 2**20, Budget(2**20)),
        table=RequestTable(99, 99, 99),
        limits=settings({"limits.max_message_bytes": 1024}).limits,
        on_frame=lambda _: None,
    )
    with pytest.raises(ContractError, match="at most 1024 bytes"):
        session.deliver(Step("w", 1, 1, made, None), table.slots, part)
