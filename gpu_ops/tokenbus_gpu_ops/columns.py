"""TokenColumns: the result of a call, as columns in the layout of the message."""

from enum import IntEnum
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus_contracts import schema
from tokenbus_contracts.batch import LogprobBatch
from tokenbus_contracts.generated.enums import ValueKind
from tokenbus_contracts.header import BatchHeader
from tokenbus_contracts.schema import COLUMN, Column
from tokenbus_contracts.wire import prefix_of
from tokenbus_gpu_ops.extras import NOTHING, Extras, Shape
from tokenbus_gpu_ops.plan import Plan

Memory = npt.NDArray[np.uint8]
COLUMNS: tuple[Column, ...] = tuple(
    COLUMN[name] for name in ("token_ids", "logprobs", "ranks", "alternative_token_ids", "alternative_logprobs")
)
"""The computed columns, in the order of the message."""

EXTRA_COLUMNS = tuple(column.name for column in schema.EXTRA_COLUMNS)
"""The names of the columns of extra scores."""

_EXTRA_TYPES = tuple(map(np.dtype, ("<f4", "<f4", "<f4", "<u4", "<u4")))
_ITEM_BYTES = 4
_NO_BYTES = np.zeros(0, np.uint8)
_NO_IDS = np.zeros(0, np.uint32)
_BODIES_KEPT = 1024


class Place(NamedTuple):
    """The location of one column: its offset, number of elements, type, and prefix in a message."""

    at: int
    items: int
    dtype: np.dtype[Any]
    prefix: bytes = b""

    def view(self, memory: Memory) -> npt.NDArray[Any]:
        """Return a view of the column, which may be unaligned."""
        return memory[self.at : self.at + self.items * _ITEM_BYTES].view(self.dtype)


class Body(NamedTuple):
    """The memory layout of a call's output: one fault byte for each row, followed by the columns."""

    faults: int
    at: int
    """The offset of the first column's prefix."""
    end: int
    places: tuple[Place, ...]
    extras: tuple[Place, ...]
    """The columns of extra scores. These columns follow the message's columns, are aligned, and have no prefixes."""
    size: int
    """The size of the memory in bytes."""


@lru_cache(_BODIES_KEPT)
def body(tokens: int, scored: int, alternatives: int, extras: Shape = NOTHING) -> Body:
    """Return the layout for these numbers of elements. Like protobuf, the layout omits empty columns."""
    read = scored + extras.others
    items = (tokens, scored, scored, alternatives, alternatives)
    prefixes = [
        prefix_of(column.key, count * _ITEM_BYTES) if count else b""
        for column, count in zip(COLUMNS, items, strict=True)
    ]
    # The first column is aligned. Prefixes of four bytes (from 4,096 elements on) also keep later columns aligned.
    first = _aligned(read + len(prefixes[0]))
    at = first - len(prefixes[0])
    begin, places = at, []
    for column, prefix, count in zip(COLUMNS, prefixes, items, strict=True):
        at += len(prefix)
        places.append(Place(at, count, column.dtype, prefix))
        at += count * _ITEM_BYTES
    end, others = at, []
    for dtype, count in zip(_EXTRA_TYPES, extras.sizes, strict=True):
        at = _aligned(at)
        others.append(Place(at, count, dtype))
        at += count * _ITEM_BYTES
    return Body(read, begin, end, tuple(places), tuple(others), at)


def layout_of(plan: Plan, extras: Extras | None) -> Body:
    return body(plan.tokens, plan.scored, plan.alternatives, NOTHING if extras is None else extras.shape)


def _aligned(size: int) -> int:
    return -(-size // 16) * 16


class FaultReason(IntEnum):
    """The reason why a token has no results. The kernels use the same values."""

    NOT_A_NUMBER = 1
    """A logit is NaN."""
    INFINITE = 2
    """A logit is plus infinity."""
    ALL_MASKED = 3
    """All logits are minus infinity."""
    ID_OUT_OF_RANGE = 4
    """The id is not in the vocabulary. Ids on the GPU are checked during the computation."""


class TokenFault(NamedTuple):
    """A token without results. The values of the token are NaN, so the codec refuses a batch that contains it."""

    row: int
    """The index of the request in the call."""
    token: int
    """The index of the token in `token_ids`."""
    logits_row: int
    reason: FaultReason
    in_other_logits: bool = False
    """Whether the fault is in `other_logits`. In this case, the results from `logits` are valid."""


def _computed(which: int, columns: str = "_columns") -> Any:  # noqa: ANN401 - a property, whose users declare the type
    return property(lambda self: getattr(self, columns)[which])


class TokenColumns:
    """The columns of one call, in the layout of a message.

    The first access waits for the GPU, unless `ready` is true. The arrays are views of one block of memory, which is
    reused for another call after the last view is deleted.
    """

    token_ids: npt.NDArray[np.uint32] = _computed(0)
    """The ids of the tokens."""
    logprobs: npt.NDArray[np.float32] = _computed(1)
    """The logprobs of the scored tokens."""
    ranks: npt.NDArray[np.uint32] = _computed(2)
    """The ranks of the scored tokens: 1 for the most probable token."""
    alternative_token_ids: npt.NDArray[np.uint32] = _computed(3)
    """The ids of each token's alternatives, most probable first."""
    alternative_logprobs: npt.NDArray[np.float32] = _computed(4)
    """The logprobs of the alternatives."""
    other_logprobs: npt.NDArray[np.float32] = _computed(0, "_extra_columns")
    """The values from `other_logits`, for requests that asked for `other_logprobs`."""
    entropies: npt.NDArray[np.float32] = _computed(1, "_extra_columns")
    """The entropies of `logits` in nats, for requests that asked for entropies."""
    given_logprobs: npt.NDArray[np.float32] = _computed(2, "_extra_columns")
    """The values of the given ids for each token."""
    mask_sizes: npt.NDArray[np.uint32] = _computed(3, "_extra_columns")
    """The size of each token's mask, for requests with a mask bound. The mask has all logits above -inf."""

    def __init__(
        self, plan: Plan, body: Body, kind: ValueKind, arrived: "Arrival", extras: Extras | None = None
    ) -> None:
        self._plan = plan
        self._extras = extras
        self._body = body
        self.value_kind = kind
        self._arrived = arrived

    @property
    def ready(self) -> bool:
        """Whether the results are available without waiting."""
        return self._arrived.ready()

    def wait(self) -> None:
        self._arrived.memory()

    @property
    def token_counts(self) -> npt.NDArray[np.uint8]:
        """The number of tokens of each request."""
        return self._plan.token_counts

    @property
    def scorings(self) -> npt.NDArray[np.uint8]:
        """The scoring of each request, as in the contract."""
        return self._plan.scorings

    @property
    def top_ks(self) -> npt.NDArray[np.uint8]:
        """The number of alternatives per token, for each request."""
        return self._plan.top_ks

    @property
    def extras(self) -> npt.NDArray[np.uint8]:
        """The extras of each request (1: `other_logprobs`, 2: `entropies`, 3: both). Empty if no request has extras."""
        return self._of_requests("flags", _NO_BYTES)

    @property
    def given_counts(self) -> npt.NDArray[np.uint32]:
        """The number of given ids of each request. Empty if no request has given ids."""
        return self._of_requests("given_counts", _NO_IDS)

    @property
    def mask_bounds(self) -> npt.NDArray[np.uint32]:
        """The mask bound of each request, or 0 for no mask. Empty if no request has a mask bound."""
        return self._of_requests("mask_bounds", _NO_IDS)

    @property
    def given_token_ids(self) -> npt.NDArray[np.uint32]:
        """The given ids, concatenated over the requests."""
        return _NO_IDS if self._extras is None else self._extras.given_token_ids

    @cached_property
    def mask_token_ids(self) -> npt.NDArray[np.uint32]:
        """The ids of the masks, in ascending order within each mask. A mask larger than its bound is omitted."""
        if self._extras is None:
            return _NO_IDS
        masks = self._extras.items[self._extras.items["mask_bound"] > 0]
        kept = np.where(self.mask_sizes > masks["mask_bound"], 0, self.mask_sizes).astype(np.intp)
        begins = masks["mask_ids_at"] - (np.cumsum(kept) - kept)
        ids: npt.NDArray[np.uint32] = self._extra_columns[4][begins.repeat(kept) + np.arange(kept.sum())]
        return ids

    @property
    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """The columns by their names in LogprobBatch."""
        rows = {"token_counts": self.token_counts, "scorings": self.scorings, "top_ks": self.top_ks}
        return rows | {column.name: array for column, array in zip(COLUMNS, self._columns, strict=True)}

    @property
    def extra_columns(self) -> dict[str, npt.NDArray[Any]]:
        """The nonempty columns of extra scores by name."""
        found = {name: getattr(self, name) for name in EXTRA_COLUMNS}
        return {name: column for name, column in found.items() if column.size}

    @property
    def body(self) -> memoryview:
        """The encoded columns of a message: fields 11 to 15, each with its key and length."""
        memory = self._arrived.memory()
        return memory[self._body.at : self._body.end].data

    @cached_property
    def faults(self) -> tuple[TokenFault, ...]:
        """The tokens without results. Usually, the tuple is empty."""
        flags = self._arrived.memory()[: self._body.faults]
        ends = np.cumsum(self.token_counts, dtype=np.intp)
        found = []
        for item in np.flatnonzero(flags).tolist():
            in_other = item >= self._plan.scored
            scored = self._extras.others[item - self._plan.scored] if in_other and self._extras else item
            token = int(self._plan.scored_tokens[scored])
            row = int(np.searchsorted(ends, token, side="right"))
            logits_row, reason = int(self._plan.token_rows[token]), FaultReason(flags[item])
            found.append(TokenFault(row, token, logits_row, reason, in_other))
        return tuple(found)

    def batch(self, header: BatchHeader, **rows: npt.ArrayLike) -> LogprobBatch:
        """Return a batch with these columns and the caller's row columns, such as request ids and statuses."""
        return LogprobBatch(header._replace(value_kind=self.value_kind), **self.columns, **self.extra_columns, **rows)

    def __repr__(self) -> str:
        """Return the numbers of rows, tokens and alternatives, without waiting for the results."""
        plan = self._plan
        return f"<TokenColumns rows={plan.requests} tokens={plan.tokens} alternatives={plan.alternatives}>"

    def _of_requests(self, name: str, none: npt.NDArray[Any]) -> npt.NDArray[Any]:
        column: npt.NDArray[Any] = none if self._extras is None else getattr(self._extras, name)
        return column if column.any() else none

    @cached_property
    def _extra_columns(self) -> tuple[npt.NDArray[Any], ...]:
        memory = self._arrived.memory()
        return tuple(place.view(memory) for place in self._body.extras)

    @cached_property
    def _columns(self) -> tuple[npt.NDArray[Any], ...]:
        memory = self._arrived.memory()
        return tuple(place.view(memory) for place in self._body.places)


class Arrival:
    """The memory with the complete results of a call. Only subclasses wait for results."""

    __slots__ = ("_memory",)

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def ready(self) -> bool:
        return True

    def memory(self) -> Memory:
        """Wait for the results and return their memory."""
        return self._memory
