"""Ragged: copies an engine's arrays to the host, and selects the elements of the tokens that rows keep."""

from operator import index
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from tokenbus_contracts import ContractError, Rule

Host = npt.NDArray[Any]


def on_host(name: str, array: Any) -> Host:  # noqa: ANN401 - any framework's
    """Return a numpy array. An array on the host is not copied."""
    if type(array) is np.ndarray:
        return array
    if hasattr(array, "detach"):  # torch and paddle cannot convert an array that tracks gradients
        array = array.detach()
    if hasattr(array, "cpu"):
        array = array.cpu()
    elif hasattr(array, "get") and hasattr(array, "device"):  # cupy refuses an implicit conversion
        array = array.get()
    if name == "request_ids" and isinstance(array, (list, tuple)):
        return np.array(array, object)  # numpy would make floats from a mix of ids below and above 2**63
    try:
        return np.asarray(array.numpy() if hasattr(array, "numpy") else array)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ContractError(name, "an array", str(error), rule=Rule.TYPE) from None


def request_ids_of(array: Any) -> npt.NDArray[np.uint64]:  # noqa: ANN401 - any framework's
    """Return request ids as unsigned numbers. Frameworks without unsigned types pass negative numbers."""
    host = on_host("request_ids", array).reshape(-1)
    if host.dtype == np.int64:
        return host.view(np.uint64)
    if host.size and host.dtype.kind not in "iuO":
        raise ContractError("request_ids", "whole numbers", host.dtype.name, rule=Rule.TYPE)
    try:
        return np.array([index(each) % 2**64 for each in host.tolist()], np.uint64) if host.dtype.kind != "u" else host
    except (TypeError, ValueError) as error:
        raise ContractError("request_ids", "whole numbers", str(error), rule=Rule.TYPE) from None


def valid_request_ids(array: Any) -> list[int]:  # noqa: ANN401 - any framework's
    """Return request ids, or an empty list if the ids are not whole numbers."""
    try:
        return cast("list[int]", request_ids_of(array).tolist())
    except ContractError:
        return []


def of_rows(name: str, array: Any, rows: int) -> Host:  # noqa: ANN401 - any framework's
    """Return a one-dimensional array with one element for each row."""
    host = on_host(name, array)
    if host.ndim != 1:
        host = host.reshape(-1)
    if host.size != rows:
        raise ContractError(name, f"{rows} elements, one for each row", host.size, rule=Rule.LENGTH)
    return host


class Ragged:
    """Selects the elements of kept tokens from an engine's arrays."""

    __slots__ = ("_scored", "counts", "given", "kept", "tokens")

    def __init__(self, counts: Host, kept: Host | None, scored: Host | None) -> None:
        """Select by each row's token count, count of kept tokens, and scored flag. None selects every token."""
        self.given = counts
        """Number of tokens that the engine returned for each row."""
        self.tokens = int(counts.sum(dtype=np.intp))
        self.counts = counts
        """Number of kept tokens of each row."""
        self.kept: npt.NDArray[np.bool_] | None = None
        """Whether each returned token is kept, or None if all tokens are kept."""
        if kept is not None and not np.array_equal(kept, counts):
            _check_kept(kept, counts)
            self.counts = kept
            lengths = counts.astype(np.intp)
            indices = np.arange(self.tokens) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            self.kept = indices < np.repeat(kept, lengths)
        self._scored = None if scored is None or scored.all() else np.repeat(scored, counts)

    def of(self, rows: Host) -> "Ragged":
        """Return a selection of the same tokens, in which the mask `rows` marks the scored rows."""
        return Ragged(self.given, self.counts, rows)

    def flat(self, name: str, array: Any) -> Host:  # noqa: ANN401 - any framework's
        """Return a flat array with the elements of the kept tokens. `array` is flat or padded."""
        return self._of_kept(name, self._flattened(name, on_host(name, array), 1))

    def scored(self, name: str, array: Any, dimensions: int = 1) -> Host:  # noqa: ANN401 - any framework's
        """Return the elements of the kept tokens of scored rows. The array covers the scored rows or all rows."""
        host = self._flattened(name, on_host(name, array), dimensions)
        if self._scored is not None and host.shape[0] == self.tokens:
            return host[self._scored if self.kept is None else self._scored & self.kept]
        if self._scored is not None and host.shape[0] == np.count_nonzero(self._scored):
            return host if self.kept is None else host[self.kept[self._scored]]
        return self._of_kept(name, host)

    def _of_kept(self, name: str, host: Host) -> Host:
        if host.shape[0] != self.tokens:
            limit = f"{self.tokens} elements, one for each token"
            raise ContractError(name, limit, host.shape[0], rule=Rule.LENGTH)
        return host if self.kept is None else host[self.kept]

    def _flattened(self, name: str, host: Host, dimensions: int) -> Host:
        if host.ndim == dimensions:
            return host
        rows = self.given.size
        if host.ndim != dimensions + 1 or host.shape[0] != rows:
            limit = f"{dimensions} dimensions, or {dimensions + 1} with a line for each of {rows} rows"
            raise ContractError(name, limit, f"shape {host.shape}", rule=Rule.TYPE)
        width = host.shape[1]
        if rows and int(self.given.max()) > width:
            raise ContractError(name, f"{int(self.given.max())} tokens a line", width, rule=Rule.LENGTH)
        if self.tokens == rows * width:
            return host.reshape(self.tokens, *host.shape[2:])
        return host[np.arange(width) < self.given[:, None]]


def _check_kept(kept: Host, counts: Host) -> None:
    wrong = np.flatnonzero((kept > counts) | (kept < 0))
    if wrong.size:
        row = int(wrong[0])
        raise ContractError(f"kept_counts[{row}]", int(counts[row]), int(kept[row]), rule=Rule.MAX)
