"""Plan: maps tokens to rows of logits and to positions in the result, before anything is computed."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenbus_contracts.errors import ContractError, Rule
from tokenbus_contracts.generated.enums import Scoring
from tokenbus_contracts.schema import COLUMN

Index = npt.NDArray[np.intp]
Bytes = npt.NDArray[np.uint8]

MAX_TOKENS = COLUMN["token_ids"].max_items
MAX_TOP_K = COLUMN["top_ks"].max
MAX_TOKENS_PER_ROW = COLUMN["token_counts"].max
_PLANS_KEPT = 256


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The tokens of one call, request by request, and the sizes of their columns."""

    requests: int
    tokens: int
    scored: int
    alternatives: int
    top_k: int | None
    """The number of alternatives per token if all tokens have the same number and token i has row i, or None."""
    most: int
    token_counts: Bytes
    top_ks: Bytes
    scorings: Bytes
    token_rows: Index
    """The row of logits of each token."""
    scored_rows: Index
    """The row of logits of each scored token."""
    scored_tokens: Index
    """The index of each scored token among all tokens."""
    scored_top_ks: Index
    alternatives_at: Index
    """The offset of the alternatives of each scored token."""


def plan(
    rows: int,
    top_k: Any,  # noqa: ANN401 - any array-like object
    token_counts: Any = None,  # noqa: ANN401
    offsets: Any = None,  # noqa: ANN401
    scored: Any = None,  # noqa: ANN401
) -> Plan:
    """Return the plan of a call. The first invalid argument raises ContractError."""
    if type(top_k) is int and token_counts is None and offsets is None and scored is None:
        return _alike(rows, top_k)
    if token_counts is None:
        if offsets is not None:
            raise ContractError("offsets", "token_counts with them", "none", rule=Rule.REQUIRED)
        counts = np.ones(rows, np.intp)
        starts = np.arange(rows, dtype=np.intp)
    else:
        counts = whole("token_counts", token_counts, MAX_TOKENS_PER_ROW)
        starts = _starts(counts, offsets, rows)
    ks = for_each("top_k", top_k, counts.size, MAX_TOP_K)
    return _laid_out(counts, starts, ks, None if scored is None else flags("scored", scored, counts.size))


@lru_cache(_PLANS_KEPT)
def _alike(rows: int, top_k: int) -> Plan:
    _check_range("top_k", top_k, MAX_TOP_K)
    counts = np.ones(rows, np.intp)
    made = _laid_out(counts, np.arange(rows), np.full(rows, top_k), None)
    for column in (made.token_counts, made.top_ks, made.scorings):
        column.flags.writeable = False  # later calls share the cached array
    return replace(made, top_k=top_k)


def _laid_out(counts: Index, starts: Index, ks: Index, wanted: npt.NDArray[np.bool_] | None) -> Plan:
    """Lay out the tokens. `wanted` is None, or has a flag for each request that says whether to score the request."""
    ends = np.add.accumulate(counts)
    tokens = int(ends[-1]) if ends.size else 0
    if tokens > MAX_TOKENS:
        raise ContractError("token_counts", MAX_TOKENS, tokens, rule=Rule.ITEMS)
    places = np.arange(tokens)
    token_rows = places + (starts - ends + counts).repeat(counts)
    if wanted is None:
        scorings = np.full(counts.size, Scoring.FULL, np.uint8)
        scored_rows = token_rows
    else:
        scorings = np.where(wanted, np.uint8(Scoring.FULL), np.uint8(Scoring.NONE))
        ks = np.where(wanted, ks, 0)
        places = places[wanted.repeat(counts)]
        scored_rows = token_rows[places]
    each = ks.repeat(counts)
    each = each if wanted is None else each[places]
    behind = np.add.accumulate(each)
    alternatives = int(behind[-1]) if each.size else 0
    return Plan(
        counts.size,
        tokens,
        places.size,
        alternatives,
        None,
        int(each.max()) if each.size else 0,
        counts.astype(np.uint8),
        ks.astype(np.uint8),
        scorings,
        token_rows,
        scored_rows,
        places,
        each,
        behind - each,
    )


def _starts(counts: Index, offsets: Any, rows: int) -> Index:  # noqa: ANN401
    """Return each request's first row of logits. The tokens of a request have consecutive rows."""
    if offsets is None:
        tokens = int(counts.sum())
        if tokens != rows:
            limit = f"{rows}, the rows of logits, where there are no offsets"
            raise ContractError("token_counts", limit, f"a sum of {tokens}", rule=Rule.LENGTH)
        return np.add.accumulate(counts) - counts
    found = whole("offsets", offsets, rows)
    if found.size not in (counts.size, counts.size + 1):
        limit = f"{counts.size} or {counts.size + 1} elements, one for each request and the end"
        raise ContractError("offsets", limit, found.size, rule=Rule.LENGTH)
    starts = found[: counts.size]
    ends = np.empty(counts.size, np.intp)
    ends[:-1] = starts[1:]
    ends[-1:] = found[-1] if found.size > counts.size else rows
    beyond = starts + counts > ends
    if beyond.any():
        request = int(beyond.argmax())
        room = int(ends[request] - starts[request])
        raise ContractError(f"token_counts[{request}]", max(room, 0), int(counts[request]), rule=Rule.MAX)
    return starts


def for_each(name: str, values: Any, requests: int, most: int) -> Index:  # noqa: ANN401
    """Return an array with one number per request. If `values` is an integer, all requests have this number."""
    if isinstance(values, int) and not isinstance(values, bool):
        _check_range(name, values, most)
        return np.full(requests, values, np.intp)
    found = whole(name, values, most)
    if found.size != requests:
        raise ContractError(name, f"{requests} elements, one for each request", found.size, rule=Rule.LENGTH)
    return found


def flags(name: str, values: Any, requests: int) -> npt.NDArray[np.bool_]:  # noqa: ANN401
    found = _read(name, values)
    if found.dtype.kind != "b" and found.size:
        raise ContractError(name, "True or False for each request", found.dtype.name, rule=Rule.TYPE)
    if found.size != requests:
        raise ContractError(name, f"{requests} elements, one for each request", found.size, rule=Rule.LENGTH)
    return found.astype(np.bool_)


def whole(name: str, values: Any, most: int) -> Index:  # noqa: ANN401
    """Return integers from 0 to `most`. Any other value raises ContractError."""
    found = _read(name, values)
    if not found.size:
        return np.zeros(0, np.intp)
    if found.dtype.kind not in "iu":
        raise ContractError(name, "whole numbers", found.dtype.name, rule=Rule.TYPE)
    numbers = found.astype(np.intp, copy=False)
    # Read as unsigned, negative numbers exceed `most`, so one comparison finds all faults, except for uint64 input.
    if numbers.view(np.uintp).max() > most or found.dtype == np.uint64:
        for limit, place, rule in ((0, int(found.argmin()), Rule.MIN), (most, int(found.argmax()), Rule.MAX)):
            value = int(found[place])
            if value < limit if rule is Rule.MIN else value > limit:
                raise ContractError(f"{name}[{place}]", limit, value, rule=rule)
    return numbers


def _read(name: str, values: Any) -> npt.NDArray[Any]:  # noqa: ANN401
    try:
        found = np.asarray(values)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ContractError(name, "numbers in host memory", type(values).__name__, rule=Rule.TYPE) from None
    if found.ndim != 1:
        raise ContractError(name, "one dimension", f"shape {found.shape}", rule=Rule.TYPE)
    return found


def _check_range(name: str, value: int, most: int) -> None:
    if value < 0:
        raise ContractError(name, 0, value, rule=Rule.MIN)
    if value > most:
        raise ContractError(name, most, value, rule=Rule.MAX)
