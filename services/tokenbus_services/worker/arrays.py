"""Arrays of any framework as numpy arrays on the host, and cut to the tokens that belong to rows."""

from typing import Any

import numpy as np
import numpy.typing as npt

from tokenbus_contracts import ContractError, Rule

Host = npt.NDArray[Any]


def on_host(name: str, array: Any) -> Host:  # noqa: ANN401 - any framework's
    """Return an array as numpy's; a copy only where it lies on a device."""
    if type(array) is np.ndarray:
        return array
    if hasattr(array, "detach"):  # torch, paddle: what tracks gradients gives no array away
        array = array.detach()
    if hasattr(array, "cpu"):
        array = array.cpu()
    elif hasattr(array, "get") and hasattr(array, "device"):  # cupy refuses to become numpy's by itself
        array = array.get()
    try:
        return np.asarray(array.numpy() if hasattr(array, "numpy") else array)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ContractError(name, "an array", str(error), rule=Rule.TYPE) from None


def keys_of(array: Any) -> npt.NDArray[np.uint64]:  # noqa: ANN401 - any framework's
    """Return request keys; those of 63 bits and more are negative where a framework has no unsigned numbers."""
    host = on_host("request_keys", array).reshape(-1)
    if host.dtype == np.int64:
        return host.view(np.uint64)
    if host.size and host.dtype.kind not in "iuO":
        raise ContractError("request_keys", "whole numbers", host.dtype.name, rule=Rule.TYPE)
    try:
        return np.array([int(key) % 2**64 for key in host.tolist()], np.uint64) if host.dtype.kind != "u" else host
    except (TypeError, ValueError) as error:
        raise ContractError("request_keys", "whole numbers", str(error), rule=Rule.TYPE) from None


def of_rows(name: str, array: Any, rows: int) -> Host:  # noqa: ANN401 - any framework's
    """Return an array with one element for each row; those that have one line for each row lose what is around it."""
    host = on_host(name, array)
    if host.ndim != 1:
        host = host.reshape(-1)
    if host.size != rows:
        raise ContractError(name, f"{rows} elements, one for each row", host.size, rule=Rule.LENGTH)
    return host


class Ragged:
    """Which elements of what an engine returns belong to the message: those of the tokens that rows keep."""

    __slots__ = ("_scored", "counts", "given", "kept", "tokens")

    def __init__(self, counts: Host, kept: Host | None, scored: Host | None) -> None:
        """Take each row's tokens, how many of them are kept, and whether they are scored; absent: all."""
        self.given = counts
        """How many tokens of each row the engine returned."""
        self.tokens = int(counts.sum(dtype=np.intp))
        """The same of all rows."""
        self.counts = counts
        """How many tokens of each row the message has."""
        self.kept: npt.NDArray[np.bool_] | None = None
        """Whether the message has each token that the engine returned; None: it has all."""
        if kept is not None and not np.array_equal(kept, counts):
            _check_kept(kept, counts)
            self.counts = kept
            lengths = counts.astype(np.intp)
            places = np.arange(self.tokens) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            self.kept = places < np.repeat(kept, lengths)
        self._scored = None if scored is None or scored.all() else np.repeat(scored, counts)

    def flat(self, name: str, array: Any) -> Host:  # noqa: ANN401 - any framework's
        """Return the elements of the kept tokens of all rows."""
        host = self._in_one_line(name, on_host(name, array), 1)
        if host.shape[0] != self.tokens:
            raise _of_length(name, self.tokens, host.shape[0])
        return host if self.kept is None else host[self.kept]

    def scored(self, name: str, array: Any, dimensions: int = 1) -> Host:  # noqa: ANN401 - any framework's
        """Return the elements, or lines, of the kept tokens of the scored rows; there may be only those, or all."""
        host = self._in_one_line(name, on_host(name, array), dimensions)
        if self._scored is None:
            if host.shape[0] != self.tokens:
                raise _of_length(name, self.tokens, host.shape[0])
            return host if self.kept is None else host[self.kept]
        if host.shape[0] == self.tokens:
            return host[self._scored if self.kept is None else self._scored & self.kept]
        of_scored = int(np.count_nonzero(self._scored))
        if host.shape[0] != of_scored:
            raise _of_length(name, self.tokens, host.shape[0])
        return host if self.kept is None else host[self.kept[self._scored]]

    def _in_one_line(self, name: str, host: Host, dimensions: int) -> Host:
        """Return the elements of all tokens one after the other, also of an array with a line for each row."""
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


def _of_length(name: str, tokens: int, found: int) -> ContractError:
    return ContractError(name, f"{tokens} elements, one for each token", found, rule=Rule.LENGTH)


def _check_kept(kept: Host, counts: Host) -> None:
    wrong = np.flatnonzero((kept > counts) | (kept < 0))
    if wrong.size:
        row = int(wrong[0])
        raise ContractError(f"kept_counts[{row}]", int(counts[row]), int(kept[row]), rule=Rule.MAX)
