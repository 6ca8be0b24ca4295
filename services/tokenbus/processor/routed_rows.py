"""The rows of a step by route, one group for each consumer. One pass writes the messages of all groups."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice, pairwise

import numpy as np
import numpy.typing as npt

from tokenbus.delivery.slots import Slots
from tokenbus.processor.client_frames import room_in, selection_header
from tokenbus_contracts import ContractError, Limits, LogprobBatch, Rule
from tokenbus_contracts.native import RequestColumns
from tokenbus_contracts.wire import deal, write_parts

Rows = npt.NDArray[np.intp]
_Message = tuple[bytes, bytes]
"""A message, and the ids of its requests."""


class RoutedRows:
    """The rows of a step that have one route."""

    __slots__ = ("messages", "route", "rows")

    def __init__(self, route: int, rows: Rows, messages: Callable[[Limits], list[_Message]]) -> None:
        self.route = route
        self.rows = rows
        """The numbers of the rows in the step, in original batch order."""
        self.messages = messages
        """Returns the rows as one message, or as several if one would exceed the limits."""


def split_message(
    batch: LogprobBatch, slots: Slots, requests: RequestColumns, stream: int, first_client: int
) -> list[RoutedRows] | None:
    """Split a step by route in one native pass: the fast path of most steps.

    Returns None if a row is not the next of its request, or if the step is not a single message.
    """
    # Not validated again: the processor decoded these rows, and the client validates them.
    found = deal(batch, selection_header(batch), slots, requests, stream, first_client)
    if found is None:
        return None
    rows, shares = found
    return [
        RoutedRows(route, rows[begin:end], partial(_checked, (message, ids)))
        for route, begin, end, message, ids in shares
    ]


def _checked(message: _Message, limits: Limits) -> list[_Message]:
    if len(message[0]) > limits.max_message_bytes:
        raise ContractError("message", limits.max_message_bytes, len(message[0]), rule=Rule.BYTES)
    return [message]


class RowsByRoute:
    """The rows of any step by route."""

    def __init__(self, batch: LogprobBatch, routes: npt.NDArray[np.int32]) -> None:
        indices = batch.batch_indices
        is_in_order = bool((indices[1:] > indices[:-1]).all())
        self._batch = batch
        self._rows: Rows = routes.argsort(kind="stable") if is_in_order else np.lexsort((indices, routes))
        by_route = routes[self._rows]
        begins = [0, *(np.flatnonzero(by_route[1:] != by_route[:-1]) + 1).tolist()]
        self._bounds = [*begins, routes.size]
        self._routes: list[int] = by_route[begins].tolist()
        self._messages: list[list[_Message]] = []

    def __iter__(self) -> Iterator[RoutedRows]:
        for number, (begin, end) in enumerate(pairwise(self._bounds)):
            yield RoutedRows(self._routes[number], self._rows[begin:end], partial(self._messages_of, number))

    def _messages_of(self, number: int, limits: Limits) -> list[_Message]:
        if not self._messages:  # the first call writes the messages of all routes
            self._messages = self._written(limits)
        return self._messages[number]

    def _written(self, limits: Limits) -> list[list[_Message]]:
        begins = [self._begins(begin, end, limits) for begin, end in pairwise(self._bounds)]
        bounds = [*(begin for of_route in begins for begin in of_route), self._bounds[-1]]
        batch = self._batch.headed(selection_header(self._batch))
        written = write_parts(batch, self._rows, np.array(bounds[1:]), limits)  # not validated again, as above
        ids = self._batch.request_ids[self._rows].tobytes()
        messages = iter(zip(written, [ids[begin * 8 : end * 8] for begin, end in pairwise(bounds)], strict=True))
        return [list(islice(messages, len(of_route))) for of_route in begins]

    def _begins(self, begin: int, end: int, limits: Limits) -> Sequence[int]:
        """Return where the messages of a route's rows begin.

        Rows from a single received message fit into one message.
        """
        if self._batch.is_message or self._batch.nbytes <= room_in(limits):
            return range(begin, end, limits.max_rows)
        ends = self._batch.select(self._rows[begin:end]).runs(limits.max_rows, room_in(limits))
        return [begin, *(begin + each for each in ends[:-1])]
