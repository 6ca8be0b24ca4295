"""Extras: what a row has beyond its logprobs, where its request asked for it."""

from collections.abc import Iterable, Iterator, Mapping
from enum import IntFlag
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus_contracts.generated.bounds_pb2 import ColumnLength

if TYPE_CHECKING:
    from tokenbus_contracts.batch import LogprobBatch
    from tokenbus_contracts.layout import Index


class Extra(IntFlag):
    """What the column `extras` says of a row: which further values each of its tokens has.

    Example:
        both = tokenbus.Extra.OTHER_LOGPROB | tokenbus.Extra.ENTROPY
        assert both == 3
    """

    OTHER_LOGPROB = 1
    ENTROPY = 2


class Extras(NamedTuple):
    """What one row has beyond its logprobs; what its request did not ask for is empty.

    Example:
        async with tokenbus.connect(address) as client:
            async for row in client.generate([1, 2, 3], max_tokens=4, entropies=True, mask_bound=8).rows():
                print(row.extras.entropies, list(row.extras.masks()))
    """

    other_logprobs: npt.NDArray[np.float32]
    """Of each token in the other distribution: the sampled one if `logprobs` are the model's own, and the reverse."""
    entropies: npt.NDArray[np.float32]
    """Of each token, the entropy of the distribution that `logprobs` are of, in nats."""
    given_token_ids: npt.NDArray[np.uint32]
    """The ids that the request gave."""
    given_logprobs: npt.NDArray[np.float32]
    """A line for each token, with the value of each given id."""
    mask_sizes: npt.NDArray[np.uint32]
    """How many ids sampling could have chosen, for each token."""
    mask_token_ids: npt.NDArray[np.uint32]
    """Those ids, token by token; see `masks`."""
    mask_bound: int
    """The ids of a token are there if they are no more than this."""

    def as_lists(self) -> dict[str, list[Any]]:
        """Return what was asked for, as JSON has it; of a mask that is too large to tell, null."""
        found: dict[str, list[Any]] = {
            name: values.tolist()
            for name in ("other_logprobs", "entropies", "given_token_ids", "given_logprobs", "mask_sizes")
            if (values := getattr(self, name)).size
        }
        if self.mask_bound:
            found["masks"] = [None if mask is None else mask.tolist() for mask in self.masks()]
        return found

    def masks(self) -> Iterator[npt.NDArray[np.uint32] | None]:
        """Yield which ids sampling could have chosen, for each token; None: more than its mask_bound."""
        begin = 0
        for size in self.mask_sizes.tolist():
            is_listed = size <= self.mask_bound
            yield self.mask_token_ids[begin : begin + size] if is_listed else None
            begin += size * is_listed


def extras_of(batch: "LogprobBatch", starts: Mapping[int, "Index"]) -> list[Extras | None]:
    """Return each row's extras; None: it asked for none. `starts` has where each row's elements begin, by length."""
    rows = batch.row_count
    nothing = np.zeros(rows, np.uint32)
    kinds, given, bounds = (
        (column if column.size else nothing).tolist()
        for column in (batch.extras, batch.given_counts, batch.mask_bounds)
    )

    def parts(values: npt.NDArray[Any], length: int) -> Iterable[npt.NDArray[Any]]:
        begins = starts[length].tolist()
        return map(values.__getitem__, map(slice, begins, begins[1:])) if values.size else repeat(values)

    lines = map(
        np.ndarray.reshape,
        parts(batch.given_logprobs, ColumnLength.COLUMN_LENGTH_GIVEN_LOGPROBS),
        zip(batch.token_counts.tolist(), given, strict=True),
    )
    columns = (
        parts(batch.other_logprobs, ColumnLength.COLUMN_LENGTH_OTHER_LOGPROBS),
        parts(batch.entropies, ColumnLength.COLUMN_LENGTH_ENTROPIES),
        parts(batch.given_token_ids, ColumnLength.COLUMN_LENGTH_GIVEN_TOKENS),
        lines,
        parts(batch.mask_sizes, ColumnLength.COLUMN_LENGTH_MASKED_TOKENS),
        parts(batch.mask_token_ids, ColumnLength.COLUMN_LENGTH_MASK_TOKENS),
        bounds,
    )
    # A column at a time: that takes a third of one row after the other.
    made = map(tuple.__new__, repeat(Extras), zip(*columns, strict=False))
    asked = zip(made, kinds, given, bounds, strict=True)
    return [extras if kind or ids or bound else None for extras, kind, ids, bound in asked]
