"""StepParts: every row of a step goes to its own consumer's part, whatever the rows hold and however they are made."""

import random

import numpy as np
import pytest

from tests.services.builders import settings
from tokenbus.testing import RowShape, batch
from tokenbus_contracts import LogprobBatch, decode, encode
from tokenbus_services.processor.step_parts import StepParts


def shape(random_: random.Random, key: int) -> RowShape:
    return RowShape(key, random_.randint(0, 9), tokens=random_.randint(1, 3), top_k=random_.choice([0, 0, 2, 5]))


@pytest.mark.parametrize("as_message", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_parts_have_each_row_once(seed: int, as_message: bool) -> None:  # noqa: FBT001
    """Each part has the rows of its route in batch order, as places and as messages that say they are selections."""
    random_ = random.Random(seed)  # noqa: S311 - it picks test data
    count = random_.randint(1, 20)
    indices = random_.sample(range(count), count) if seed % 2 else range(count)
    made = batch([shape(random_, key) for key in range(1, count + 1)], indices=indices)
    made = decode(encode(made)) if as_message else made
    routes = np.array(random_.choices((1, 4, 9), k=count), np.int32)
    limits = settings({"limits.max_rows": random_.choice([3, 512])}).limits
    parts = list(StepParts(made, routes))
    assert [part.route for part in parts] == sorted(set(routes.tolist()))
    for part in parts:
        expected = made.select(np.flatnonzero(routes == part.route)).in_batch_order()
        assert made.select(part.rows) == expected
        found = [decode(message) for message, _ in part.messages(limits)]
        assert LogprobBatch.joined(found).columns.keys() == expected.columns.keys()
        assert LogprobBatch.joined(found) == expected
        assert all(each.row_count <= limits.max_rows for each in found)
        ids = [each.request_keys.tobytes() for each in found]
        assert [of_message for _, of_message in part.messages(limits)] == ids
