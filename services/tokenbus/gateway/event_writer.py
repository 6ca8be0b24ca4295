"""EventWriter: lets the compiled renderer write and send the events of all open streams for the rows of a step.

The renderer reads a table of the open streams. If a row ends a stream or begins within a character, the Python modules
`answer` and `sse` write the row. Without the renderer, Python writes all rows.
"""

import ctypes
from collections.abc import Iterator, Sequence
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus.delivery.slots import SlotMap
from tokenbus.gateway import native
from tokenbus.gateway.native import Form, address_of
from tokenbus.gateway.rendered_step import RenderedStep
from tokenbus.gateway.vocabulary import Vocabulary

_MOST_STREAMS = 65_536
_LEFT, _SENT, _RENDERED, _REST, _QUIET = range(5)
_DONE = (_SENT, _QUIET)
_TO_PYTHON = 1
"""Initial state of a row that Python must write. Python then also writes the later rows of the request."""


class EventForm(NamedTuple):
    """The bytes that are the same in all events of a stream, except in its first and last event."""

    before: bytes
    behind: bytes
    """The bytes between the text and the logprobs."""
    ending: bytes
    logprobs: Form
    has_ids: bool

    @property
    def is_silent(self) -> bool:
        """Whether a row without text has no event."""
        return self.logprobs is Form.NONE and not self.has_ids


class _State(ctypes.Structure):
    _fields_ = (
        ("key", ctypes.c_uint64),
        ("around", ctypes.c_void_p),
        ("tokens", ctypes.c_int64),
        ("characters", ctypes.c_int64),
        ("before", ctypes.c_int32),
        ("behind", ctypes.c_int32),
        ("ending", ctypes.c_int32),
        ("socket", ctypes.c_int32),
        ("form", ctypes.c_uint8),
        ("has_ids", ctypes.c_uint8),
        ("is_silent", ctypes.c_uint8),
        ("is_held", ctypes.c_uint8),
    )


class _Found(ctypes.Structure):
    """The reason why the renderer stopped, and the number of rows that the renderer left to Python."""

    _fields_ = (("fault", ctypes.c_int32), ("rows", ctypes.c_int32))


class _Vocabulary(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("texts", "keys", "entries", "characters"))


def _of_state(name: str) -> Any:  # noqa: ANN401 - a property, whose type its owner declares
    return property(attrgetter(f"_state.{name}"), lambda stream, value: setattr(stream._state, name, value))  # noqa: SLF001


class EventStream:
    """The progress of one choice. While the stream is open, the values are stored in the renderer's table."""

    tokens: int = _of_state("tokens")
    characters: int = _of_state("characters")
    """Number of characters in the choice's tokens, if the logprobs need that number."""
    socket: int = _of_state("socket")
    """The file descriptor of the socket for the events, or -1 if the events go to the answer's queue."""
    is_held: bool = _of_state("is_held")
    """Whether Python must write the next row."""

    def __init__(self, form: EventForm | None = None) -> None:
        self.form = form
        self._state: _State | SimpleNamespace = SimpleNamespace(tokens=0, characters=0, socket=-1, is_held=False)
        self._around = b""

    def open(self, request_id: int, state: _State, form: EventForm) -> None:
        self._around = form.before + form.behind + form.ending
        state.key, state.tokens, state.characters, state.socket = request_id, self.tokens, self.characters, -1
        state.around = ctypes.cast(ctypes.c_char_p(self._around), ctypes.c_void_p)
        state.before, state.behind, state.ending = len(form.before), len(form.behind), len(form.ending)
        state.form, state.has_ids, state.is_silent = form.logprobs, form.has_ids, form.is_silent
        state.is_held = self.is_held
        self._state = state

    def close(self) -> None:
        own = SimpleNamespace(tokens=self.tokens, characters=self.characters, socket=-1, is_held=False)
        state, self._state = self._state, own
        state.key, state.socket, state.is_held = 0, -1, True


class Left(NamedTuple):
    """A row that Python must write, or whose event Python must send."""

    step: RenderedStep
    row: int
    events: bytes | None
    """The written event of the row, or None if Python must write the row."""
    is_rest: bool
    """Whether `events` is the remaining part of a partly sent HTTP chunk."""


class EventWriter:
    """The table of open streams."""

    def __init__(self, vocabulary: Vocabulary, most: int) -> None:
        self.vocabulary = vocabulary
        self.out = np.zeros(native.FIRST_BYTES, np.uint8)
        self.out_address = address_of(self.out)
        self._characters = address_of(vocabulary.text_characters)
        self._slots = SlotMap()
        self._streams: dict[int, EventStream] = {}
        self.states = (_State * (min(most, _MOST_STREAMS) if vocabulary.size and native.available() else 0))()

    def open(self, request_id: int, stream: EventStream) -> None:
        """Add a stream to the table unless the stream has no form or the table is full."""
        if stream.form is None or len(self._slots) >= len(self.states):
            return
        slot = self._slots.add(request_id)
        stream.open(request_id, self.states[slot], stream.form)
        self._streams[request_id] = stream

    def close(self, request_id: int) -> None:
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self._slots.remove(request_id)
            stream.close()

    def slots_of(self, request_ids: npt.NDArray[np.uint64]) -> npt.NDArray[np.intp]:
        return self._slots.find(request_ids) if self._streams else np.full(request_ids.size, -1, np.intp)

    def learn(self, form: int, steps: Sequence[RenderedStep]) -> None:
        """Create the fragments that `form` needs for the tokens of some steps. Unknown ids have no fragments."""
        vocabulary = self.vocabulary
        for batch in (step.batch for step in steps):
            ids, others = (each[each < vocabulary.size] for each in (batch.token_ids, batch.alternative_token_ids))
            vocabulary.learn(ids)
            if form != Form.NONE:
                fragments = vocabulary.entry_fragments if form == Form.CONTENT else vocabulary.key_fragments
                fragments.add(np.concatenate([ids, others]))

    def described(self) -> _Vocabulary:
        vocabulary = self.vocabulary
        fragments = (vocabulary.text_fragments, vocabulary.key_fragments, vocabulary.entry_fragments)
        return _Vocabulary(*(ctypes.addressof(each.described) for each in fragments), self._characters)

    def grow(self) -> bool:
        """Double the size of the buffer. Return False if the buffer has the maximum size."""
        if self.out.size >= native.MOST_BYTES:
            return False
        self.out = np.concatenate([self.out, np.zeros_like(self.out)])
        self.out_address = address_of(self.out)
        return True


class Rows:
    """The rows of some steps, grouped by request and in the order of the steps."""

    def __init__(self, writer: EventWriter, steps: Sequence[RenderedStep]) -> None:
        self._writer = writer
        self._steps = steps
        counts = [step.batch.row_count for step in steps]
        if len(steps) == 1:
            self._request_ids = steps[0].batch.request_ids
            self._numbers, self._rows = np.zeros(counts[0], np.int32), np.arange(counts[0], dtype=np.int32)
        else:
            request_ids = np.concatenate([step.batch.request_ids for step in steps])
            order = np.argsort(request_ids, kind="stable")
            self._request_ids = request_ids[order]
            self._numbers = np.repeat(np.arange(len(steps), dtype=np.int32), counts)[order]
            self._rows = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])[order]
        self._slots = writer.slots_of(self._request_ids)
        self._learned: set[int] = set()
        size = self._request_ids.size
        results = np.zeros((3, size), np.int64)
        self._begins, self._ends, self._times = results
        self._states = np.zeros(size, np.uint8)
        self._found = _Found()
        self._native_steps: Any = None
        if len(writer.states):
            self._native_steps = (native.Step * len(steps))(*(step.columns.step() for step in steps))
            self._given = [address_of(each) for each in (self._numbers, self._rows, self._slots)]
            address_of_results = address_of(results)
            begins, ends, times = (address_of_results + line * self._begins.nbytes for line in range(3))
            self._results = begins, ends, address_of(self._states), times

    def __len__(self) -> int:
        return self._request_ids.size

    def write(self, begin: int, end: int) -> Iterator[tuple[int, list[Left]]]:
        """Write the rows from `begin` to `end`. Yield the rows that are left to Python, by request id.

        Between two yields, the caller may write or close only the yielded request.
        """
        while begin < end:
            stopped = self._written(begin, end) if self._native_steps is not None else end
            if self._native_steps is None or self._found.rows:
                yield from self._left(begin, stopped)
            begin = stopped

    def seconds(self) -> npt.NDArray[np.float64]:
        """Return the seconds from publication to sending for each sent row."""
        produced = np.array([step.produced_at_ns for step in self._steps], np.int64)
        sent = self._times > 0
        found: npt.NDArray[np.float64] = (self._times - produced[self._numbers])[sent] / 1e9
        return found

    def _written(self, begin: int, end: int) -> int:
        """Write rows until the renderer stops. Fix the cause of the stop, and return the index of the unwritten row."""
        writer, found = self._writer, self._found
        found.fault = found.rows = 0
        stopped: int = native.stream(
            self._native_steps, *self._given, end, writer.states, ctypes.byref(writer.described()), writer.out_address,
            writer.out.size, *self._results, begin, ctypes.byref(found),
        )  # fmt: skip
        if stopped == end or (found.fault == native.NO_ROOM and stopped > begin):
            return stopped
        form = writer.states[self._slots[stopped]].form
        if found.fault == native.NO_FRAGMENT and form not in self._learned:
            self._learned.add(form)
            writer.learn(form, self._steps)
        elif found.fault != native.NO_ROOM or not writer.grow():
            self._states[stopped] = _TO_PYTHON
        return stopped

    def _left(self, begin: int, end: int) -> Iterator[tuple[int, list[Left]]]:
        found: dict[int, list[Left]] = {}
        columns = (self._states, self._request_ids, self._numbers, self._rows)
        values = (column[begin:end].tolist() for column in columns)
        for index, (state, request_id, number, row) in enumerate(zip(*values, strict=True), begin):
            if state in _DONE:
                continue
            events = None
            if state != _LEFT:
                events = self._writer.out[self._begins.item(index) : self._ends.item(index)].tobytes()
            found.setdefault(request_id, []).append(Left(self._steps[number], row, events, state == _REST))
        yield from found.items()
