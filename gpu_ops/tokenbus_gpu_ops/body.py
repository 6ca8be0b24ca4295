"""Where the results lie in memory: laid out as in the message, so that they are not copied again."""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus_contracts.schema import COLUMN, Column
from tokenbus_contracts.wire import prefix_of

COLUMNS: tuple[Column, ...] = tuple(
    COLUMN[name] for name in ("token_ids", "logprobs", "ranks", "alternative_token_ids", "alternative_logprobs")
)
"""The last columns but one of the message, in their order there: what is computed."""

_ITEM_BYTES = 4
_BODIES_KEPT = 1024


class Place(NamedTuple):
    """One column: where its first element is, how many it has, and the bytes before it in a message."""

    at: int
    items: int
    prefix: bytes


class Body(NamedTuple):
    """One call's output: a byte for each scored token that says whether something was wrong, and the columns."""

    faults: int
    at: int
    """Where the columns begin, their first prefix included."""
    end: int
    places: tuple[Place, ...]

    def column(self, memory: npt.NDArray[np.uint8], which: int) -> npt.NDArray[Any]:
        """Return a view of one column; it is wherever the message has it, so seldom aligned."""
        place = self.places[which]
        return memory[place.at : place.at + place.items * _ITEM_BYTES].view(COLUMNS[which].dtype)

    def write_prefixes(self, memory: npt.NDArray[np.uint8]) -> None:
        """Write what stands before each column."""
        for place in self.places:
            memory[place.at - len(place.prefix) : place.at] = np.frombuffer(place.prefix, np.uint8)


@lru_cache(_BODIES_KEPT)
def body(tokens: int, scored: int, alternatives: int) -> Body:
    """Return the layout for so many elements; a column without any is left out, as protobuf leaves it out."""
    items = (tokens, scored, scored, alternatives, alternatives)
    prefixes = [
        prefix_of(column.key, count * _ITEM_BYTES) if count else b""
        for column, count in zip(COLUMNS, items, strict=True)
    ]
    # The first column is aligned, and so are all where prefixes are of four bytes: from 4,096 tokens up.
    first = -(-(scored + len(prefixes[0])) // 16) * 16
    at = first - len(prefixes[0])
    begin, places = at, []
    for prefix, count in zip(prefixes, items, strict=True):
        at += len(prefix)
        places.append(Place(at, count, prefix))
        at += count * _ITEM_BYTES
    return Body(scored, begin, at, tuple(places))
