"""The rows of a step, grouped by route."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus.delivery.slots import Slots
from tokenbus.processor.client_frames import selection_header
from tokenbus_contracts import LogprobBatch
from tokenbus_contracts.native import RequestColumns
from tokenbus_contracts.wire import deal

Rows = npt.NDArray[np.intp]


class RoutedRows(NamedTuple):
    """Rows of a step that have the same route."""

    route: int
    rows: Rows
    """Row numbers in the step, in original batch order."""
    message: bytes = b""
    """The rows as an encoded message, or empty if they are not encoded yet."""
    request_ids: bytes = b""
    """Request ids of the message, as bytes."""


def split_message(
    batch: LogprobBatch, slots: Slots, requests: RequestColumns, stream: int, first_client: int
) -> list[RoutedRows] | None:
    """Split a step by route and encode each client's message in one native pass, the fast path of most steps.

    Returns None if a row is not at the next position of its request, or if the step is not a single message.
    """
    # The rows are not validated here, because the processor decoded them, and the client validates them again.
    found = deal(batch, selection_header(batch), slots, requests, stream, first_client)
    if found is None:
        return None
    rows, shares = found
    return [RoutedRows(route, rows[begin:end], message, ids) for route, begin, end, message, ids in shares]


def split_rows(batch: LogprobBatch, routes: npt.NDArray[np.int32]) -> list[RoutedRows]:
    """Split the rows of any step by route; `routes` has the route of each row."""
    indices = batch.batch_indices
    is_in_order = bool((indices[1:] > indices[:-1]).all())
    rows: Rows = routes.argsort(kind="stable") if is_in_order else np.lexsort((indices, routes))
    by_route = routes[rows]
    cuts = np.flatnonzero(by_route[1:] != by_route[:-1]) + 1
    bounds = [0, *cuts.tolist(), routes.size]
    return [RoutedRows(int(by_route[begin]), rows[begin:end]) for begin, end in pairwise(bounds) if begin < end]
