"""Tokens of two recordings beside each other: which are the same, and how far their logprobs differ."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus_contracts import ContractError
from tokenbus_services.items import RecordingError, read_recording
from tokenbus_services.token_columns import TokenBuffer, TokenKind

Array = npt.NDArray[Any]
_AT_ONCE = 1 << 20
_MOST_TOKENS = 1 << 26
_MOST_LOG_RATIO = 80.0
"""Beyond it a ratio is no number that a mean of many could hold."""
_PARQUET = b"PAR1"
_NEEDED = ("request_id", "position", "token_id", "logprob")


class Tokens(NamedTuple):
    """The tokens of a recording, in its order."""

    kind: Array
    request_id: Array
    position: Array
    step: Array
    token_id: Array
    logprob: Array
    """NaN where it is not known."""

    def chosen(self, which: Array) -> "Tokens":
        """Return some of them."""
        return Tokens(*(column[which] for column in self))

    def of_kind(self, kind: TokenKind) -> "Tokens":
        """Return those of a kind."""
        return self.chosen(self.kind == kind)

    def request_ids(self) -> Array:
        """Return the requests in the order in which they begin."""
        return self.request_id[np.sort(np.unique(self.request_id, return_index=True)[1])]

    def named_as(self, other: "Tokens") -> "Tokens":
        """Return them with the request ids of other tokens, the first one's for the first, and so on."""
        names, ids = other.request_ids(), self.request_ids()
        unused = np.setdiff1d(np.arange(ids.size + names.size, dtype=np.uint64), names)
        names = np.concatenate([names, unused])[: ids.size]
        order = np.argsort(ids)
        return self._replace(request_id=names[order[np.searchsorted(ids, self.request_id, sorter=order)]])


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a recording holds."""

    tokens: Tokens
    fault: str = ""
    """Why it could not be read to its end."""


def load(path: Path, request_id: int | None = None) -> Loaded:
    """Return the tokens of a recording, or of Parquet files; of all requests or of one.

    Raises OSError, and ValueError for what is no recording, for more tokens than there may be, and where a Parquet
    file lacks a column.
    """
    if path.is_dir() or _begins_parquet(path):
        tokens, fault = _of_parquet(path), ""
        tokens = tokens if request_id is None else tokens.chosen(tokens.request_id == request_id)
    else:
        tokens, fault = _of_recording(path, request_id)
    if tokens.token_id.size > _MOST_TOKENS:
        raise ValueError(f"{path}: at most {_MOST_TOKENS} tokens, got more; name a request")
    return Loaded(tokens, fault)


def _begins_parquet(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_PARQUET)) == _PARQUET


def _of_recording(path: Path, request_id: int | None) -> tuple[Tokens, str]:
    buffer, found, fault, count = TokenBuffer(), list[Tokens](), "", 0

    def take() -> int:
        taken = buffer.take()
        tokens = Tokens(*(getattr(taken, name) for name in Tokens._fields))
        found.append(tokens if request_id is None else tokens.chosen(tokens.request_id == request_id))
        return found[-1].token_id.size

    try:
        for item in read_recording(path):
            try:
                buffer.add(item)
            except ContractError as error:
                fault = f"{path}: item {item.sequence}: {error}"
            if buffer.tokens >= _AT_ONCE and (count := count + take()) > _MOST_TOKENS:
                break
    except RecordingError as error:
        fault = str(error)
    take()
    return Tokens(*map(np.concatenate, zip(*found, strict=True))), fault


def _of_parquet(path: Path) -> Tokens:
    """Return what Parquet files have, ours or another program's: the latter may lack kinds and steps."""
    import pyarrow.dataset as ds  # noqa: PLC0415 - an extra

    files = ds.dataset(path, format="parquet")
    names = files.schema.names
    if lacking := [name for name in _NEEDED if name not in names]:
        raise ValueError(f"{path}: needs the columns {', '.join(_NEEDED)}, lacks {', '.join(lacking)}")
    if (count := files.count_rows()) > _MOST_TOKENS:
        raise ValueError(f"{path}: at most {_MOST_TOKENS} tokens, got {count}")
    table = files.to_table(columns=[name for name in Tokens._fields if name in names])
    columns: dict[str, Any] = {name: np.zeros(count, np.uint64) for name in Tokens._fields}
    for name in table.column_names:
        columns[name] = _numbers(path, name, table[name])
    columns["logprob"] = np.where(np.isfinite(columns["logprob"]), columns["logprob"], np.nan)
    if "kind" in names:
        kinds = {each.name: each.value for each in TokenKind}
        found, which = np.unique(columns["kind"].astype(str), return_inverse=True)
        columns["kind"] = np.array([kinds.get(each, 0) for each in found], np.uint8)[which]
    else:
        columns["kind"] = np.full(count, TokenKind.TARGET, np.uint8)
    return Tokens(*(columns[name] for name in Tokens._fields))


def _numbers(path: Path, name: str, column: Any) -> Array:  # noqa: ANN401 - pyarrow's
    """Return a column's values: whole numbers without a sign, but for kinds and logprobs."""
    values: Array = column.to_numpy()
    if name in ("kind", "logprob"):
        try:
            return values if name == "kind" else values.astype(np.float32)
        except (TypeError, ValueError):
            raise ValueError(f"{path}: {name}: a column of numbers, got {column.type}") from None
    if values.dtype.kind not in "iu" or (values.size and int(values.min()) < 0):
        found = f"{column.type} with nulls" if column.null_count else f"{column.type} with other values"
        raise ValueError(f"{path}: {name}: whole numbers from 0, got {found}")
    return values.astype(np.uint64)


class Request(NamedTuple):
    """What was compared of a request."""

    request_id: int
    tokens: int
    mean_difference: float
    max_difference: float
    parts_at: int | None
    """The position of the first token that is another one; those behind it are not compared."""


class Comparison:
    """The tokens that two recordings have of the same requests at the same positions."""

    def __init__(self, ours: Tokens, theirs: Tokens, *, same_step: bool = False) -> None:
        """Compare them; `same_step`: only those of one step, and each for itself, as drafts are."""
        _, which = np.unique(np.concatenate([ours.request_id, theirs.request_id]), return_inverse=True)
        place = which.astype(np.uint64) << np.uint64(32)
        ours_at = place[: ours.token_id.size] + ours.position
        theirs_at = place[ours.token_id.size :] + theirs.position
        order = np.argsort(ours_at, kind="stable")
        found = np.searchsorted(ours_at, theirs_at, sorter=order)
        mine = order[np.minimum(found, order.size - 1)] if order.size else found
        is_in_both = (ours_at[mine] == theirs_at) if order.size else np.zeros(theirs_at.size, np.bool_)
        if same_step and order.size:
            is_in_both &= ours.step[mine] == theirs.step

        at = np.argsort(theirs_at[is_in_both], kind="stable")
        self.ours = ours.chosen(mine[is_in_both][at])
        self.theirs = theirs.chosen(np.flatnonzero(is_in_both)[at])
        """The tokens at the same places, by request and position."""
        self.only_ours = int(ours.token_id.size - np.unique(mine[is_in_both]).size)
        self.only_theirs = int(theirs.token_id.size - is_in_both.sum())

        self._ids, self._which = np.unique(self.ours.request_id, return_inverse=True)
        differs = self.ours.token_id != self.theirs.token_id
        self.other_tokens = int(differs.sum())
        self._parts_at = np.full(self._ids.size, np.iinfo(np.int64).max)
        np.minimum.at(self._parts_at, self._which[differs], self.ours.position[differs])
        self.difference = self.theirs.logprob.astype(np.float64) - self.ours.logprob
        """Their logprob less ours; NaN where it is not compared."""
        beyond = differs if same_step else self.ours.position >= self._parts_at[self._which]
        self.difference[beyond] = np.nan
        self.is_compared = ~np.isnan(self.difference)

    def summary(self) -> dict[str, Any]:
        """Return the figures, as plain values; None where nothing was compared."""
        log_ratio = self.difference[self.is_compared]
        ratio = np.exp(np.minimum(log_ratio, _MOST_LOG_RATIO))
        has_some = bool(log_ratio.size)
        absolute = np.abs(log_ratio)
        return {
            "requests": self._ids.size,
            "tokens_compared": int(log_ratio.size),
            "tokens_only_in_first": self.only_ours,
            "tokens_only_in_second": self.only_theirs,
            "tokens_that_differ": self.other_tokens,
            "mean_difference": float(absolute.mean()) if has_some else None,
            "max_difference": float(absolute.max()) if has_some else None,
            # Of tokens drawn from the first: never negative, and with less variance than the mean of -log_ratio.
            "kl_estimate": float((ratio - 1 - np.minimum(log_ratio, _MOST_LOG_RATIO)).mean()) if has_some else None,
            "importance_ratio_mean": float(ratio.mean()) if has_some else None,
            "importance_ratio_max": float(ratio.max()) if has_some else None,
        }

    def worst(self, count: int) -> list[Request]:
        """Return the requests whose logprobs differ most, and those that part first."""
        counts = np.bincount(self._which, self.is_compared, self._ids.size)
        absolute = np.where(self.is_compared, np.abs(self.difference), 0)
        sums = np.bincount(self._which, absolute, self._ids.size)
        most = np.zeros(self._ids.size)
        np.maximum.at(most, self._which, absolute)
        never = np.iinfo(np.int64).max
        order = np.lexsort([self._ids, -most, self._parts_at])[:count]
        return [
            Request(
                int(self._ids[place]),
                int(counts[place]),
                float(sums[place] / max(counts[place], 1)),
                float(most[place]),
                None if self._parts_at[place] == never else int(self._parts_at[place]),
            )
            for place in order.tolist()
        ]
