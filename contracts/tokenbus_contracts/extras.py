"""Extras: the optional values of a row's tokens that a request asked for."""

from collections.abc import Iterable, Iterator, Mapping
from enum import IntFlag
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus_contracts.generated.bounds_pb2 import ColumnLength
from tokenbus_contracts.generated.columns import ColumnArrays


class Extra(IntFlag):
    """Optional values of each token of a row, as flags of the column `extras`.

    Example:
        both = tokenbus.Extra.OTHER_LOGPROB | tokenbus.Extra.ENTROPY
        assert both == 3
    """

    OTHER_LOGPROB = 1
    ENTROPY = 2


class Extras(NamedTuple):
    """Optional values of one row's tokens. Values that the request did not ask for are empty.

    Example:
        async with tokenbus.connect(address) as client:
            async for row in client.generate([1, 2, 3], max_tokens=4, entropies=True, mask_bound=8).rows():
                print(row.extras.entropies, list(row.extras.masks()))
    """

    other_logprobs: npt.NDArray[np.float32]
    """Each token's logprob in the other distribution: raw if `logprobs` are processed, and processed otherwise."""
    entropies: npt.NDArray[np.float32]
    """For each token, the entropy in nats of the distribution of `logprobs`."""
    given_token_ids: npt.NDArray[np.uint32]
    """The token ids that the request asked to score."""
    given_logprobs: npt.NDArray[np.float32]
    """For each token, the logprobs of `given_token_ids`."""
    mask_sizes: npt.NDArray[np.uint32]
    """The size of each token's mask: the number of ids that sampling could choose."""
    mask_token_ids: npt.NDArray[np.uint32]
    """The ids of all listed masks, concatenated. The method `masks` splits the ids by token."""
    mask_bound: int
    """The maximum size of a mask whose ids are listed."""

    def as_lists(self) -> dict[str, list[Any]]:
        """Return the values for JSON. A mask that is too large to list becomes null."""
        found: dict[str, list[Any]] = {
            name: values.tolist()
            for name in ("other_logprobs", "entropies", "given_token_ids", "given_logprobs", "mask_sizes")
            if (values := getattr(self, name)).size
        }
        if self.mask_bound:
            found["masks"] = [None if mask is None else mask.tolist() for mask in self.masks()]
        return found

    def masks(self) -> Iterator[npt.NDArray[np.uint32] | None]:
        """Yield, for each token, the ids that sampling could choose. A mask larger than `mask_bound` is None."""
        begin = 0
        for size in self.mask_sizes.tolist():
            is_listed = size <= self.mask_bound
            yield self.mask_token_ids[begin : begin + size] if is_listed else None
            begin += size * is_listed


def extras_of(batch: ColumnArrays, starts: Mapping[int, npt.NDArray[np.intp]]) -> list[Extras | None]:
    """Return the extras of each row, or None for a row without extras. `starts` is `Layout.starts`."""
    nothing = np.zeros(batch.request_ids.size, np.uint32)
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
    # Building tuples column by column takes a third of the time of building them row by row.
    made = map(tuple.__new__, repeat(Extras), zip(*columns, strict=False))
    asked = zip(made, kinds, given, bounds, strict=True)
    return [extras if kind or ids or bound else None for extras, kind, ids, bound in asked]
