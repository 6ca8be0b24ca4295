"""What a call returns: the columns of its tokens, laid out as in the message, which may still be computed."""

from enum import IntEnum
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

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
"""The last columns but one of the message, in their order there: what is computed."""

EXTRA_COLUMNS = (
    "extras",
    "given_counts",
    "mask_bounds",
    "other_logprobs",
    "entropies",
    "given_token_ids",
    "given_logprobs",
    "mask_sizes",
    "mask_token_ids",
)
"""What is asked for beside, by the names that schema 1.1 has for it."""

_EXTRA_TYPES = ("<f4", "<f4", "<f4", "<u4", "<u4")
_ITEM_BYTES = 4
_NO_BYTES = np.zeros(0, np.uint8)
_NO_IDS = np.zeros(0, np.uint32)
_BODIES_KEPT = 1024


class Place(NamedTuple):
    """One column: where its first element is, how many it has, and the bytes before it in a message."""

    at: int
    items: int
    prefix: bytes


class Body(NamedTuple):
    """One call's output: a byte for each row read that says whether something was wrong, and the columns."""

    faults: int
    at: int
    """Where the columns begin, their first prefix included."""
    end: int
    places: tuple[Place, ...]
    extras: tuple[Place, ...]
    """Behind the message's body: what extras.Sizes counts, each aligned and without a prefix."""
    size: int
    """Of all memory."""

    def column(self, memory: npt.NDArray[np.uint8], which: int) -> npt.NDArray[Any]:
        """Return a view of one column; it is wherever the message has it, so seldom aligned."""
        place = self.places[which]
        return memory[place.at : place.at + place.items * _ITEM_BYTES].view(COLUMNS[which].dtype)

    def extra_column(self, memory: npt.NDArray[np.uint8], which: int) -> npt.NDArray[Any]:
        """Return a view of one of the columns behind the body."""
        place = self.extras[which]
        return memory[place.at : place.at + place.items * _ITEM_BYTES].view(_EXTRA_TYPES[which])

    def write_prefixes(self, memory: npt.NDArray[np.uint8]) -> None:
        """Write what stands before each column."""
        for place in self.places:
            memory[place.at - len(place.prefix) : place.at] = np.frombuffer(place.prefix, np.uint8)


@lru_cache(_BODIES_KEPT)
def body(tokens: int, scored: int, alternatives: int, extras: Shape = NOTHING) -> Body:
    """Return the layout for so many elements; a column without any is left out, as protobuf leaves it out."""
    read = scored + extras.others
    items = (tokens, scored, scored, alternatives, alternatives)
    prefixes = [
        prefix_of(column.key, count * _ITEM_BYTES) if count else b""
        for column, count in zip(COLUMNS, items, strict=True)
    ]
    # The first column is aligned, and so are all where prefixes are of four bytes: from 4,096 tokens up.
    first = _aligned(read + len(prefixes[0]))
    at = first - len(prefixes[0])
    begin, places = at, []
    for prefix, count in zip(prefixes, items, strict=True):
        at += len(prefix)
        places.append(Place(at, count, prefix))
        at += count * _ITEM_BYTES
    end, others = at, []
    for count in extras.sizes:
        at = _aligned(at)
        others.append(Place(at, count, b""))
        at += count * _ITEM_BYTES
    return Body(read, begin, end, tuple(places), tuple(others), at)


def layout_of(plan: Plan, extras: Extras | None) -> Body:
    """Return where a call's results go."""
    return body(plan.tokens, plan.scored, plan.alternatives, NOTHING if extras is None else extras.shape)


def _aligned(size: int) -> int:
    return -(-size // 16) * 16


class FaultReason(IntEnum):
    """Why a token has no results; the values are the kernels' own."""

    NOT_A_NUMBER = 1
    """A NaN is among its logits."""
    INFINITE = 2
    """Plus infinity is among its logits."""
    ALL_MASKED = 3
    """Every one of its logits is minus infinity."""
    ID_OUT_OF_RANGE = 4
    """Its id is not in the vocabulary; found only afterwards where the ids were on the GPU."""


class TokenFault(NamedTuple):
    """A token without results. Its values are NaN, so that the codec refuses a batch that has it in."""

    row: int
    """The request, by its place in the call."""
    token: int
    """The token, by its place in `token_ids`."""
    logits_row: int
    reason: FaultReason
    in_other_logits: bool = False
    """Whether it is a row of the second tensor: the token's results from the first are right."""


class TokenColumns:
    """The columns of one call, laid out as a message has them.

    Whatever is asked of it waits for the GPU the first time, and only then; `ready` says whether it would. The arrays
    are views of one piece of memory, which is used for another call when the last of them is gone.
    """

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
        """Whether the results are there, so that nothing would have to wait."""
        return self._arrived.ready()

    def wait(self) -> None:
        """Wait until the results are there."""
        self._arrived.memory()

    @property
    def token_counts(self) -> npt.NDArray[np.uint8]:
        """How many tokens each request has."""
        return self._plan.token_counts

    @property
    def scorings(self) -> npt.NDArray[np.uint8]:
        """What is known of each request's tokens beyond their ids."""
        return self._plan.scorings

    @property
    def top_ks(self) -> npt.NDArray[np.uint8]:
        """How many alternatives each of a request's tokens has."""
        return self._plan.top_ks

    @property
    def token_ids(self) -> npt.NDArray[np.uint32]:
        """The tokens' ids."""
        return self._columns[0]

    @property
    def logprobs(self) -> npt.NDArray[np.float32]:
        """The scored tokens' values."""
        return self._columns[1]

    @property
    def ranks(self) -> npt.NDArray[np.uint32]:
        """The scored tokens' places among all tokens, counted from one."""
        return self._columns[2]

    @property
    def alternative_token_ids(self) -> npt.NDArray[np.uint32]:
        """The ids of the alternatives, the largest first, token after token."""
        return self._columns[3]

    @property
    def alternative_logprobs(self) -> npt.NDArray[np.float32]:
        """The values of the alternatives."""
        return self._columns[4]

    @property
    def extras(self) -> npt.NDArray[np.uint8]:
        """What each request has beside: bit 1 `other_logprobs`, bit 2 `entropies`; empty if none asked for either."""
        return self._of_requests("flags", _NO_BYTES)

    @property
    def given_counts(self) -> npt.NDArray[np.uint32]:
        """How many ids each request gave; empty if none gave any."""
        return self._of_requests("given_counts", _NO_IDS)

    @property
    def mask_bounds(self) -> npt.NDArray[np.uint32]:
        """The size up to which each request wants the ids of its masks, 0: no mask; empty if none wants one."""
        return self._of_requests("mask_bounds", _NO_IDS)

    @property
    def other_logprobs(self) -> npt.NDArray[np.float32]:
        """The values under the second tensor, of tokens that asked for them."""
        return self._extra_columns[0]

    @property
    def entropies(self) -> npt.NDArray[np.float32]:
        """The entropies, in nats, of the distributions of the first tensor's logits, of tokens that asked for them."""
        return self._extra_columns[1]

    @property
    def given_token_ids(self) -> npt.NDArray[np.uint32]:
        """The given ids, request after request."""
        return _NO_IDS if self._extras is None else self._extras.given_token_ids

    @property
    def given_logprobs(self) -> npt.NDArray[np.float32]:
        """For each token the values of its request's given ids."""
        return self._extra_columns[2]

    @property
    def mask_sizes(self) -> npt.NDArray[np.uint32]:
        """How many tokens could have been chosen, for each token whose request has a bound: the logits above -inf."""
        return self._extra_columns[3]

    @cached_property
    def mask_token_ids(self) -> npt.NDArray[np.uint32]:
        """Their ids in ascending order, token after token; none where they are more than the bound."""
        if self._extras is None:
            return _NO_IDS
        masks = self._extras.items[self._extras.items["mask_bound"] > 0]
        kept = np.where(self.mask_sizes > masks["mask_bound"], 0, self.mask_sizes).astype(np.intp)
        begins = masks["mask_ids_at"] - (np.cumsum(kept) - kept)
        ids: npt.NDArray[np.uint32] = self._extra_columns[4][begins.repeat(kept) + np.arange(kept.sum())]
        return ids

    @property
    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """All columns by the names that LogprobBatch has for them."""
        rows = {"token_counts": self.token_counts, "scorings": self.scorings, "top_ks": self.top_ks}
        return rows | {column.name: array for column, array in zip(COLUMNS, self._columns, strict=True)}

    @property
    def extra_columns(self) -> dict[str, npt.NDArray[Any]]:
        """The columns that were asked for beside, by their names."""
        found = {name: getattr(self, name) for name in EXTRA_COLUMNS}
        return {name: column for name, column in found.items() if column.size}

    @property
    def body(self) -> memoryview:
        """The bytes of the columns as they stand in a message: fields 11 to 15, each with its key and length."""
        memory = self._arrived.memory()
        return memory[self._body.at : self._body.end].data

    @cached_property
    def faults(self) -> tuple[TokenFault, ...]:
        """The tokens that have no results, and why; mostly none."""
        flags = self._arrived.memory()[: self._body.faults]
        ends = np.cumsum(self.token_counts, dtype=np.intp)
        found = []
        for item in np.flatnonzero(flags).tolist():
            in_other = item >= self._plan.scored
            scored = self._extras.others[item - self._plan.scored] if in_other and self._extras else item
            token = int(self._plan.details.tokens[scored])
            row = int(np.searchsorted(ends, token, side="right"))
            logits_row, reason = int(self._plan.token_rows[token]), FaultReason(flags[item])
            found.append(TokenFault(row, token, logits_row, reason, in_other))
        return tuple(found)

    def batch(self, header: BatchHeader, **rows: npt.ArrayLike) -> LogprobBatch:
        """Return a batch of these columns and the row columns that the caller knows: keys, places, statuses."""
        return LogprobBatch(header._replace(value_kind=self.value_kind), **self.columns, **self.extra_columns, **rows)

    def __repr__(self) -> str:
        """Return the sizes, never the columns, so that nothing is waited for."""
        plan = self._plan
        return f"<TokenColumns rows={plan.requests} tokens={plan.tokens} alternatives={plan.alternatives}>"

    def _of_requests(self, name: str, none: npt.NDArray[Any]) -> npt.NDArray[Any]:
        column: npt.NDArray[Any] = none if self._extras is None else getattr(self._extras, name)
        return column if column.any() else none

    @cached_property
    def _extra_columns(self) -> tuple[npt.NDArray[Any], ...]:
        memory = self._arrived.memory()
        return tuple(self._body.extra_column(memory, which) for which in range(len(_EXTRA_TYPES)))

    @cached_property
    def _columns(self) -> tuple[npt.NDArray[Any], ...]:
        memory = self._arrived.memory()
        return tuple(self._body.column(memory, which) for which in range(len(COLUMNS)))


class Arrival:
    """Memory that results arrive in; here they are there already."""

    __slots__ = ("_memory",)

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def ready(self) -> bool:
        """Tell whether the results are there."""
        return True

    def memory(self) -> Memory:
        """Return the memory once the results are there."""
        return self._memory
