"""A step's rows, cut into a part for each consumer: once for all of them, whatever their number."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice, pairwise

import numpy as np
import numpy.typing as npt

from tokenbus.delivery.slots import Slots
from tokenbus.processor.client_frames import room_in
from tokenbus_contracts import ContractError, Limits, LogprobBatch, Rule
from tokenbus_contracts.header import BatchHeader
from tokenbus_contracts.native import RequestColumns
from tokenbus_contracts.wire import deal, write_parts

Rows = npt.NDArray[np.intp]
_Message = tuple[bytes, bytes]


class Part:
    """The rows of a step that one consumer takes."""

    __slots__ = ("messages", "route", "rows")

    def __init__(self, route: int, rows: Rows, messages: Callable[[Limits], list[_Message]]) -> None:
        self.route = route
        self.rows = rows
        """The places of its rows in the step."""
        self.messages = messages
        """Returns its rows as messages, each with the ids of their requests: one, or more where they are too many."""


def dealt(
    batch: LogprobBatch, slots: Slots, requests: RequestColumns, stream: int, first_client: int
) -> list[Part] | None:
    """Return a step's parts in one pass, and move their requests on: a processor's way of most steps.

    None, with nothing changed: a row is not the next of a request that the stream has, or the step is no message.
    """
    # Not checked again: the rows are of batches that the processor decoded, and the client checks what it reads.
    found = deal(batch, _headed(batch), slots, requests, stream, first_client)
    if found is None:
        return None
    rows, shares = found
    return [
        Part(route, rows[begin:end], partial(_within, (message, ids))) for route, begin, end, message, ids in shares
    ]


def _within(message: _Message, limits: Limits) -> list[_Message]:
    if len(message[0]) > limits.max_message_bytes:
        raise ContractError("message", limits.max_message_bytes, len(message[0]), rule=Rule.BYTES)
    return [message]


def _headed(batch: LogprobBatch) -> BatchHeader:
    return batch.header._replace(selection=True, draft_follows=False)


class StepParts:
    """The parts of a step, each the rows of one route, in original batch order."""

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

    def __iter__(self) -> Iterator[Part]:
        for number, (begin, end) in enumerate(pairwise(self._bounds)):
            yield Part(self._routes[number], self._rows[begin:end], partial(self._messages_of, number))

    def _messages_of(self, number: int, limits: Limits) -> list[_Message]:
        if not self._messages:  # the first call writes those of all parts
            self._messages = self._written(limits)
        return self._messages[number]

    def _written(self, limits: Limits) -> list[list[_Message]]:
        begins = [self._begins(begin, end, limits) for begin, end in pairwise(self._bounds)]
        bounds = [*(begin for part in begins for begin in part), self._bounds[-1]]
        # Not checked again, as above.
        written = write_parts(self._batch.headed(_headed(self._batch)), self._rows, np.array(bounds[1:]), limits)
        ids = self._batch.request_ids[self._rows].tobytes()
        messages = iter(zip(written, [ids[begin * 8 : end * 8] for begin, end in pairwise(bounds)], strict=True))
        return [list(islice(messages, len(part))) for part in begins]

    def _begins(self, begin: int, end: int, limits: Limits) -> Sequence[int]:
        """Return where the messages of some rows begin; those of one message of the stream are no more in another."""
        if self._batch.is_message or self._batch.nbytes <= room_in(limits):
            return range(begin, end, limits.max_rows)
        ends = self._batch.select(self._rows[begin:end]).runs(limits.max_rows, room_in(limits))
        return [begin, *(begin + each for each in ends[:-1])]
