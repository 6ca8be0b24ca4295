"""The rows of a step by route, one group for each consumer."""

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
    """The rows of a step that have one route."""

    route: int
    rows: Rows
    """The numbers of the rows in the step, in original batch order."""
    message: bytes = b""
    """The rows as one message; empty: they are not written yet."""
    request_ids: bytes = b""
    """The ids of the message's requests."""


def split_message(
    batch: LogprobBatch, slots: Slots, requests: RequestColumns, stream: int, first_client: int
) -> list[RoutedRows] | None:
    """Split a step by route, and write each client's message, in one native pass: the fast path of most steps.

    Returns None if a row is not the next of its request, or if the step is not a single message.
    """
    # Not validated again: the processor decoded these rows, and the client validates them.
    found = deal(batch, selection_header(batch), slots, requests, stream, first_client)
    if found is None:
        return None
    rows, shares = found
    return [RoutedRows(route, rows[begin:end], message, ids) for route, begin, end, message, ids in shares]


def split_rows(batch: LogprobBatch, routes: npt.NDArray[np.int32]) -> list[RoutedRows]:
    """Split the rows of any step, given the route of each row."""
    indices = batch.batch_indices
    is_in_order = bool((indices[1:] > indices[:-1]).all())
    rows: Rows = routes.argsort(kind="stable") if is_in_order else np.lexsort((indices, routes))
    by_route = routes[rows]
    cuts = np.flatnonzero(by_route[1:] != by_route[:-1]) + 1
    bounds = [0, *cuts.tolist(), routes.size]
    return [RoutedRows(int(by_route[begin]), rows[begin:end]) for begin, end in pairwise(bounds) if begin < end]
