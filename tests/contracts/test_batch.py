"""LogprobBatch by itself: rows that stay whole, places that exist, and a value that does not change."""

from typing import Any

import numpy as np
import pytest

from tests.contracts.test_encode import HEADER, TWO_ROWS, batch
from tokenbus_contracts import BatchHeader, ContractError, LogprobBatch, RowStatus, Rule, Scoring, decode, encode


@pytest.mark.parametrize("name", ["header", "token_ids", "_layout", "anything"])
def test_batch_does_not_change(name: str) -> None:
    made = batch()
    with pytest.raises(AttributeError, match="a batch is immutable"):
        setattr(made, name, None)
    with pytest.raises(AttributeError, match="a batch is immutable"):
        delattr(made, name)
    assert encode(made) == encode(batch())


def test_array_that_changes_while_it_is_encoded_is_checked_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenbus_contracts import native, wire  # noqa: PLC0415

    ids = np.array([3, 4, 0], np.uint32)
    made = batch(token_ids=ids)
    write = wire.write

    def late(*arguments: Any) -> bytes:  # noqa: ANN401
        ids[0] = 2**32 - 1
        data = write(*arguments)
        ids[0] = 3
        return data

    monkeypatch.setattr(wire, "write", late)
    for check in (native._accepts, None):
        monkeypatch.setattr(native, "_accepts", check)
        with pytest.raises(ContractError, match=r"^token_ids\[0\]: at most 2147483646, got 4294967295$"):
            encode(made)


@pytest.mark.parametrize("index", [-1, 2, 3])
def test_row_that_is_not_there(index: int) -> None:
    with pytest.raises(IndexError, match=f"row {index} of a batch of 2"):
        batch().row(index)


@pytest.mark.parametrize("rows", [[True, False], [0.9], [[0]], "0", [-1], [0, 2], [1, 1]])
def test_selection_of_what_are_no_places(rows: Any) -> None:  # noqa: ANN401
    with pytest.raises(ContractError, match=r"^rows: "):
        batch().select(rows)


def test_selection_of_nothing_is_an_empty_batch() -> None:
    empty = batch().select([])
    assert decode(encode(empty)) == empty
    assert (empty.row_count, empty.header.selection, empty.header.step_rows) == (0, True, 2)


@pytest.mark.parametrize("name", ["token_ids", "logprobs", "top_ks", "alternative_logprobs", "positions"])
def test_rows_of_inconsistent_columns_are_refused(name: str) -> None:
    wrong = batch(**{name: [*TWO_ROWS[name], TWO_ROWS[name][-1]], "batch_indices": [1, 0]})
    assert not wrong.has_consistent_lengths()
    for use in (lambda: wrong.row(0), wrong.in_batch_order, lambda: wrong.select([0]), lambda: list(wrong.rows())):
        with pytest.raises(ContractError) as refused:
            use()
        assert refused.value.rule == Rule.LENGTH


def test_a_new_header_takes_the_columns_as_they_are() -> None:
    """Giving a batch another header looks at none of its columns: what breaks the contract is refused by `encode`."""
    broken = batch(**(TWO_ROWS | {"token_counts": [2, 9]}))
    headed = broken.headed(HEADER._replace(step=9))
    assert (headed.header.step, headed.columns["token_counts"].tolist()) == (9, [2, 9])
    with pytest.raises(ContractError) as refused:
        encode(headed)
    with pytest.raises(ContractError) as expected:
        encode(broken)
    assert str(refused.value) == str(expected.value)


def test_keys_on_both_sides_of_the_sign_bit() -> None:
    keys = [2**63, 1]
    assert batch(request_ids=keys).request_ids.tolist() == keys
    assert batch(request_ids=[2**64 - 1, 0]).request_ids.tolist() == [2**64 - 1, 0]


def test_masked_array_is_refused() -> None:
    masked = np.ma.MaskedArray([-0.5, -1.5, 0.0], [False, True, False])
    with pytest.raises(ContractError, match=r"^logprobs: a value for every element, got a masked array$"):
        batch(logprobs=masked)


@pytest.mark.parametrize("what", [None, {}, b"", "batch", 7])
def test_encode_of_what_is_no_batch(what: Any) -> None:  # noqa: ANN401
    with pytest.raises(ContractError, match=r"^batch: a LogprobBatch, got "):
        encode(what)


def _released() -> memoryview:
    view = memoryview(b"gone")
    view.release()
    return view


@pytest.mark.parametrize("what", [None, 5, "text", [1, 2], _released()])
def test_decode_of_what_are_no_bytes(what: Any) -> None:  # noqa: ANN401
    with pytest.raises(ContractError, match=r"^message: bytes, got "):
        decode(what)


def test_size_of_a_buffer_is_its_bytes() -> None:
    for wide in (np.zeros(2**18 + 1, "u8"), np.zeros((1, 2**21 + 8), "u1")):
        with pytest.raises(ContractError, match=r"^message: at most 2097152 bytes, got 2097160$"):
            decode(wide.data)
    data = encode(batch())
    spread = np.repeat(np.frombuffer(data, "u1"), 2)[::2]
    assert decode(spread.data) == batch()


def test_error_is_one_short_line_whatever_came() -> None:
    for value in (10**5000, "x\ny\x1b[31m", "y" * 10_000):
        with pytest.raises(ContractError) as refused:
            encode(LogprobBatch(HEADER._replace(epoch=value), **TWO_ROWS))  # type: ignore[arg-type]
        line = str(refused.value)
        assert line.isprintable()
        assert len(line) < 400


@pytest.mark.parametrize(("begins", "ends"), [([0], [0]), ([1, 1], [0, 1]), ([-1, 0], [1, 1]), ([0, 0], [2, 2])])
def test_tokens_between_places_that_are_not_there(begins: list[int], ends: list[int]) -> None:
    with pytest.raises(ContractError, match=r"^begins: "):
        batch().between(begins, ends)


def stopped(statuses: list[RowStatus], stops: list[int], first: int = 0) -> LogprobBatch:
    rows = len(statuses)
    header = BatchHeader("w", epoch=1, sequence=1, step=1, step_rows=6, part_count=2, part_index=int(first > 0))
    return LogprobBatch(
        header, request_ids=np.arange(rows) + first + 1, batch_indices=np.arange(rows) + first, positions=[0] * rows,
        statuses=statuses, token_counts=[1] * rows, draft_token_counts=[0] * rows, proposal_counts=[0] * rows,
        scorings=[Scoring.NONE] * rows, top_ks=[0] * rows, token_ids=np.arange(rows) + 50, stops=stops,
    )  # fmt: skip


ACTIVE, STOP, LENGTH = RowStatus.ACTIVE, RowStatus.FINISHED_STOP, RowStatus.FINISHED_LENGTH


def test_part_without_stops_joins_one_with_them() -> None:
    silent, told = stopped([STOP, ACTIVE, STOP], []), stopped([LENGTH, STOP, STOP], [2, 0], first=3)
    for parts in ([silent, told], [told, silent]):
        assert [row.stop for row in LogprobBatch.joined(parts).rows()] == [0, 0, 0, 0, 2, 0]
    assert LogprobBatch.joined([silent, stopped([ACTIVE], [], first=3)]).stops.size == 0


def test_joined_batch_has_the_header_of_its_last_part() -> None:
    made = stopped([STOP, ACTIVE, STOP, LENGTH], [1, 0])
    header = made.header._replace(part_count=2)
    parts = [
        LogprobBatch.of_views(header._replace(part_index=place, sequence=8 + place), made.select(rows).columns)
        for place, rows in enumerate(([0, 1], [2, 3]))
    ]
    joined = LogprobBatch.joined(parts)
    assert joined.header == header._replace(part_index=0, part_count=1, sequence=9)
    assert joined.request_ids.tolist() == made.request_ids.tolist()


def test_a_row_is_a_view_each_time() -> None:
    made = decode(encode(batch()))
    first, again = made.row(1), made.row(1)
    assert np.shares_memory(first.token_ids, again.token_ids)
    assert np.shares_memory(first.token_ids, made.token_ids)
    assert repr(next(made.rows())) == repr(next(made.rows())) == repr(made.row(0))
