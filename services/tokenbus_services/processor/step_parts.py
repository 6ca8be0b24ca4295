"""A step's rows, cut into a part for each consumer: once for all of them, whatever their number."""

from collections.abc import Iterator
from itertools import islice, pairwise

import numpy as np
import numpy.typing as npt

from tokenbus_contracts import Limits, LogprobBatch
from tokenbus_contracts.wire import write_parts

Rows = npt.NDArray[np.intp]
_Message = tuple[bytes, bytes]


class StepParts:
    """The parts of a step, each the rows of one route, in original batch order."""

    def __init__(self, batch: LogprobBatch, routes: npt.NDArray[np.int32]) -> None:
        """Take a step's rows, at least one, and the route of each."""
        indices = batch.batch_indices
        is_in_order = bool((indices[1:] > indices[:-1]).all())
        self._batch = batch
        self._rows: Rows = routes.argsort(kind="stable") if is_in_order else np.lexsort((indices, routes))
        by_route = routes[self._rows]
        begins = [0, *(np.flatnonzero(by_route[1:] != by_route[:-1]) + 1).tolist()]
        self._bounds = [*begins, routes.size]
        self._routes: list[int] = by_route[begins].tolist()
        self._messages: list[list[_Message]] = []

    def __iter__(self) -> Iterator["Part"]:
        """Yield each part."""
        for number, (begin, end) in enumerate(pairwise(self._bounds)):
            yield Part(self, number, self._routes[number], self._rows[begin:end])

    def messages(self, number: int, limits: Limits) -> list[_Message]:
        """Return a part as messages; the first call writes those of all parts."""
        if not self._messages:
            self._messages = self._written(limits)
        return self._messages[number]

    def _written(self, limits: Limits) -> list[list[_Message]]:
        begins = [range(begin, end, limits.max_rows) for begin, end in pairwise(self._bounds)]
        bounds = [*(begin for part in begins for begin in part), self._bounds[-1]]
        header = self._batch.header._replace(selection=True, draft_follows=False)
        # Not checked again: the rows are of batches that the processor decoded, and the client checks what it reads.
        written = write_parts(self._batch.headed(header), self._rows, np.array(bounds[1:]), limits)
        ids = self._batch.request_keys[self._rows].tobytes()
        messages = iter(zip(written, [ids[begin * 8 : end * 8] for begin, end in pairwise(bounds)], strict=True))
        return [list(islice(messages, len(part))) for part in begins]


class Part:
    """The rows of a step that one consumer takes."""

    __slots__ = ("_number", "_parts", "route", "rows")

    def __init__(self, parts: StepParts, number: int, route: int, rows: Rows) -> None:
        self._parts = parts
        self._number = number
        self.route = route
        self.rows = rows
        """The places of its rows in the step."""

    def messages(self, limits: Limits) -> list[_Message]:
        """Return its rows as messages, each with the ids of their requests: one, or more where they are too many."""
        return self._parts.messages(self._number, limits)
