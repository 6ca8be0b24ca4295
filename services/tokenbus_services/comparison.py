"""Tokens of two recordings beside each other: which are the same, and how far their logprobs differ."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus_contracts import ContractError, ValueKind
from tokenbus_services.items import RecordingError, read_recording
from tokenbus_services.token_columns import TokenBuffer, TokenColumns, TokenKind

Array = npt.NDArray[Any]
_AT_ONCE = 1 << 20
_MOST_TOKENS = 1 << 26
MOST_LOG_RATIO = 80.0
"""Beyond it a ratio is no number that a mean of many could hold."""
_PARQUET = b"PAR1"
_NEEDED = ("request_id", "position", "token_id", "logprob")
_FLOATS = ("logprob", "entropy", "other_logprob")
_RATIO_FIGURES = ("kl_estimate", "importance_ratio_mean", "importance_ratio_max")
_MEMBERS = {
    "kind": {each.name: each.value for each in TokenKind},
    "value_kind": {each.name: each.value for each in ValueKind},
}


class Tokens(NamedTuple):
    """The tokens of a recording, in its order."""

    kind: Array
    request_id: Array
    position: Array
    step: Array
    token_id: Array
    logprob: Array
    """NaN where it is not known."""
    entropy: Array
    """As the logprob."""
    log_ratio: Array
    """Its logprob by the model less that in what it was sampled from; NaN where one of them is not known."""

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
    if is_parquet(path):
        tokens, fault = _of_parquet(path), ""
        tokens = tokens if request_id is None else tokens.chosen(tokens.request_id == request_id)
    else:
        tokens, fault = _of_recording(path, request_id)
    if tokens.token_id.size > _MOST_TOKENS:
        raise ValueError(f"{path}: at most {_MOST_TOKENS} tokens, got more; name a request")
    return Loaded(tokens, fault)


def is_parquet(path: Path) -> bool:
    """Return whether a path is a Parquet file, or a folder, which can only be of such files."""
    if path.is_dir():
        return True
    with path.open("rb") as file:
        return file.read(len(_PARQUET)) == _PARQUET


def _of_recording(path: Path, request_id: int | None) -> tuple[Tokens, str]:
    buffer, found, fault, count = TokenBuffer(), list[Tokens](), "", 0

    def take() -> int:
        tokens = _tokens_of(buffer.take())
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


def _tokens_of(taken: TokenColumns) -> Tokens:
    of_all = (taken.kind, taken.request_id, taken.position, taken.step, taken.token_id, taken.logprob)
    return Tokens(*of_all, taken.entropy, _log_ratio(taken.logprob, taken.other_logprob, taken.value_kind))


def _log_ratio(logprob: Array, other: Array, value_kind: Array) -> Array:
    """Return the logarithm of each token's importance ratio; `other` is its logprob in the other distribution."""
    is_raw, is_processed = value_kind == ValueKind.RAW_LOGPROBS, value_kind == ValueKind.PROCESSED_LOGPROBS
    sign = np.where(is_raw, np.float32(1), np.where(is_processed, np.float32(-1), np.float32(np.nan)))
    return (logprob - other) * sign


def _of_parquet(path: Path) -> Tokens:
    """Return what Parquet files have, ours or another program's: the latter may lack kinds and steps."""
    import pyarrow.dataset as ds  # noqa: PLC0415 - an extra

    files = ds.dataset(path, format="parquet")
    names = files.schema.names
    if lacking := [name for name in _NEEDED if name not in names]:
        raise ValueError(f"{path}: needs the columns {', '.join(_NEEDED)}, lacks {', '.join(lacking)}")
    if (count := files.count_rows()) > _MOST_TOKENS:
        raise ValueError(f"{path}: at most {_MOST_TOKENS} tokens, got {count}")
    wanted = ("kind", "request_id", "position", "step", "token_id", *_FLOATS, "value_kind")
    table = files.to_table(columns=[name for name in wanted if name in names])
    columns: dict[str, Any] = {name: np.zeros(count, np.uint64) for name in ("step", "value_kind")}
    columns |= {name: np.full(count, np.nan, np.float32) for name in _FLOATS}
    columns["kind"] = np.full(count, TokenKind.TARGET, np.uint8)
    for name in table.column_names:
        columns[name] = _numbers(path, name, table[name])
    columns["log_ratio"] = _log_ratio(columns["logprob"], columns["other_logprob"], columns["value_kind"])
    return Tokens(*(columns[name] for name in Tokens._fields))


def _numbers(path: Path, name: str, column: Any) -> Array:  # noqa: ANN401 - pyarrow's
    """Return a column's values as those of a recording have them."""
    values: Array = column.to_numpy()
    if name in _MEMBERS:
        found, which = np.unique(values.astype(str), return_inverse=True)
        return np.array([_MEMBERS[name].get(each, 0) for each in found], np.uint8)[which]
    if name in _FLOATS:
        try:
            floats = values.astype(np.float32)
        except (TypeError, ValueError):
            raise ValueError(f"{path}: {name}: a column of numbers, got {column.type}") from None
        return np.where(np.isfinite(floats), floats, np.float32(np.nan))
    if values.dtype.kind not in "iu" or (values.size and int(values.min()) < 0):
        found_type = f"{column.type} with nulls" if column.null_count else f"{column.type} with other values"
        raise ValueError(f"{path}: {name}: whole numbers from 0, got {found_type}")
    return values.astype(np.uint64)


def ratio_figures(log_ratio: Array) -> dict[str, float]:
    """Return what importance ratios are, of the logarithms of some; empty where none is known."""
    known = np.minimum(log_ratio[~np.isnan(log_ratio)].astype(np.float64), MOST_LOG_RATIO)
    if not known.size:
        return {}
    ratio = np.exp(known)
    # Of tokens drawn from the first: the estimate is never negative, and varies less than the mean of -log_ratio.
    figures = float((ratio - 1 - known).mean()), float(ratio.mean()), float(ratio.max())
    return dict(zip(_RATIO_FIGURES, figures, strict=True))


def mean_of_known(name: str, values: Array) -> dict[str, float]:
    """Return the mean of those values that are known, by a name; empty where none is."""
    known = values[~np.isnan(values)]
    return {name: float(known.mean(dtype=np.float64))} if known.size else {}


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
        self.entropy_difference = self.theirs.entropy - self.ours.entropy
        """Their entropy less ours; NaN where it is not compared, or not known."""
        beyond = differs if same_step else self.ours.position >= self._parts_at[self._which]
        self.difference[beyond] = np.nan
        self.entropy_difference[beyond] = np.nan
        self.is_compared = ~np.isnan(self.difference)

    def summary(self) -> dict[str, Any]:
        """Return the figures, as plain values; None where nothing was compared."""
        differences = self.difference[self.is_compared]
        has_some = bool(differences.size)
        absolute = np.abs(differences)
        return {
            "requests": self._ids.size,
            "tokens_compared": int(differences.size),
            "tokens_only_in_first": self.only_ours,
            "tokens_only_in_second": self.only_theirs,
            "tokens_that_differ": self.other_tokens,
            "mean_difference": float(absolute.mean()) if has_some else None,
            "max_difference": float(absolute.max()) if has_some else None,
            **(ratio_figures(differences) or dict.fromkeys(_RATIO_FIGURES)),
            **mean_of_known("mean_entropy_difference", self.entropy_difference),
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
