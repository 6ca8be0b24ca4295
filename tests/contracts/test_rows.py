"""Rows: the same whichever way a batch came about, whatever was read of it before, and tuples like any other."""

import copy
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.contracts.plain_rows import batch_of
from tests.contracts.test_encode import batch
from tests.contracts.valid_messages import canonical, seeded, valid_message
from tokenbus_contracts import Limits, LogprobBatch, Row, decode, encode, native
from tokenbus_contracts.schema import COLUMN

DATA = encode(batch())


def plain(row: Row) -> list[Any]:
    """Return a row as values that can be compared: of an array its type, shape and elements."""
    return [
        (value.dtype, value.shape, value.tolist()) if isinstance(value, np.ndarray) else (type(value), value)
        for value in (*row[:-1], *(row.extras or ()))
    ]


def read_in_python(data: bytes) -> LogprobBatch:
    """Return a message's batch as it is read where there is no compiled check."""
    with mock.patch.object(native, "_accepts", None):
        return decode(data, Limits.schema())


def test_rows_are_the_same_whichever_way_the_batch_came_about() -> None:
    """Columns read where they lie, arrays of a reader in Python and a caller's lists give equal batches and rows."""
    for seed in range(50):
        rng = seeded(seed)
        message = valid_message(rng)
        data = canonical(message)
        batches = [decode(data, Limits.schema()), read_in_python(data), batch_of(message)]
        for name in rng.sample(sorted(COLUMN), rng.randint(0, 5)):
            getattr(batches[0], name)
        expected = [plain(row) for row in batches[1].rows()]
        for made in batches:
            assert [plain(row) for row in made.rows()] == expected
            assert [plain(made.row(place)) for place in range(made.row_count)] == expected
            assert made == batches[1]
        assert repr(batches[0].header) == repr(
            batches[1].header
        )  # with its flags and names, not only numbers like them


def test_a_row_is_a_view_each_time() -> None:
    """A batch keeps no row: each that is asked for has views of its columns, and each iterator begins anew."""
    made = decode(DATA)
    first, again = made.row(1), made.row(1)
    assert plain(first) == plain(again)
    assert np.shares_memory(first.token_ids, again.token_ids)
    assert np.shares_memory(first.token_ids, made.token_ids)
    assert plain(next(made.rows())) == plain(next(made.rows())) == plain(made.row(0))


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda row: pickle.loads(pickle.dumps(row))])  # noqa: S301
def test_a_row_is_a_named_tuple(again: Callable[[Row], Row]) -> None:
    """A row can be copied, pickled, taken apart, shown and made anew with another field, as any named tuple."""
    row = decode(DATA).row(0)
    same = again(row)
    assert type(same) is Row
    assert plain(same) == plain(row)
    moved = row._replace(position=9)
    assert (type(moved), moved.position, moved.token_ids) == (Row, 9, row.token_ids)
    key, *_, extras = row
    assert (key, extras) == (row.key, row.extras) == (5, None)
    assert repr(row).startswith("Row(key=5, batch_index=0, position=0, status=<RowStatus.ACTIVE: 1>, ")
