"""Answers over HTTP: their choices, what streamed and whole ones share, and a whole one as one JSON object."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import chain, zip_longest
from typing import NamedTuple, Protocol

from tokenbus.client.tokens import Turn, stop_of
from tokenbus.gateway.buffers import COLLECTED_BYTES, Buffers, Collected, Outbox, collect
from tokenbus.gateway.completion_request import CompletionRequest, Ending
from tokenbus.gateway.errors import ApiError
from tokenbus.gateway.event_writer import EventStream
from tokenbus.gateway.logprob_writers import Part, Piece, Written
from tokenbus.gateway.rendered_step import RenderedStep
from tokenbus.gateway.stop_strings import RunningText
from tokenbus.gateway.tool_calls import AutoCallWriter, CallWriter
from tokenbus.gateway.vocabulary import Vocabulary
from tokenbus.settings import GatewaySettings
from tokenbus_contracts import PromptScores, RowStatus
from tokenbus_contracts.batch import STOP_TOKEN

JSON = "application/json"
_STOPPED = int(RowStatus.FINISHED_STOP)
REASONS = {
    int(RowStatus.FINISHED_STOP): "stop",
    int(RowStatus.FINISHED_LENGTH): "length",
    int(RowStatus.ABORTED): "abort",
}
"""The finish reasons by the status of a last row."""
UNRECOVERABLE = int(RowStatus.UNRECOVERABLE)
_LEAST_ROOM, _MOST_ROOM = 2**11, 2**13
"""Bounds of the memory that a choice is charged with in advance, so that few rows need counting."""
_TURN_BYTES = 2**18
"""Of an answer that are written before other tasks run."""


Beside = Sequence[tuple[bytes, Iterable[Written]]]
"""The members beside a choice's text: each one's name, and its value part by part."""


class Outcome(NamedTuple):
    """What a request came to."""

    model: str
    reason: str
    prompt_tokens: int
    tokens: int
    first_at: float | None
    """When its first tokens came, on the monotonic clock, where the answer waits for the last; None: when it began."""
    most_tokens: int | None
    """The `max_tokens` that it asked for."""


class Listener(Protocol):
    """Takes one request's rows."""

    stream: EventStream | None
    """How far it has come, where its events may be written without it; None: it takes all rows."""
    cached_tokens: int | None
    """How many tokens of its prompt were cached, set before its first row; None: not known."""
    turns: Sequence[Turn]
    """Its turns, if there was more than one."""

    @property
    def tokens(self) -> int:
        """How many of its tokens have come."""

    def take(self, view: RenderedStep, place: int) -> bool:
        """Take a row of a step; return whether more are wanted."""

    def scored(self, scores: PromptScores, vocabulary: Vocabulary) -> None:
        """Take the scores of its prompt, before its first row."""

    def end(self, error: ApiError) -> None:
        """Take the error that ends it."""


class Format(Protocol):
    """Writes one answer as an API has it."""

    _calls: CallWriter | AutoCallWriter | None = None
    kept: int = 0
    """How many bytes the last events of a stream will have of what was sent already."""

    @property
    def held(self) -> int:
        """How many characters of a stream are held back, as they may be a call."""
        return 0 if self._calls is None else self._calls.held

    def stream(self, index: int) -> EventStream:
        """Return a choice that nothing was written of; its rows are for Python if they need more than their columns."""

    def parts(self, progress: EventStream) -> Sequence[Part]:  # noqa: ARG002
        """Return new writers of the members beside a choice's text."""
        return ()

    def scored(self, index: int, scores: PromptScores, vocabulary: Vocabulary) -> Iterable[int]:  # noqa: ARG002
        """Write the scores of a choice's prompt, where the answer has them; yield what memory each part took."""
        return ()

    def drop(self) -> None:
        """Free what was written of prompts, and of which nothing is sent any more."""

    def beginnings(self) -> bytes:
        """Return a stream's events before all rows."""

    def chunk(self, choice: "Choice", text: str, pieces: Sequence[Piece]) -> bytes:
        """Return a row's events, if it has any."""

    def last(self, tokens: int, cached: int | None) -> bytes:  # noqa: ARG002
        """Return the end of a stream, where its last row's events are none."""
        return b""

    def error(self, error: ApiError) -> bytes:
        """Return the end of a stream that breaks."""

    def choice(self, index: int, text: str, beside: Beside, end: Ending | None) -> Iterator[Written]:
        """Yield a choice of a whole answer."""

    def whole(self, choices: Iterable[Iterable[Written]], tokens: int, cached: int | None) -> Iterator[Written]:
        """Yield a whole answer; `choices` are from `choice`, `cached` as `Choice.cached_tokens` of all prompts."""


def unrecoverable(tokens: int) -> ApiError:
    """Return the error of a request whose last row is unrecoverable."""
    message = f"the request's state is lost and cannot be computed again (after {tokens} tokens)"
    error = ApiError(502, message, code="unrecoverable")
    error.tokens = tokens
    return error


class Answer:
    """What one response sends: an outbox, how it failed, and what it holds for a slow client.

    A subclass appends to the outbox as rows come, and names who takes the rows in `listeners`.
    """

    content_type: str
    is_streamed = False
    model = ""
    """The model that its requests name."""
    has_begun = False
    """Whether the status 200 is certain: later errors are events of the stream."""
    listeners: Sequence[Listener]
    who: Hashable = ""
    """Its client, a key or a machine: clients have the same time where rows wait."""

    def __init__(self, most: int, buffers: Buffers) -> None:
        self.outbox = Outbox(most, self._overflow, buffers)
        self.error: ApiError | None = None
        self._most = most
        self._close: Callable[[], None] = lambda: None

    def outcomes(self) -> Iterator[Outcome]:
        """Yield what each of its requests came to; the inspector's is none of a model's usual ones."""
        yield from ()

    async def ready(self) -> None:
        """Wait for its first bytes, or for its end."""
        await self.outbox.ready()

    def begin(self, close: Callable[[], None]) -> None:
        """Begin: its requests are open; `close` aborts those that are still open when it ends early."""
        self._close = close

    def evict(self, size: int) -> None:
        """End because all answers together hold too much, and this one the most: so many bytes."""
        message = "too much waits for all clients together (gateway.buffer_bytes)"
        code = "slow_client" if self.is_streamed else "overloaded"
        self._end_slow(ApiError(503, f"{message}, {size} bytes of it for this answer", code=code))

    def put_events(self, data: bytes, produced_at_ns: int) -> None:
        """Send a row's events that were written without its listener."""
        self.outbox.put(data, produced_at_ns)

    def end(self, error: ApiError) -> None:
        """End with an error: as the answer's status before it has begun, else as an event; ignored after the end."""
        if self.outbox.is_closed:
            return
        self.error = error
        if self.has_begun:
            self.outbox.put(self._error_event(error))
        self.outbox.close()
        self._close()

    def drop(self) -> None:
        """Free the waiting bytes."""
        self.outbox.drop()

    def _error_event(self, _error: ApiError) -> bytes:
        """Return what a stream that has begun sends of its error; other answers have a status."""
        return b""

    def _overflow(self) -> None:
        limit = f"at most {self._most} bytes wait for a client, which read too slowly"
        self._end_slow(ApiError(503, limit, code="slow_client"))

    def _end_slow(self, error: ApiError) -> None:
        is_closed = self.outbox.is_closed
        self.outbox.drop()
        if is_closed:  # its last events are lost: only closing the connection tells the client
            self.outbox.is_broken = True
        self.end(error)


class ChoicesAnswer(Answer, ABC):
    """An answer with choices, in the form of an API."""

    def __init__(self, request: CompletionRequest, form: Format, settings: GatewaySettings, buffers: Buffers) -> None:
        super().__init__(settings.stream_buffer_bytes, buffers)
        self._format = form
        self._request = request
        self.model = request.model
        self._choices = [Choice(index, request, form, self) for index in range(request.choices)]
        self._open = len(self._choices)
        self.listeners = self._choices
        self._answer_bytes = settings.answer_bytes

    @abstractmethod
    def write_prompt(self, parts: Iterable[int]) -> None:
        """Have a form write a prompt's scores, a part at each turn, which takes so many bytes of memory."""

    @abstractmethod
    def begin_with(self, choice: "Choice", text: str, rows: Iterable[list[Piece]]) -> None:
        """Add a prompt's text and pieces, which are made when they are read."""

    @abstractmethod
    def emit(self, choice: "Choice", text: str, pieces: list[Piece], produced_at_ns: int) -> None:
        """Add a row's text and pieces."""

    def end(self, error: ApiError) -> None:
        """End with an error, which names the field that the client sent."""
        self._format.drop()
        for choice in self._choices:  # answers and choices refer to each other, and would keep the scores for a while
            choice.drop()
        super().end(error.renamed(self._request.fields))

    def outcomes(self) -> Iterator[Outcome]:
        """Yield what each choice came to."""
        request, unfinished = self._request, "abort" if self.error is None else "error"
        for choice in self._choices:
            prompt = len(request.prompts[choice.index // request.n])
            reason, most = choice.reason or unfinished, request.sampling.get("max_tokens")
            yield Outcome(request.model, reason, prompt, choice.tokens, choice.first_at, most)

    @property
    def _tokens(self) -> int:
        return sum(each.tokens for each in self._choices)

    @property
    def _cached(self) -> int | None:
        """How many tokens of all prompts were cached, each prompt counted once; None: not known of one."""
        found = [each.cached_tokens for each in self._choices[:: self._request.n]]
        return None if None in found else sum(filter(None, found))


class Choice:
    """One choice of an answer."""

    def __init__(self, index: int, request: CompletionRequest, form: Format, answer: "ChoicesAnswer") -> None:
        stopping = request.stopping
        self.index = index
        self.stream = form.stream(index)
        self.parts = parts = form.parts(self.stream)
        self.reason: str | None = None
        self.ending: Ending | None = None
        self.cached_tokens: int | None = None
        self.turns: Sequence[Turn] = ()
        self.first_at: float | None = None
        """When its first row came, of an answer that is not streamed."""
        self._stops = stopping.texts
        self._shows_special = stopping.shows_special
        self._stop: int | str | None = None
        """The stop that ended it, as its worker says."""
        self._text = RunningText(stopping)
        self._answer = answer
        self._form = form
        self._request = request
        self._echo = request.echoes[index // request.n] if request.echoes else None
        self._scores: PromptScores | None = None
        self.is_silent = all(part.is_empty for part in parts)
        """Whether rows show nothing beside their text: without text they are not emitted."""

    @property
    def tokens(self) -> int:
        """How many of its tokens have come."""
        return self.stream.tokens

    def scored(self, scores: PromptScores, vocabulary: Vocabulary) -> None:
        """Take the scores of its prompt."""
        if self._echo is not None:
            self._scores = scores
        if self._request.wants_prompt_logprobs:
            self._answer.write_prompt(self._form.scored(self.index, scores, vocabulary))

    def drop(self) -> None:
        """Free the scores of its prompt."""
        self._scores = None

    def _begin_with_prompt(self, text: str, vocabulary: Vocabulary) -> None:
        self._echo = None
        self.stream.characters = len(text)
        prompt = self._request.prompts[self.index // self._request.n]
        rows = zip_longest(*(part.echo(prompt, self._scores, vocabulary) for part in self.parts), fillvalue=())
        first = next(rows, ((),) * len(self.parts))
        self._scores = None
        self._answer.begin_with(self, text, map(list, chain([first], rows)))

    def take(self, view: RenderedStep, place: int) -> bool:
        """Add a row; return whether more are wanted."""
        if self._echo is not None:
            self._begin_with_prompt(self._echo, view.vocabulary)
        count = view.counts[place]
        stop = view.stops.get(place, 0) if view.stops else 0
        text = ""
        if count and (self._stops or stop or self._shows_special):
            text, count = self._add_until_stop(view, place, stop)
        elif count:
            text = self._text.add(view.data(place))
        self.stream.tokens += count
        if count and self.stream.form is not None:  # bytes of a character that wait belong to the next row's text
            self.stream.is_held = self._text.is_split
        status = view.statuses[place]
        if status == UNRECOVERABLE:
            self._answer.end(unrecoverable(self.tokens))
            return False
        self.reason = REASONS.get(status) if self._text.stop is None else "stop"
        if self.reason is not None:
            text += self._text.end()
            by = self._stop if self._text.stop is None else self._text.stop
            self.ending = Ending(self.reason, by, view.weight_spans(place), self.turns)
        if self.reason is not None or text or (count and not self.is_silent):
            taken = [part.take(view, place, count) for part in self.parts]
            self._answer.emit(self, text, taken, view.produced_at_ns)
        return self.reason is None

    def end(self, error: ApiError) -> None:
        """End with an error."""
        error.tokens = self.tokens
        self._answer.end(error)

    def _add_until_stop(self, view: RenderedStep, place: int, stop: int) -> tuple[str, int]:
        """Add a row's tokens up to the one that completes a stop; return the text, and how many tokens those are.

        `stop` is the one that the worker names. A stop text is looked for here too: only the text says where it begins.
        """
        ids = view.row_ids(place)
        pieces = view.vocabulary.special_pieces if self._shows_special else view.vocabulary.pieces
        # Where no stop of the request's own ended it, its last token is the model's own end token.
        is_end = self._shows_special and not stop and view.statuses[place] == _STOPPED
        hides_last = (is_end or stop == STOP_TOKEN) and not self._text.includes_stop
        text, count = self._text.add_until_stop(pieces[token] for token in (ids[:-1] if hides_last else ids))
        if (stop or hides_last) and self._text.stop is None:
            self._stop, count = stop_of(view.batch, place, self._stops), len(ids)
        return text, count


class WholeAnswer(ChoicesAnswer):
    """One JSON object, when all choices have ended."""

    content_type = JSON

    def __init__(self, request: CompletionRequest, form: Format, settings: GatewaySettings, buffers: Buffers) -> None:
        super().__init__(request, form, settings, buffers)
        self._turns = buffers.turns
        self._kept = [_Kept(choice) for choice in self._choices]
        self._writing: list[Iterable[int]] = []
        """What is written of prompts once all choices have ended: it may take long, so other tasks run between."""
        self._have_ended = asyncio.Event()
        self._size = 0
        self._hold(sum(kept.size for kept in self._kept))

    async def ready(self) -> None:
        """Wait for all choices, and write the answer; other tasks run between its parts."""
        await self._have_ended.wait()
        written = grown = 0
        for part in () if self.outbox.is_closed else self._written():
            if self.outbox.is_closed:  # it is too large
                return
            held = self.outbox.append(part)
            grown += held if isinstance(part, bytes) else 0  # a buffer is counted already
            written += len(part)
            if not part or written > _TURN_BYTES:
                self.outbox.hold(grown)
                written = grown = 0
                await self._turns.next()
                if self.outbox.is_closed:
                    return
        if not self.outbox.is_closed:
            self._kept, self._writing = [], []
            self.outbox.settle()
            self.outbox.close()

    def write_prompt(self, parts: Iterable[int]) -> None:
        """Leave a prompt's scores for the end."""
        self._writing.append(parts)

    def begin_with(self, choice: Choice, text: str, rows: Iterable[list[Piece]]) -> None:
        """Collect a prompt's text; its pieces are left for the end."""
        kept = self._kept[choice.index]
        if self._hold(kept.add(text, ((),) * len(kept.lists))):
            kept.of_prompt = rows

    def emit(self, choice: Choice, text: str, pieces: list[Piece], _produced_at_ns: int) -> None:
        """Collect a row's text and pieces."""
        if self.outbox.is_closed:
            return
        if choice.first_at is None:
            choice.first_at = time.monotonic()
        grown = self._kept[choice.index].add(text, pieces)
        if (not grown or self._hold(grown)) and choice.reason is not None:
            self._open -= 1
            if not self._open:
                self._have_ended.set()

    def _hold(self, size: int) -> bool:
        """Count what is collected, and return whether it goes on: it may be too much, or for all answers together."""
        self._size += size
        self.outbox.hold(size)
        if self._size > self._answer_bytes:
            limit = f"an answer of at most {self._answer_bytes} bytes"
            message = f"{limit}; a streamed one may be larger"
            self.end(ApiError(400, message, param="stream", code="answer_too_large"))
        return not self.outbox.is_closed

    def end(self, error: ApiError) -> None:
        """End with an error instead of an answer."""
        if not self.outbox.is_closed:
            self.drop()
            super().end(error)
            self._have_ended.set()

    def _overflow(self) -> None:
        """Do nothing: `answer_bytes` bounds what is collected, which the outbox counts."""

    def _written(self) -> Iterator[Written]:
        """Yield the answer part by part; an empty one where other tasks may run."""
        for size in chain.from_iterable(self._writing):
            self._hold(size)
            yield b""
        yield from self._format.whole(map(self._choice, self._choices), self._tokens, self._cached)

    def _choice(self, choice: Choice) -> Iterator[Written]:
        kept = self._kept[choice.index]
        if kept.of_prompt:
            of_prompt = _Kept(choice)
            for pieces in kept.of_prompt:
                self._hold(of_prompt.add("", pieces))
                yield b""
            for own, before in zip(chain(*kept.lists), chain(*of_prompt.lists), strict=True):
                own.begin_with(before)
        self.outbox.hold(-kept.text.length)  # what is written of it is counted as it is put
        text = b"".join(kept.text.taken()).decode()
        beside = [(part.name, part.written(lists)) for part, lists in zip(choice.parts, kept.lists, strict=True)]
        yield from self._format.choice(choice.index, text, beside, choice.ending)

    def drop(self) -> None:
        """Free the collected rows, too."""
        self._kept, self._writing = [], []
        super().drop()


class _Kept:
    """What was collected of a choice."""

    def __init__(self, choice: Choice) -> None:
        self.text = Collected(b"")
        self.lists = [part.lists() for part in choice.parts]
        self.of_prompt: Iterable[list[Piece]] = ()
        """The pieces of the prompt that the text begins with, which are made when they are read."""
        self._all = [self.text, *chain(*self.lists)]
        self._added = self._room = 0
        """Bytes that were added since the last count, and bytes that were counted in advance."""
        self.size = len(self._all) * COLLECTED_BYTES
        """Memory without the advance, in bytes."""

    def add(self, text: str, pieces: Iterable[Piece]) -> int:
        """Add a row's text and pieces; return the growth of the counted memory, in bytes."""
        data = text.encode()
        self.text.last += data
        self._added += len(data)
        for lists, piece in zip(self.lists, pieces, strict=True):
            if piece:
                self._added += collect(lists, piece)
        return self.grown() if self._added > self._room else 0

    def grown(self) -> int:
        """Count memory, with an advance for later rows; return the growth of the counted memory, in bytes."""
        grown = sum([each.grown() for each in self._all])
        self.size += grown
        before, self._added, self._room = self._room, 0, min(_LEAST_ROOM + self.size // 8, _MOST_ROOM)
        return grown + self._room - before
