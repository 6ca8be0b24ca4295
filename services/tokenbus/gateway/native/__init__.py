"""The compiled renderer: writes the JSON of rows in one pass over the columns, and sends events to sockets.

The renderer is optional. Without a C compiler at installation, or with TOKENBUS_PURE_PYTHON=1, the modules `answer`,
`sse` and `logprob_writers` write the same bytes. These modules also write the rows that the renderer leaves to Python.
"""

import ctypes
import os
import sys
import warnings
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenbus_contracts import LogprobBatch
from tokenbus_contracts.native.library import LibraryError, open_library

LIBRARY = Path(__file__).with_name("render.so")
SOURCE = Path(__file__).with_name("render.c")
NO_FRAGMENT, NO_ROOM = -1, -2
FIRST_BYTES, MOST_BYTES = 2**16, 2**26
"""Initial and maximum size, in bytes, of a buffer for the renderer's output."""
_POINTERS = (
    "token_ids",
    "ranks",
    "alternative_token_ids",
    "logprobs",
    "alternative_logprobs",
    "token_counts",
    "top_ks",
)
_WIDTHS = (4, 4, 4, 4, 4, 1, 1)


class Form(IntEnum):
    """The JSON form of a row's logprobs."""

    LISTS = 0
    """The logprobs of a completion: a list of names, a list of logprobs and a list of objects with alternatives."""
    CONTENT = 1
    """The logprobs of a chat: a list with one object for each token."""
    NONE = 2
    """The form without logprobs, which only streams use."""
    OWN = 3
    """The form LISTS with the token itself as the only alternative, which only streams use."""


Begins = npt.NDArray[np.int64]


class _Columns(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in _POINTERS)


class _Fragments(ctypes.Structure):
    _fields_ = (
        ("bytes", ctypes.c_void_p),
        ("begins", ctypes.c_void_p),
        ("sizes", ctypes.c_void_p),
        ("count", ctypes.c_int64),
    )


class Step(ctypes.Structure):
    """A batch in the form that the renderer reads for streams."""

    _fields_ = (
        ("columns", _Columns),
        *((name, ctypes.c_void_p) for name in ("keys", "statuses", "scorings")),
        *((name, ctypes.c_void_p) for name in ("begins", "scored_begins", "alternative_begins")),
    )


def available() -> bool:
    return _render is not None


class Fragments:
    """Holds a fragment of JSON for each token id: the token's text, or the part of an entry before the logprob.

    `make` returns a fragment, and whether the token has no text by itself. Even then, the fragment must not be empty.
    """

    def __init__(self, size: int, make: Callable[[int], tuple[bytes, bool]], form: Form) -> None:
        self._make = make
        self._form = form
        self._begins = np.full(size, -1, np.int64)
        self._sizes = np.zeros(size, np.int32)
        self._bytes = np.zeros(FIRST_BYTES, np.uint8)
        self._used = 0
        self._out = np.zeros(FIRST_BYTES, np.uint8)
        self.described = self._described()

    def render(self, columns: "Columns", begin: int, end: int) -> list[tuple[bytes, ...]] | None:
        """Return some rows as JSON lists without brackets, or None if Python must write the rows."""
        if _render is None or not self._begins.size or not columns.are_scored:
            return None
        rows, lists = end - begin, 3 if self._form is Form.LISTS else 1
        ends = np.empty(rows * lists, np.int64)
        given = columns.at(begin)
        while True:
            out, places = self._out, address_of(ends)
            written = _render(given, self.described, rows, self._form, address_of(out), out.size, places)
            if written >= 0:
                break
            if written == NO_ROOM and out.size < MOST_BYTES:
                self._out = np.zeros(2 * out.size, np.uint8)
            elif written != NO_FRAGMENT or not self.add(columns.ids(begin, end)):
                return None
        text, lasts = out[:written].tobytes(), ends.tolist()
        pieces = [text[first:last] for first, last in zip([0, *lasts], lasts, strict=False)]
        return list(zip(*(pieces[place::lists] for place in range(lists)), strict=True))

    def add(self, ids: npt.NDArray[np.uint32]) -> list[int]:
        """Create a fragment for each id that has none, and return these ids. If any id is unknown, do nothing."""
        if ids.max(initial=0) >= self._begins.size:
            return []
        missing: list[int] = np.unique(ids[self._begins[ids] < 0]).tolist()
        for token_id in missing:
            fragment, is_empty = self._make(token_id)
            while self._used + len(fragment) > self._bytes.size:
                # The unused half takes no memory until it is written.
                self._bytes, before = np.zeros(2 * self._bytes.size, np.uint8), self._bytes
                self._bytes[: before.size] = before
            self._bytes[self._used : self._used + len(fragment)] = np.frombuffer(fragment, np.uint8)
            self._begins[token_id] = self._used
            self._sizes[token_id] = -len(fragment) if is_empty else len(fragment)
            self._used += len(fragment)
        self.described = self._described()
        return missing

    def _described(self) -> _Fragments:
        arrays: tuple[npt.NDArray[Any], ...] = (self._bytes, self._begins, self._sizes)
        return _Fragments(*map(address_of, arrays), self._begins.size)


class Columns:
    """The addresses of the columns of a batch.

    `begins` has arrays of offsets for tokens, logprobs and alternatives: the start of each row, then the total.
    """

    def __init__(self, batch: LogprobBatch, begins: Begins) -> None:
        self._arrays = [np.ascontiguousarray(getattr(batch, name)) for name in _POINTERS]
        self._places = list(map(address_of, self._arrays))
        self._all_begins = begins
        self._begins, scored_begins, self._alternative_begins = begins
        self.are_scored = bool(scored_begins[-1] == self._begins[-1])
        """Whether all rows have logprobs, so that a token and its rank have the same index."""
        self._rows = [np.ascontiguousarray(each) for each in (batch.request_ids, batch.statuses, batch.scorings)]

    def step(self) -> Step:
        begins, size = address_of(self._all_begins), self._begins.nbytes
        return Step(_Columns(*self._places), *map(address_of, self._rows), begins, begins + size, begins + 2 * size)

    def at(self, row: int) -> _Columns:
        """Return the columns beginning at a row."""
        token, alternative = int(self._begins[row]), int(self._alternative_begins[row])
        begins = (token, token, alternative, token, alternative, row, row)
        return _Columns(*(
            place + width * begin for place, width, begin in zip(self._places, _WIDTHS, begins, strict=True)
        ))  # fmt: skip

    def ids(self, begin: int, end: int) -> npt.NDArray[np.uint32]:
        """Return the token ids of some rows, including the alternatives."""
        tokens = self._arrays[0][self._begins[begin] : self._begins[end]]
        return np.concatenate(
            [tokens, self._arrays[2][self._alternative_begins[begin] : self._alternative_begins[end]]]
        )


def address_of(array: npt.NDArray[Any]) -> int:
    """Return the address of an array, which takes 3 us."""
    place: int = array.__array_interface__["data"][0]
    return place


def _load() -> Any:  # noqa: ANN401 - ctypes has no type for a library
    if os.environ.get("TOKENBUS_PURE_PYTHON", "0") not in ("", "0") or sys.byteorder != "little":
        return None
    if not LIBRARY.exists():
        return None
    try:
        library = open_library(LIBRARY, SOURCE)
        render, stream = library.tokenbus_render, library.tokenbus_stream
    except (LibraryError, AttributeError) as error:
        message = f"the gateway writes JSON in Python, which is slower: {error}; install tokenbus again to fix this"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return None
    pointer = ctypes.c_void_p
    render.restype = stream.restype = ctypes.c_int64
    render.argtypes = [
        ctypes.POINTER(_Columns), ctypes.POINTER(_Fragments), ctypes.c_int64, ctypes.c_int32,
        pointer, ctypes.c_int64, pointer,
    ]  # fmt: skip
    stream.argtypes = [
        *(pointer, pointer, pointer, pointer, ctypes.c_int64), *(pointer, pointer, pointer, ctypes.c_int64),
        *(pointer, pointer, pointer, pointer, ctypes.c_int64, pointer),
    ]  # fmt: skip
    return library


_library = _load()
_render: Any = None if _library is None else _library.tokenbus_render
stream: Any = None if _library is None else _library.tokenbus_stream
