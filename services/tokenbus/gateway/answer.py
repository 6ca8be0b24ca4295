"""Answers over HTTP: Choice, Answer as the base of all answers, and WholeAnswer for answers that are not streamed."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import chain, zip_longest
from typing import NamedTuple, Protocol

from tokenbus.client.tokens import Turn, stop_of
from tokenbus.gateway.buffers import COLLECTED_BYTES, Buffers, Collected, SendQueue, collect
from tokenbus.gateway.completion_request import CompletionRequest, Ending
from tokenbus.gateway.errors import ApiError
from tokenbus.gateway.event_writer import EventStream
from tokenbus.gateway.last_turns import TurnRecorder
from tokenbus.gateway.logprob_writers import MemberWriter, Piece, Written
from tokenbus.gateway.rendered_step import RenderedStep
from tokenbus.gateway.stop_strings import RunningText
from tokenbus.gateway.tool_calls import AutoCallWriter, CallWriter
from tokenbus.gateway.vocabulary import Vocabulary
from tokenbus.settings import GatewaySettings
from tokenbus_contracts import PromptScores, RowStatus
from tokenbus_contracts.batch import STOP_TOKEN

JSON = "application/json"
_STOPPED, _UNRECOVERABLE = int(RowStatus.FINISHED_STOP), int(RowStatus.UNRECOVERABLE)
_REASONS = {_STOPPED: "stop", int(RowStatus.FINISHED_LENGTH): "length", int(RowStatus.ABORTED): "abort"}
_LEAST_ROOM, _MOST_ROOM = 2**11, 2**13
"""Minimum and maximum number of bytes charged to a choice in advance. New rows first use up the charged bytes."""
_TURN_BYTES = 2**18
"""Number of bytes of an answer that are written before other tasks run."""


Beside = Sequence[tuple[bytes, Iterable[Written]]]
"""The JSON members of a choice except its text. Each member has a name and the parts of its value."""


class Outcome(NamedTuple):
    """A request's result, for the metrics."""

    model: str
    reason: str
    prompt_tokens: int
    tokens: int
    first_at: float | None
    """Monotonic time of the first tokens, or None if the answer is streamed."""
    most_tokens: int | None


class Format(Protocol):
    """Writes one answer in the format of an API."""

    _calls: CallWriter | AutoCallWriter | None = None
    kept: int = 0
    """Number of sent bytes that the last events of a stream will repeat."""

    @property
    def held(self) -> int:
        """Number of characters that a stream holds back because they may begin a tool call."""
        return 0 if self._calls is None else self._calls.held

    def stream(self, index: int) -> EventStream:  # noqa: ARG002
        """Return the state of a new choice's stream. With the default state, Python writes all rows of the stream."""
        return EventStream()

    def writers(self, progress: EventStream) -> Sequence[MemberWriter]:  # noqa: ARG002
        """Return new writers of a choice's JSON members, except its text."""
        return ()

    def scored(self, index: int, scores: PromptScores, vocabulary: Vocabulary) -> Iterable[int]:  # noqa: ARG002
        """Write the scores of a choice's prompt if the answer shows them, and yield the size of each part in bytes."""
        return ()

    def drop(self) -> None:
        """Free the prompts' scores that are written but not sent."""

    def beginnings(self) -> bytes:
        """Return the events that precede the first row of a stream."""

    def chunk(self, choice: "Choice", text: str, pieces: Sequence[Piece]) -> bytes:
        """Return the events of a row, which may be empty."""

    def last(self, tokens: int, cached: int | None) -> bytes:  # noqa: ARG002
        """Return the events that follow a stream's last row."""
        return b""

    def error(self, error: ApiError) -> bytes:
        """Return the last event of a stream that fails."""

    def choice(self, index: int, text: str, beside: Beside, end: Ending | None) -> Iterator[Written]:
        """Yield the JSON of one choice, in parts, for an answer that is not streamed."""

    def whole(self, choices: Iterable[Iterable[Written]], tokens: int, cached: int | None) -> Iterator[Written]:
        """Yield the JSON of an answer, in parts, from the results of `choice` and the numbers of tokens."""


class Answer(ABC):
    """One HTTP response in the format of an API: its choices, its send queue and its error.

    Subclasses add bytes to the send queue when the choices receive rows.
    """

    content_type: str
    is_streamed = False
    has_begun = False
    """Whether the response has status 200, so that later errors are sent as events of the stream."""
    recorder: TurnRecorder | None = None
    """Records the output of a session's turn for the next turn, or None."""
    who: Hashable = ""
    """The client (the name of a key, or a machine) that is charged for the time of writing rows."""

    def __init__(self, request: CompletionRequest, form: Format, settings: GatewaySettings, buffers: Buffers) -> None:
        self.queue = SendQueue(settings.stream_buffer_bytes, self._overflow, buffers)
        self.error: ApiError | None = None
        self.model = request.model
        self.choices = [Choice(index, request, form, self) for index in range(request.choices)]
        self._open = len(self.choices)
        self._format = form
        self._request = request
        self._settings = settings
        self._close: Callable[[], None] = lambda: None

    @abstractmethod
    def write_prompt(self, parts: Iterable[int]) -> None:
        """Write a prompt's scores by iterating over `parts`, which yields the size of each written part in bytes."""

    @abstractmethod
    def begin_with(self, choice: "Choice", text: str, rows: Iterable[list[Piece]]) -> None:
        """Begin a choice with the text and the pieces of its prompt. Iterating over `rows` computes the pieces."""

    @abstractmethod
    def emit(self, choice: "Choice", text: str, pieces: list[Piece], produced_at_ns: int) -> None: ...

    def outcomes(self) -> Iterator[Outcome]:
        """Yield the result of each request, for the metrics. Answers for the inspector yield nothing."""
        request, unfinished = self._request, "abort" if self.error is None else "error"
        for choice in self.choices:
            prompt = len(request.prompts[choice.index // request.n])
            reason, most = choice.reason or unfinished, request.sampling.get("max_tokens")
            yield Outcome(request.model, reason, prompt, choice.tokens, choice.first_at, most)

    async def ready(self) -> None:
        """Wait for the first bytes or the end of the answer."""
        await self.queue.ready()

    def begin(self, close: Callable[[], None]) -> None:
        """Begin the answer. `close` aborts the open requests if the answer ends early."""
        self._close = close

    def evict(self, size: int) -> None:
        """End this answer of `size` bytes, because it is the largest and all answers together use too much memory."""
        message = "too many bytes wait for all clients together (gateway.buffer_bytes)"
        code = "slow_client" if self.is_streamed else "overloaded"
        self._end_slow(ApiError(503, f"{message}, {size} bytes of it for this answer", code=code))

    def put_events(self, data: bytes, produced_at_ns: int) -> None:
        """Send the events that the event writer has written for a row."""
        self.queue.put(data, produced_at_ns)

    def end(self, error: ApiError) -> None:
        """End with an error, which names its field as the client's body does. Later calls have no effect.

        The error becomes the HTTP response if the answer has not begun, and otherwise an event of the stream.
        """
        self._format.drop()
        for choice in self.choices:  # free the scores now; a cycle of references keeps the choices longer
            choice.drop()
        if self.queue.is_closed:
            return
        self.error = error.renamed(self._request.fields)
        if self.has_begun:
            self.queue.put(self._format.error(error))
        self.queue.close()
        self._close()

    def drop(self) -> None:
        self.queue.drop()

    def release(self) -> None:
        """Break the cycles of references with the choices and the queue, so that memory is freed at once."""
        self.choices = []
        self.queue.release()

    @property
    def _tokens(self) -> int:
        return sum(each.tokens for each in self.choices)

    @property
    def _cached(self) -> int | None:
        """Number of cached tokens of all prompts, or None if the number is unknown for any prompt."""
        found = [each.cached_tokens for each in self.choices[:: self._request.n]]
        return None if None in found else sum(filter(None, found))

    def _overflow(self) -> None:
        limit = f"at most {self._settings.stream_buffer_bytes} bytes may wait for a client, which read too slowly"
        self._end_slow(ApiError(503, limit, code="slow_client"))

    def _end_slow(self, error: ApiError) -> None:
        self.queue.drop()
        self.queue.is_broken = self.queue.is_closed  # the client loses the last events
        self.end(error)


class Choice:
    """One choice of an answer, which receives the rows of one request."""

    def __init__(self, index: int, request: CompletionRequest, form: Format, answer: Answer) -> None:
        stopping = request.stopping
        self.index = index
        # In a session, Python must write all rows, so that this choice can record the token ids.
        self.stream = EventStream() if request.conversation else form.stream(index)
        """The state of the choice's stream, which the event writer also reads and changes."""
        self.writers = form.writers(self.stream)
        self.reason: str | None = None
        self.ending: Ending | None = None
        self.cached_tokens: int | None = None
        """Number of cached tokens of the prompt, set before the first row, or None if unknown."""
        self.turns: Sequence[Turn] = ()
        """The parts of the request that different workers computed, or empty if one worker computed all tokens."""
        self.first_at: float | None = None
        self._stops = stopping.texts
        self._shows_special = stopping.shows_special
        self._stop: int | str | None = None
        self._text = RunningText(stopping)
        self._answer = answer
        self._form = form
        self._request = request
        self._echo = request.echoes[index // request.n] if request.echoes else None
        self._scores: PromptScores | None = None
        self.is_silent = all(writer.is_empty for writer in self.writers)
        """Whether rows without text are skipped, because the answer shows nothing else of a row."""

    @property
    def tokens(self) -> int:
        return self.stream.tokens

    def scored(self, scores: PromptScores, vocabulary: Vocabulary) -> None:
        """Add the scores of the prompt. Called before the first row."""
        if self._echo is not None and not self._request.is_chat:
            self._scores = scores
        if self._request.wants_prompt_logprobs:
            self._answer.write_prompt(self._form.scored(self.index, scores, vocabulary))

    def drop(self) -> None:
        self._scores = None

    def _begin_with_prompt(self, text: str, vocabulary: Vocabulary) -> str:
        """Echo the prompt. Return the part of the echo that the caller must put in front of the first row's text."""
        self._echo = None
        if self._request.is_chat:  # as in vLLM, the echo of a chat has no logprobs
            return text
        self.stream.characters = len(text)
        prompt = self._request.prompts[self.index // self._request.n]
        rows = zip_longest(*(each.echo(prompt, self._scores, vocabulary) for each in self.writers), fillvalue=())
        first = next(rows, ((),) * len(self.writers))
        self._scores = None
        self._answer.begin_with(self, text, map(list, chain([first], rows)))
        return ""

    def take(self, step: RenderedStep, row: int) -> bool:
        """Add a row of a step. Return False if the choice has ended."""
        text = "" if self._echo is None else self._begin_with_prompt(self._echo, step.vocabulary)
        count = step.counts[row]
        stop = step.stops.get(row, 0) if step.stops else 0
        if count and (self._stops or stop or self._shows_special):
            added, count = self._add_until_stop(step, row, stop)
            text += added
        elif count:
            text += self._text.add(step.data(row))
        self.stream.tokens += count
        if self._answer.recorder is not None:
            self._answer.recorder.add(step.row_ids(row))
        if count and self.stream.form is not None:  # after a split character, Python must write the next row
            self.stream.is_held = self._text.is_split
        status = step.statuses[row]
        if status == _UNRECOVERABLE:
            message = f"the request's state is lost and cannot be computed again (after {self.tokens} tokens)"
            self._answer.end(ApiError(502, message, code="unrecoverable"))
            return False
        self.reason = _REASONS.get(status) if self._text.stop is None else "stop"
        if self.reason is not None:
            text += self._text.end()
            by = self._stop if self._text.stop is None else self._text.stop
            self.ending = Ending(self.reason, by, step.weight_spans(row), self.turns)
            if self._answer.recorder is not None:
                self._answer.recorder.end(self.ending)
        if self.reason is not None or text or (count and not self.is_silent):
            pieces = [writer.take(step, row, count) for writer in self.writers]
            self._answer.emit(self, text, pieces, step.produced_at_ns)
        return self.reason is None

    def end(self, error: ApiError) -> None:
        self._answer.end(error)

    def _add_until_stop(self, step: RenderedStep, row: int, stop: int) -> tuple[str, int]:
        """Add the tokens of a row up to its stop string or stop token.

        The gateway searches for stops too, because workers do not report where the text of a stop begins.
        """
        ids = step.row_ids(row)
        pieces = step.vocabulary.special_pieces if self._shows_special else step.vocabulary.pieces
        # If the choice ended without a stop from the request, the last token is the model's end token.
        is_end = self._shows_special and not stop and step.statuses[row] == _STOPPED
        hides_last = (is_end or stop == STOP_TOKEN) and not self._text.includes_stop
        text, count = self._text.add_until_stop(pieces[token] for token in (ids[:-1] if hides_last else ids))
        if (stop or hides_last) and self._text.stop is None:
            self._stop, count = stop_of(step.batch, row, self._stops), len(ids)
        return text, count


class WholeAnswer(Answer):
    """An answer that is sent as one JSON object when all choices have ended."""

    content_type = JSON

    def __init__(self, request: CompletionRequest, form: Format, settings: GatewaySettings, buffers: Buffers) -> None:
        super().__init__(request, form, settings, buffers)
        self._turns = buffers.turns
        self._kept = [_Kept(choice) for choice in self.choices]
        self._writing: list[Iterable[int]] = []
        """Iterators that write the prompts' scores after all choices have ended."""
        self._have_ended = asyncio.Event()
        self._size = 0
        self._hold(sum(kept.size for kept in self._kept))

    async def ready(self) -> None:
        """Wait for all choices, then write the answer in parts, between which other tasks run."""
        await self._have_ended.wait()
        written = grown = 0
        for part in () if self.queue.is_closed else self._written():
            if self.queue.is_closed:  # the answer was too large
                return
            held = self.queue.append(part)
            grown += held if isinstance(part, bytes) else 0  # a bytearray was counted while it was filled
            written += len(part)
            if not part or written > _TURN_BYTES:
                self.queue.hold(grown)
                written = grown = 0
                await self._turns.next()
                if self.queue.is_closed:
                    return
        if not self.queue.is_closed:
            self._kept, self._writing = [], []
            self.queue.settle()
            self.queue.close()

    def write_prompt(self, parts: Iterable[int]) -> None:
        """Postpone writing a prompt's scores until all choices have ended."""
        self._writing.append(parts)

    def begin_with(self, choice: Choice, text: str, rows: Iterable[list[Piece]]) -> None:
        """Collect the text of a prompt. The pieces of the prompt are written when all choices have ended."""
        kept = self._kept[choice.index]
        if self._hold(kept.add(text, ((),) * len(kept.lists))):
            kept.of_prompt = rows

    def emit(self, choice: Choice, text: str, pieces: list[Piece], _produced_at_ns: int) -> None:
        if self.queue.is_closed:
            return
        if choice.first_at is None:
            choice.first_at = time.monotonic()
        grown = self._kept[choice.index].add(text, pieces)
        if (not grown or self._hold(grown)) and choice.reason is not None:
            self._open -= 1
            if not self._open:
                self._have_ended.set()

    def _hold(self, size: int) -> bool:
        """Count collected bytes. Return False if the answer has ended, for example because it is too large."""
        self._size += size
        self.queue.hold(size)
        if self._size > self._settings.answer_bytes:
            limit = f"an answer of at most {self._settings.answer_bytes} bytes"
            message = f"{limit}; a streamed answer may be larger"
            self.end(ApiError(400, message, param="stream", code="answer_too_large"))
        return not self.queue.is_closed

    def end(self, error: ApiError) -> None:
        if not self.queue.is_closed:
            self.drop()
            super().end(error)
            self._have_ended.set()

    def _overflow(self) -> None:
        """Do nothing, because `answer_bytes` already bounds the answer."""

    def _written(self) -> Iterator[Written]:
        """Yield the answer in parts. After an empty part the caller lets other tasks run."""
        for size in chain.from_iterable(self._writing):
            self._hold(size)
            yield b""
        yield from self._format.whole(map(self._choice, self.choices), self._tokens, self._cached)

    def _choice(self, choice: Choice) -> Iterator[Written]:
        kept = self._kept[choice.index]
        if kept.of_prompt:
            of_prompt = _Kept(choice)
            for pieces in kept.of_prompt:
                self._hold(of_prompt.add("", pieces))
                yield b""
            for own, before in zip(chain(*kept.lists), chain(*of_prompt.lists), strict=True):
                own.begin_with(before)
        self.queue.hold(-kept.text.length)  # the queue counts the text again in its JSON form
        text = b"".join(kept.text.taken()).decode()
        beside = [(each.name, each.written(lists)) for each, lists in zip(choice.writers, kept.lists, strict=True)]
        yield from self._format.choice(choice.index, text, beside, choice.ending)

    def drop(self) -> None:
        self._kept, self._writing = [], []
        super().drop()


class _Kept:
    """The collected text and pieces of a choice."""

    def __init__(self, choice: Choice) -> None:
        self.text = Collected(b"")
        self.lists = [writer.lists() for writer in choice.writers]
        self.of_prompt: Iterable[list[Piece]] = ()
        self._all = [self.text, *chain(*self.lists)]
        self._added = self._room = 0
        """Number of bytes added since the last count, and number of bytes charged in advance."""
        self.size = len(self._all) * COLLECTED_BYTES

    def add(self, text: str, pieces: Iterable[Piece]) -> int:
        """Add a row's text and pieces. Return the growth of the counted memory in bytes."""
        data = text.encode()
        self.text.last += data
        self._added += len(data)
        for lists, piece in zip(self.lists, pieces, strict=True):
            if piece:
                self._added += collect(lists, piece)
        return self.grown() if self._added > self._room else 0

    def grown(self) -> int:
        """Count the used memory, charge some bytes in advance, and return the growth of the counted memory in bytes."""
        grown = sum([each.grown() for each in self._all])
        self.size += grown
        before, self._added, self._room = self._room, 0, min(_LEAST_ROOM + self.size // 8, _MOST_ROOM)
        return grown + self._room - before
