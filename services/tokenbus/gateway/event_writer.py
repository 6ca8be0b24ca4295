"""EventWriter: writes the events of all open streams that a step has plain rows for, and sends them, without Python.

The compiled renderer does it, from a table of the open streams. Rows that end a stream or begin in the middle of a
character, and all rows where there is no renderer, are left to `answer` and `sse`.
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
from tokenbus.gateway.native import Form, place_of
from tokenbus.gateway.rendered_step import RenderedStep
from tokenbus.gateway.vocabulary import Vocabulary

_MOST_STREAMS = 65_536
_LEFT, _SENT, _RENDERED, _REST, _QUIET = range(5)
_DONE = (_SENT, _QUIET)
_TO_PYTHON = 1
"""The state of a row before, if Python shall take its stream's rows."""


class EventForm(NamedTuple):
    """What is the same in all events of a stream, but for its first and its last ones."""

    before: bytes
    behind: bytes
    """What stands behind it, up to the logprobs."""
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
    """Why the library stopped, and how many rows it left to Python."""

    _fields_ = (("fault", ctypes.c_int32), ("rows", ctypes.c_int32))


class _Vocabulary(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("texts", "keys", "entries", "characters"))


def _of_state(name: str) -> Any:  # noqa: ANN401 - a property, whose type its owner declares
    return property(attrgetter(f"_state.{name}"), lambda stream, value: setattr(stream._state, name, value))  # noqa: SLF001


class EventStream:
    """How far one choice has come: its own count, or the table's while it is open there."""

    tokens: int = _of_state("tokens")
    characters: int = _of_state("characters")
    """How many characters begin in its tokens, where its logprobs say so."""
    socket: int = _of_state("socket")
    """The file descriptor that its events are sent to; below zero: they are given to its outbox."""
    is_held: bool = _of_state("is_held")
    """Whether Python takes its next row."""

    def __init__(self, form: EventForm | None = None) -> None:
        self.form = form
        self._state: _State | SimpleNamespace = SimpleNamespace(tokens=0, characters=0, socket=-1, is_held=False)
        self._around = b""

    def open(self, key: int, state: _State, form: EventForm) -> None:
        """Count in a table from now on."""
        self._around = form.before + form.behind + form.ending
        state.key, state.tokens, state.characters, state.socket = key, self.tokens, self.characters, -1
        state.around = ctypes.cast(ctypes.c_char_p(self._around), ctypes.c_void_p)
        state.before, state.behind, state.ending = len(form.before), len(form.behind), len(form.ending)
        state.form, state.has_ids, state.is_silent = form.logprobs, form.has_ids, form.is_silent
        state.is_held = self.is_held
        self._state = state

    def close(self) -> None:
        """Count for itself again."""
        own = SimpleNamespace(tokens=self.tokens, characters=self.characters, socket=-1, is_held=False)
        state, self._state = self._state, own
        state.key, state.socket, state.is_held = 0, -1, True


class Left(NamedTuple):
    """A row that Python takes, or writes."""

    view: RenderedStep
    place: int
    events: bytes | None
    """Its event, which is to be written; None: the row is to be taken."""
    is_rest: bool
    """Whether the event was sent in part, and this is the rest with what HTTP has around it."""


class EventWriter:
    """The table of open streams."""

    def __init__(self, vocabulary: Vocabulary, most: int) -> None:
        self.vocabulary = vocabulary
        self.out = np.zeros(native.FIRST_BYTES, np.uint8)
        self.out_place = place_of(self.out)
        self._characters = place_of(vocabulary.text_characters)
        self._slots = SlotMap()
        self._streams: dict[int, EventStream] = {}
        self.states = (_State * (min(most, _MOST_STREAMS) if vocabulary.size and native.available() else 0))()

    def open(self, request_id: int, stream: EventStream | None) -> None:
        """Write a request's plain rows from now on, if its form can be written here."""
        if stream is None or stream.form is None or len(self._slots) >= len(self.states):
            return
        slot = self._slots.add(request_id)
        stream.open(request_id, self.states[slot], stream.form)
        self._streams[request_id] = stream

    def close(self, request_id: int) -> None:
        """Write no more rows of a request."""
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self._slots.remove(request_id)
            stream.close()

    def rows_of(self, views: Sequence[RenderedStep]) -> "Rows":
        """Return the rows of some steps, those of one request together and in order."""
        counts = [view.batch.row_count for view in views]
        if len(views) == 1:
            keys = views[0].batch.request_ids
            numbers, places = np.zeros(counts[0], np.int32), np.arange(counts[0], dtype=np.int32)
        else:
            keys = np.concatenate([view.batch.request_ids for view in views])
            order = np.argsort(keys, kind="stable")
            numbers = np.repeat(np.arange(len(views), dtype=np.int32), counts)[order]
            places = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])[order]
            keys = keys[order]
        slots = self._slots.find(keys) if self._streams else np.full(keys.size, -1, np.intp)
        return Rows(self, views, keys, numbers, places, slots)

    def learn(self, form: int, views: Sequence[RenderedStep]) -> None:
        """Make the fragments of all tokens of some steps that a form needs; of unknown ids there are none."""
        vocabulary = self.vocabulary
        for batch in (view.batch for view in views):
            ids, others = (each[each < vocabulary.size] for each in (batch.token_ids, batch.alternative_token_ids))
            vocabulary.learn(ids)
            if form != Form.NONE:
                fragments = vocabulary.entry_fragments if form == Form.CONTENT else vocabulary.key_fragments
                fragments.add(np.concatenate([ids, others]))

    def described(self) -> _Vocabulary:
        """Return the vocabulary as the library takes it."""
        vocabulary = self.vocabulary
        fragments = (vocabulary.text_fragments, vocabulary.key_fragments, vocabulary.entry_fragments)
        return _Vocabulary(*(ctypes.addressof(each.described) for each in fragments), self._characters)

    def grow(self) -> bool:
        """Make room for more to be written at once; return False if that is enough for anything."""
        if self.out.size >= native.MOST_BYTES:
            return False
        self.out = np.concatenate([self.out, np.zeros_like(self.out)])
        self.out_place = place_of(self.out)
        return True


class Rows:
    """Rows of some steps, which are written a few at a time."""

    def __init__(  # noqa: PLR0913, PLR0917 - columns
        self,
        writer: EventWriter,
        views: Sequence[RenderedStep],
        keys: npt.NDArray[np.uint64],
        numbers: npt.NDArray[np.int32],
        places: npt.NDArray[np.int32],
        slots: npt.NDArray[np.intp],
    ) -> None:
        self._writer = writer
        self._views = views
        self._keys = keys
        self._numbers, self._places, self._slots = numbers, places, slots
        self._learned: set[int] = set()
        """The forms for which all tokens of the steps have fragments."""
        size = keys.size
        results = np.zeros((3, size), np.int64)
        self._begins, self._ends, self._times = results
        self._states = np.zeros(size, np.uint8)
        self._found = _Found()
        self._steps: Any = None
        if len(writer.states):
            self._steps = (native.Step * len(views))(*(view.columns.step() for view in views))
            self._given = [place_of(each) for each in (numbers, places, slots)]
            places_of_results = place_of(results)
            begins, ends, times = (places_of_results + line * self._begins.nbytes for line in range(3))
            self._results = begins, ends, place_of(self._states), times

    def __len__(self) -> int:
        return self._keys.size

    def write(self, begin: int, end: int) -> Iterator[tuple[int, list[Left]]]:
        """Write some rows, and yield the request ids whose rows are left, each with these rows.

        Nothing may be written or closed between two that are yielded but what they are about.
        """
        while begin < end:
            stopped = self._written(begin, end) if self._steps is not None else end
            if self._steps is None or self._found.rows:
                yield from self._left(begin, stopped)
            begin = stopped

    def seconds(self) -> npt.NDArray[np.float64]:
        """Return how long after its publication each row was sent, of those that were."""
        produced = np.array([view.produced_at_ns for view in self._views], np.int64)
        sent = self._times > 0
        found: npt.NDArray[np.float64] = (self._times - produced[self._numbers])[sent] / 1e9
        return found

    def _written(self, begin: int, end: int) -> int:
        """Write rows from `begin` on, and return before which one that stopped; mend why it did."""
        writer, found = self._writer, self._found
        found.fault = found.rows = 0
        stopped: int = native.stream(
            self._steps, *self._given, end, writer.states, ctypes.byref(writer.described()), writer.out_place,
            writer.out.size, *self._results, begin, ctypes.byref(found),
        )  # fmt: skip
        if stopped == end or (found.fault == native.NO_ROOM and stopped > begin):
            return stopped
        form = writer.states[self._slots[stopped]].form
        if found.fault == native.NO_FRAGMENT and form not in self._learned:
            self._learned.add(form)
            writer.learn(form, self._views)
        elif found.fault != native.NO_ROOM or not writer.grow():
            self._states[stopped] = _TO_PYTHON
        return stopped

    def _left(self, begin: int, end: int) -> Iterator[tuple[int, list[Left]]]:
        found: dict[int, list[Left]] = {}
        columns = (column[begin:end].tolist() for column in (self._states, self._keys, self._numbers, self._places))
        for row, (state, key, number, place) in enumerate(zip(*columns, strict=True), begin):
            if state in _DONE:
                continue
            events = None
            if state != _LEFT:
                events = self._writer.out[self._begins.item(row) : self._ends.item(row)].tobytes()
            found.setdefault(key, []).append(Left(self._views[number], place, events, state == _REST))
        yield from found.items()
