"""Rows: views of their batch's columns, and tuples like any other."""

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest

from tests.contracts.test_encode import batch
from tokenbus_contracts import Row, decode, encode

DATA = encode(batch())


def test_a_row_is_a_view_each_time() -> None:
    """A batch keeps no row: each that is asked for has views of its columns, and each iterator begins anew."""
    made = decode(DATA)
    first, again = made.row(1), made.row(1)
    assert np.shares_memory(first.token_ids, again.token_ids)
    assert np.shares_memory(first.token_ids, made.token_ids)
    assert repr(next(made.rows())) == repr(next(made.rows())) == repr(made.row(0))


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda row: pickle.loads(pickle.dumps(row))])  # noqa: S301
def test_a_row_is_a_named_tuple(again: Callable[[Row], Row]) -> None:
    """A row can be copied, pickled, taken apart, shown and made anew with another field, as any named tuple."""
    row = decode(DATA).row(0)
    same = again(row)
    assert type(same) is Row
    assert repr(same) == repr(row)
    moved = row._replace(position=9)
    assert (type(moved), moved.position, moved.token_ids) == (Row, 9, row.token_ids)
    key, *_, extras = row
    assert (key, extras) == (row.key, row.extras) == (5, None)
    assert repr(row).startswith("Row(key=5, batch_index=0, position=0, status=<RowStatus.ACTIVE: 1>, ")
