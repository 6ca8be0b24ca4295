"""OpenRequests: a client's open requests, and which processor has each."""

import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tokenbus.client.progress import MOST_POSITION, NO_SENDER, Progress
from tokenbus.client.received_scores import ReceivedScores
from tokenbus.client.steps import RequestEnd, StepRows
from tokenbus.client.tokens import RequestTokens, Turn, stop_of
from tokenbus.client.waiter import WakeUps
from tokenbus.client.weight_spans import WeightSpans
from tokenbus.delivery import RequestFailedError, Step
from tokenbus.delivery.errors import CODE_NAMES, NOT_HERE, NOT_TAKEN, brief, request_error
from tokenbus.delivery.slots import Slots
from tokenbus.delivery.step import FINISHED
from tokenbus_contracts import ContractError, LogprobBatch, PromptScores, RowStatus
from tokenbus_contracts.frames import write_frame
from tokenbus_contracts.generated.client_pb2 import ClientFrame, Ended, Resume
from tokenbus_contracts.generated.request_pb2 import (
    Abort,
    Admitted,
    ContinuationPolicy,
    ErrorCode,
    Generate,
    PromptScoresChunk,
    RequestError,
    TokenPrompt,
)
from tokenbus_contracts.schema import bounds_in

if TYPE_CHECKING:
    from tokenbus.client.session import ClientSession

_MOST_IGNORED = 1024
_MOST_ENDED = bounds_in(Ended.DESCRIPTOR.fields_by_name["request_ids"].GetOptions()).max_items
"""As many as one frame may name."""
_WHOLE = frozenset({RowStatus.FINISHED_STOP, RowStatus.FINISHED_LENGTH})
_CONTINUED = frozenset(
    {
        ErrorCode.ERROR_CODE_WORKER_LOST,
        ErrorCode.ERROR_CODE_ENGINE,
        ErrorCode.ERROR_CODE_UNKNOWN_REQUEST,
        ErrorCode.ERROR_CODE_GAP,
    }
)
"""The errors of a turn that another turn may get over."""
_NOT_CONTINUED = NOT_TAKEN | {ErrorCode.ERROR_CODE_INVALID_REQUEST}
"""The errors of a later turn that say why nobody goes on: the request ends with the error of the turn before."""
_SAME_WEIGHTS = ContinuationPolicy.CONTINUATION_POLICY_SAME_WEIGHTS
_MOST_LOSSES = 3
"""Losses in a row without a new token that end a request: it may kill its workers."""
_MOST_TOKENS = bounds_in(TokenPrompt.DESCRIPTOR.fields_by_name["token_ids"].GetOptions()).max_items
"""The most tokens of a prompt and a continuation together."""


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request that has not ended."""

    tokens: RequestTokens
    progress: Progress
    """Where its next position is, while it is open."""
    generate: Generate | None
    """The request as it was sent, until a processor is known to have taken it."""
    include_drafts: bool
    origin: Generate | None = None
    """The request as the application asked for it; None: it was taken up by `resume`, and cannot be continued."""
    stop_texts: tuple[str, ...] = ()
    scoring: ReceivedScores | None = None
    """What has come of its prompt's scores, if it asked for them."""
    deadline_unix_ms: int = 0
    """The moment at which it ends at the latest, in milliseconds since 1970-01-01 UTC; zero: none is known."""
    home: "ClientSession | None" = None
    """The processor that it was sent to; None: it waits for a place."""
    sent_to: str = ""
    """The id of the processor's life that may have received it; empty: none."""
    is_answered: bool = False
    """Whether that processor has answered the last Generate or Resume of it."""
    turn: int = 0
    """The number of its turn; the first is 0."""
    losses: int = 0
    """Losses in a row without a new token."""
    loss: RequestError | None = None
    """The error that ended the last turn."""
    is_aborted: bool = False
    is_submitted: bool = False
    """Whether only the output stream gives its rows: no iterator of its own."""
    refused_by: "set[ClientSession]" = field(default_factory=set)
    """The processors that did not take it."""
    refusal: RequestError | None = None
    """Why the last of them did not."""
    waits_since: float | None = None
    """When the client first looked at it while it waited for a place."""
    closed_at: int | None = None
    """Its next position when it was closed or ended here; None: it is open."""

    @property
    def turn_id(self) -> int:
        """The request id of its current turn."""
        return self.tokens.turn_id

    @property
    def next_position(self) -> int:
        """The position of the next token that is to come from a processor."""
        return self.progress.next_position(self.tokens.request_id) if self.closed_at is None else self.closed_at

    @property
    def was_never_sent(self) -> bool:
        """Whether it was sent to no processor, so that none can have it."""
        return self.generate is not None and not self.sent_to


class OpenRequests:
    """A client's open requests, at one processor or several.

    A request stays at the processor that it was sent to, through its restarts. With several, one that can be continued
    leaves a processor that has been away for `continue_after` seconds: it is sent to another one under a new id, with
    the tokens that it has. What an earlier turn of it still sends is dropped.
    """

    def __init__(  # noqa: PLR0913 - each but the first two is given by name
        self,
        max_rows: int,
        patience: float,
        *,
        continue_after: float = 2.0,
        has_several: bool = False,
        where: str = "",
        new_id: Callable[[], int] = lambda: secrets.randbits(64) or 1,
    ) -> None:
        """Let at most `max_rows` rows of a request wait, and a request at most `patience` seconds for a processor."""
        self.has_several = has_several
        self._new_id = new_id
        self._max_rows = max_rows
        self._patience = patience
        self._continue_after = continue_after
        self._looked_at: float | None = None
        self._unanswered = f"no processor answered for {round(patience * 1000)} ms{where}"
        self._on_output: Callable[[StepRows | RequestEnd], None] | None = None
        self.on_scored: Callable[[PromptScores], None] = lambda _: None
        """Hears the scores of each prompt, before the first row of its request is in the output stream."""
        self.on_turns: Callable[[int, Sequence[Turn]], None] = lambda _, __: None
        """Hears the turns of a request that goes on at another worker."""
        self.on_cached: Callable[[int, int | None], None] = lambda _, __: None
        """Hears how many tokens of a request's prompt were cached, as far as is known, before its first row comes."""
        self._ends: list[RequestEnd] = []
        """Ends that go into the output stream once the rows before them are there."""
        self._ignored_ids: dict[int, None] = {}
        """Requests that ended here and whose late rows need no abort any more, the oldest first."""
        self._ended_keys: dict[int, None] = {}
        """Turns of which nothing more is wanted, the oldest first: a processor that comes back hears of them."""
        self._closed: dict[int, OpenRequest] = {}
        """Requests whose consumer closed them, until the processor has ended them; their rows are dropped."""
        self._wake_ups = WakeUps()
        self._sent_anew: dict[int, int] = {}
        """The ids of the open requests that were sent anew, by the key that each has now."""
        self.sessions: list[ClientSession] = []
        self._progress = Progress()
        self._weights = WeightSpans()
        self.requests: dict[int, OpenRequest] = {}
        self.repeated = 0
        """How many rows and frames came again."""
        self.late = 0
        """How many rows came of turns and requests that are over here."""
        self.is_paused = False
        """Whether nothing is acked for now, because the output stream is full: backpressure for the processor."""

    def __len__(self) -> int:
        return len(self.requests)  # without those that their consumers closed

    @property
    def open_count(self) -> int:
        """How many requests a processor may still have open for this client."""
        return len(self.requests) + len(self._closed)

    def is_open(self, request_id: int) -> bool:
        """Tell whether a processor may still have a request open for this client."""
        return request_id in self.requests or request_id in self._closed

    def _known_by(self, key: int) -> OpenRequest | None:
        request = self.requests.get(self._sent_anew.get(key, key))
        return request if request is not None and request.turn_id == key else None

    def join(self, session: "ClientSession") -> int:
        """Add a session, and return a number that no other has."""
        self.sessions.append(session)
        return NO_SENDER + len(self.sessions)

    # Calls of the application.

    def open(self, generate: Generate, *, is_submitted: bool = False) -> RequestTokens:
        """Send a request; a ContractError says which bound it breaks.

        One that is submitted ends with the output stream, which must be open: else RuntimeError.
        """
        if is_submitted and self._on_output is None:
            raise RuntimeError("submit() needs steps() to be open: rows of the request would go nowhere")
        frame = ClientFrame(generate=generate)
        home, sent_to = self._best(None, generate.model), ""
        if home is None:
            write_frame(frame)
        elif home.say(frame):
            sent_to = home.processor_id
            home.used(generate.model)
        tokens = RequestTokens(generate.request_id, wake_ups=self._wake_ups)
        request = OpenRequest(
            tokens,
            self._progress,
            frame.generate,  # a copy: the application may change its message afterwards
            generate.include_draft_logprobs,
            frame.generate,
            tuple(generate.sampling.stop),
            ReceivedScores(generate) if generate.HasField("prompt_scoring") else None,
            generate.deadline_unix_ms,
            home,
            sent_to,
            is_submitted=is_submitted,
        )
        self._add(request, 0)
        return tokens

    def resume(
        self, request_id: int, position: int, *, include_drafts: bool, deadline_unix_ms: int = 0
    ) -> RequestTokens:
        """Ask for the rest of a request, from a position on."""
        tokens = RequestTokens(request_id, position, wake_ups=self._wake_ups)
        request = OpenRequest(tokens, self._progress, None, include_drafts, deadline_unix_ms=deadline_unix_ms)
        request.closed_at = position
        write_frame(ClientFrame(resume=_resume(request)))
        self._add(request, position)
        self._place(request)
        return tokens

    def _add(self, request: OpenRequest, position: int) -> None:
        self.requests[request.tokens.request_id] = request
        self._ended_keys.pop(request.tokens.request_id, None)
        self._progress.open(request.tokens.request_id, position, request.tokens.waiting)
        request.closed_at = None

    def abort(self, request_id: int) -> None:
        """End a request at its worker; tokens on their way still come, and then its last row.

        A request that is not open here may be another client's of the same owner.
        """
        request = self.requests.get(request_id)
        if request is None:
            for session in self.sessions:
                session.say(ClientFrame(abort=Abort(request_id=request_id)))
            return
        if request.is_aborted:
            return
        request.is_aborted = True
        if request.was_never_sent:
            self._end_aborted(request)
            self._flush_ends()
        else:
            self._say_abort(request)

    def discard(self, request_id: int) -> None:
        """End a request at its worker and here at once: rows of it that still come are dropped."""
        request = self.requests.get(request_id)
        if request is None:
            return
        self._remove(request)
        if request.home is not None and not request.was_never_sent:
            self._closed[request.turn_id] = request
            if not request.is_aborted:
                request.is_aborted = True
                self._say_abort(request)
        elif not request.was_never_sent:
            self._note_ended(request.turn_id)
        self._ended(request, RowStatus.ABORTED)
        self._flush_ends()

    def open_stream(self, take: Callable[[StepRows | RequestEnd], None]) -> None:
        """Give the rows and the ends of all requests to a function from now on; RuntimeError: another one has them."""
        if self._on_output is not None:
            raise RuntimeError("steps() is being iterated over already: close that iterator first")
        self._on_output = take

    def close_stream(self) -> None:
        """Give rows to their own requests again, and end the requests that were submitted for the stream."""
        self._on_output = None
        self.is_paused = False
        for request_id in [key for key, request in self.requests.items() if request.is_submitted]:
            self.discard(request_id)

    def _say_abort(self, request: OpenRequest) -> None:
        if request.home is not None:
            request.home.say(ClientFrame(abort=Abort(request_id=request.turn_id)))

    # Ends.

    def _remove(self, request: OpenRequest) -> None:
        request_id = request.tokens.request_id
        del self.requests[request_id]
        request.tokens.weight_spans = self._weights.of(request_id, request.next_position)
        self._weights.forget(request_id)
        request.closed_at = self._progress.close(request_id)
        self._sent_anew.pop(request.turn_id, None)

    def _ended(self, request: OpenRequest, status: RowStatus, stop: int | str | None = None) -> None:
        if status in _WHOLE and request.scoring is not None and request.tokens.prompt_scores is None:
            message = "its last row came before all scores of its prompt"
            error = request_error(request.tokens.request_id, ErrorCode.ERROR_CODE_GAP, message)
            self._failed(request, error, request.next_position)
            return
        request.tokens.finish(status, stop)
        if self._on_output is not None:
            tokens = request.tokens
            known = tokens.prompt_scores, tokens.weight_spans, tokens.cached_tokens
            self._ends.append(RequestEnd(tokens.request_id, status, None, stop, *known))

    def _broken(self, request: OpenRequest, error: RequestError) -> None:
        """End a turn with an error, and the request too if there is to be no other turn."""
        if self._continue(request, error):
            return
        if request.loss is not None and error.code in _NOT_CONTINUED:
            request.loss.message = brief(f"{request.loss.message}; not continued: {error.message}", error.code)
            error = request.loss
        self._remove(request)
        if error.code != ErrorCode.ERROR_CODE_TAKEN_UP and not request.was_never_sent:
            self._note_ended(request.turn_id)
        error.request_id = request.tokens.request_id
        generated, error.emitted_tokens = error.emitted_tokens, request.next_position
        self._failed(request, error, generated)

    def _failed(self, request: OpenRequest, error: RequestError, generated: int) -> None:
        request.tokens.fail(error, generated)
        if self._on_output is not None:
            failed = RequestFailedError(error, generated)
            spans = request.tokens.weight_spans
            self._ends.append(RequestEnd(request.tokens.request_id, None, failed, weight_spans=spans))

    def _flush_ends(self) -> None:
        ends, self._ends = self._ends, []
        if self._on_output is not None:
            for end in ends:
                self._on_output(end)

    def _end(self, request: OpenRequest, code: ErrorCode, message: str) -> None:
        if not request.is_aborted and not request.was_never_sent:
            self._say_abort(request)
        self._broken(request, request_error(request.tokens.request_id, code, message))

    def _end_aborted(self, request: OpenRequest) -> None:
        self._remove(request)
        self._ended(request, RowStatus.ABORTED)

    def end_all(self, code: ErrorCode, message: str, of: "ClientSession | None" = None) -> None:
        """End every request with an error, or those at one processor."""
        for request in list(self.requests.values()):
            if of is None or request.home is of:
                self._end(request, code, message)
        self._flush_ends()

    def give_up(self, message: str) -> None:
        """End every request with an error: the client leaves."""
        self.end_all(ErrorCode.ERROR_CODE_DEADLINE, message)
        self._closed.clear()
        for session in self.sessions:
            session.lost_since = None

    def end_overdue(self, unix_ms: int) -> None:
        """End each request whose deadline passed so long ago that the processor's own end for it is overdue."""
        grace = round(max(session.timeout for session in self.sessions) * 1000)
        for request in list(self.requests.values()):
            if request.deadline_unix_ms and (late := unix_ms - request.deadline_unix_ms) > grace:
                message = f"deadline_unix_ms: no end was heard by {late} ms after it"
                self._end(request, ErrorCode.ERROR_CODE_DEADLINE, message)
        self._flush_ends()

    # Rows, admissions and errors, as a processor sends them.

    def take_step(self, session: "ClientSession", target: LogprobBatch, draft: LogprobBatch | None) -> None:
        """Take the rows of a step."""
        if self._sent_anew:
            target, draft = self._under_ids(session, target, draft)
        header = target.header
        step = Step(header.worker_id, header.epoch, header.step, target, draft)
        slots, is_next = self._progress.advance(session.ordinal, target)
        self._weights.note(header.weight_version, target.request_ids[is_next], target.positions[is_next])
        had = is_next.astype(np.intp) - 1
        for place in np.flatnonzero(had).tolist():
            key, status = int(target.request_ids[place]), RowStatus(target.statuses[place])
            request = self.requests.get(key)
            if request is not None:
                had[place] = self._row(session, request, step, place, status)
            else:
                self._late_row(session, key, status)
        if self._on_output is None:
            self._put(step, slots[is_next], np.flatnonzero(is_next))
        else:
            self._give_columns(target, draft, had)
        self._flush_ends()

    def _under_ids(
        self, session: "ClientSession", target: LogprobBatch, draft: LogprobBatch | None
    ) -> tuple[LogprobBatch, LogprobBatch | None]:
        """Return a step with the ids of requests in the place of the keys that they were sent anew under.

        Rows that come under an earlier key of theirs are of an earlier try, and left out.
        """
        keys = target.request_ids
        is_late = np.isin(keys, np.fromiter(self._sent_anew.values(), np.uint64))
        if not (is_late.any() or np.isin(keys, np.fromiter(self._sent_anew, np.uint64)).any()):
            return target, draft
        for place in np.flatnonzero(is_late).tolist():
            self._late_row(session, int(keys[place]), RowStatus(target.statuses[place]))
        target = target.select(np.flatnonzero(~is_late))
        draft = None if draft is None else self._with_ids(draft.select(_places(draft, target)))
        return self._with_ids(target), draft

    def _with_ids(self, batch: LogprobBatch) -> LogprobBatch:
        ids = [self._sent_anew.get(key, key) for key in batch.request_ids.tolist()]
        return LogprobBatch.of_views(batch.header, {**batch.columns, "request_ids": np.array(ids, np.uint64)})

    def _put(self, step: Step, slots: Slots, places: Slots) -> None:
        waiting = list(map(self._progress.waiting.__getitem__, slots.tolist()))
        # The fastest loop that Python has: `append` of each buffer, and nothing is kept of its results.
        deque(map(deque.append, waiting, zip(repeat(step), places.tolist(), strict=False)), maxlen=0)
        self._wake_ups.look()
        if max(map(len, waiting), default=0) > self._max_rows:
            for key, rows in zip(step.rows.request_ids[places].tolist(), waiting, strict=True):
                if len(rows) > self._max_rows:
                    self._end_slow(self.requests[key])

    def _late_row(self, session: "ClientSession", request_id: int, status: RowStatus) -> None:
        self.late += 1
        if request_id in self._closed:  # its abort was sent
            if status in FINISHED:
                del self._closed[request_id]
        elif status not in FINISHED and request_id not in self._ignored_ids:
            # It ended here, as when a request was sent twice and the first answer was an error.
            self._ignore_rows_of(request_id)
            session.say(ClientFrame(abort=Abort(request_id=request_id)))

    def _ignore_rows_of(self, request_id: int) -> None:
        """Remember that rows of a request that ended here need no abort."""
        self._ignored_ids[request_id] = None
        if len(self._ignored_ids) > _MOST_IGNORED:
            del self._ignored_ids[next(iter(self._ignored_ids))]

    def _row(self, session: "ClientSession", request: OpenRequest, step: Step, place: int, status: RowStatus) -> int:
        position, tokens = int(step.rows.positions[place]), int(step.rows.token_counts[place])
        if request.home is not session:
            return -1
        expected = request.next_position
        is_known = position + tokens < expected or (tokens and position + tokens == expected)
        self._found(request, session)
        if position > expected:
            lost = f"tokens {expected} to {position - 1} never came from the processor"
            self._end(request, ErrorCode.ERROR_CODE_GAP, lost)
            return -1
        if position + tokens > MOST_POSITION:
            limit = f"at most {MOST_POSITION} tokens, got {position + tokens}"
            self._end(request, ErrorCode.ERROR_CODE_GAP, f"tokens came that cannot be counted: {limit}")
            return -1
        if is_known:
            self.repeated += 1
            return -1
        self._weights.note_row(step.rows.header.weight_version, request.tokens.request_id, expected)
        begin = int(step.rows.token_counts[:place].sum())
        token_ids = step.rows.token_ids[begin + expected - position : begin + tokens]
        self._progress.go_on(request.tokens.request_id, token_ids)
        # The output stream has the rows where there is one: its consumer would not take them from here.
        if self._on_output is None and request.tokens.put(step, place) > self._max_rows:
            self._end_slow(request)
        elif status is RowStatus.UNRECOVERABLE and self._continue(request, _unrecoverable(request)):
            pass
        elif status in FINISHED:
            self._remove(request)
            self._note_ended(request.turn_id)
            self._ended(request, status, stop_of(step.rows, place, request.stop_texts))
        return expected - position

    def _end_slow(self, request: OpenRequest) -> None:
        lost = f"its consumer left {self._max_rows} steps' tokens waiting, from token {request.tokens.position} on"
        self._end(request, ErrorCode.ERROR_CODE_SLOW_CLIENT, lost)

    def _give_columns(self, target: LogprobBatch, draft: LogprobBatch | None, had: npt.NDArray[np.intp]) -> None:
        """Put the new rows into the output stream, without those that were sent again after a connection broke."""
        if self._on_output is None or not (had >= 0).any():
            return
        if had.any():
            skipped = np.maximum(had, 0)
            new = np.flatnonzero(had >= 0)
            target = target.between(skipped, target.token_counts).select(new)
            draft = None if draft is None or skipped.any() else draft.select(_places(draft, target))
        self._on_output(StepRows(target, draft))

    def admitted(self, session: "ClientSession", admitted: Admitted) -> None:
        """Learn that a worker has a request."""
        request = self._known_by(admitted.request_id) or self._closed.get(admitted.request_id)
        if request is None:
            return
        if request.home is session:
            self._found(request, session)
            request.deadline_unix_ms = admitted.deadline_unix_ms or request.deadline_unix_ms
            request.tokens.admitted(admitted.worker_id, admitted.weight_version)
            # A turn behind accepted tokens counts them, too.
            counts_others = request.turn and request.tokens.turns[-1].begin
            if admitted.HasField("cached_tokens") and not counts_others:
                self._note_cached(request, admitted.cached_tokens)

    def scored(self, session: "ClientSession", chunk: PromptScoresChunk) -> None:
        """Take what the model says of some of a prompt's tokens; it is ignored for a resumed request."""
        request = self._known_by(chunk.request_id)
        if request is None or request.scoring is None or request.home is not session:
            return
        try:
            is_whole = request.scoring.take(chunk)
        except ContractError as error:
            self._end(request, ErrorCode.ERROR_CODE_GAP, f"scores of its prompt came that cannot be read: {error}")
            self._flush_ends()
            return
        if is_whole:
            request.tokens.prompt_scores = scores = request.scoring.scores(request.tokens.request_id)
            self.on_scored(scores)

    def _note_cached(self, request: OpenRequest, cached_tokens: int | None) -> None:
        request.tokens.cached_tokens = cached_tokens
        self.on_cached(request.tokens.request_id, cached_tokens)

    def _found(self, request: OpenRequest, session: "ClientSession") -> None:
        if request.is_answered:
            return
        request.generate, request.is_answered = None, True
        request.refusal, request.waits_since = None, None
        request.refused_by.clear()
        if request.closed_at is None:
            self._progress.set_sender(request.tokens.request_id, session.ordinal)

    def _forget_answer(self, request: OpenRequest) -> None:
        request.is_answered = False
        if not request.next_position:  # an Admitted with the final number may be lost
            self._note_cached(request, None)
        if request.closed_at is None:
            self._progress.set_sender(request.tokens.request_id, NO_SENDER)

    def failed(self, session: "ClientSession", error: RequestError) -> None:
        """Learn that a request ended with an error, or was not taken."""
        if error.code == ErrorCode.ERROR_CODE_TAKEN_UP:  # another connection has it: rows that still come need no abort
            self._ignore_rows_of(error.request_id)
        request = self._known_by(error.request_id)
        if request is None:
            self._closed.pop(error.request_id, None)
        elif request.home is not session:
            return  # it went on at another processor
        elif self._may_be_placed_elsewhere(request, error.code):
            self._not_taken(request, session, error)
        else:
            self._broken(request, error)
        self._flush_ends()

    def _may_be_placed_elsewhere(self, request: OpenRequest, code: ErrorCode) -> bool:
        if request.generate is not None:
            return code in NOT_TAKEN and (self.has_several or request.loss is not None)
        is_looked_for = request.origin is None and not request.is_answered
        return self.has_several and is_looked_for and code == ErrorCode.ERROR_CODE_UNKNOWN_REQUEST

    # Turns.

    def _continue(self, request: OpenRequest, loss: RequestError) -> bool:
        """Ask for another turn of a request that has lost its own; False: it ends."""
        if request.origin is None or not self._may_continue(request, request.origin, loss.code):
            return False
        request.loss = loss
        self._begin_turn(request, request.origin, loss.code)
        return True

    def _may_continue(self, request: OpenRequest, origin: Generate, code: ErrorCode) -> bool:
        """Tell whether a request may have another turn, and count the loss of this one."""
        is_unanswered = request.generate is not None
        if request.is_aborted:
            return is_unanswered and code in NOT_HERE  # it has ended then
        is_off = origin.continuation_policy == ContinuationPolicy.CONTINUATION_POLICY_OFF
        if code not in _CONTINUED or (is_off and not (is_unanswered and code in NOT_HERE)):
            return False
        if request.next_position > request.tokens.turns[-1].begin:
            request.losses = 0
        request.losses += code != ErrorCode.ERROR_CODE_UNKNOWN_REQUEST
        size = len(origin.tokens.token_ids) + request.next_position
        return request.losses < _MOST_LOSSES and size <= _MOST_TOKENS

    def _begin_turn(self, request: OpenRequest, origin: Generate, reason: ErrorCode) -> None:
        """Ask for the rest of a request under a new id, so that no worker can mix two turns; the one before ends.

        Processors hear that the turn before is over before they hear of the next one.
        """
        self._note_ended(request.turn_id)
        for session in self.sessions:
            session.say(ClientFrame(ended=Ended(request_ids=[request.turn_id])))
        if request.is_aborted:
            self._end_aborted(request)
            return
        request.turn += 1
        tokens, position = request.tokens, request.next_position
        generate = Generate()
        generate.CopyFrom(origin)
        generate.request_id, generate.first_request_id = self._new_id(), tokens.request_id
        if request.deadline_unix_ms:
            generate.deadline_unix_ms = request.deadline_unix_ms
            generate.ClearField("deadline_ms")
        generate.continuation.turn, generate.continuation.reason = request.turn, reason
        if position:
            generate.ClearField("prompt_scoring")
            accepted = self._progress.accepted(tokens.request_id)
            generate.continuation.token_ids.extend(accepted.tolist())
            spans = self._weights.of(tokens.request_id, position)
            generate.continuation.weight_version = spans[-1].weight_version if spans else 0
        elif request.scoring is not None:
            request.scoring, tokens.prompt_scores = ReceivedScores(generate), None
        self._sent_anew.pop(request.turn_id, None)
        tokens.begin_turn(Turn(position, generate.request_id, CODE_NAMES[reason]))
        self.on_turns(tokens.request_id, tokens.turns)
        self._sent_anew[request.turn_id] = tokens.request_id
        request.generate, request.home, request.sent_to = generate, None, ""
        request.refused_by.clear()
        request.refusal, request.waits_since = None, None
        self._forget_answer(request)
        self._place(request)

    # After each handshake: what the processor may have missed is asked for again.

    def welcomed(self, session: "ClientSession", *, resumed: bool) -> None:
        """Tell a processor that welcomed this client what is wanted of it: `resumed` if it knew this client."""
        if not self.is_paused and self._ended_keys:
            session.say(ClientFrame(ended=Ended(request_ids=self._ended_keys)))
        for request in chain(self.requests.values(), self._closed.values()):
            if request.home is not session:
                continue
            # An earlier life of the processor may have given it to a worker that comes back.
            if request.generate is not None and request.sent_to in ("", session.processor_id):
                self._send(request, session)
            elif not (resumed and request.is_answered):
                self._forget_answer(request)
                session.say(ClientFrame(resume=_resume(request)))
            if request.is_aborted:
                self._say_abort(request)
        self.has_room(session)

    def _note_ended(self, key: int) -> None:
        self._ended_keys[key] = None
        if len(self._ended_keys) > _MOST_ENDED:
            del self._ended_keys[next(iter(self._ended_keys))]

    # Where a request goes.

    def _best(self, request: OpenRequest | None, model: str) -> "ClientSession | None":
        if not self.has_several and (request is None or request.loss is None):
            return self.sessions[0]
        refused_by = set() if request is None else request.refused_by
        able = [each for each in self.sessions if each.is_here and each not in refused_by]
        return max(able, key=lambda session: session.room_for(model), default=None)

    def _place(self, request: OpenRequest) -> None:
        best = self._best(request, "" if request.origin is None else request.origin.model)
        if best is not None:
            self._send(request, best)
        elif request.refusal is not None and self._is_refused_by_all(request, request.refusal):
            self._broken(request, request.refusal)

    def _is_refused_by_all(self, request: OpenRequest, refusal: RequestError) -> bool:
        """Tell whether a request that no processor has taken is not offered again."""
        if request.loss is None:
            return not self._workers_may_come()
        is_same = request.origin is not None and request.origin.continuation_policy == _SAME_WEIGHTS
        return is_same and refusal.code == ErrorCode.ERROR_CODE_NO_WORKER

    def _send(self, request: OpenRequest, session: "ClientSession") -> None:
        request.home = session
        if request.generate is None:
            session.say(ClientFrame(resume=_resume(request)))
        elif session.say(ClientFrame(generate=request.generate)):
            request.sent_to = session.processor_id
            session.used(request.generate.model)

    def _not_taken(self, request: OpenRequest, session: "ClientSession", error: RequestError) -> None:
        request.refusal, request.home, request.sent_to = error, None, ""
        request.refused_by.add(session)
        # One whose workers are all busy says when another try makes sense; one that closes cannot.
        session.is_closing |= error.code == ErrorCode.ERROR_CODE_OVERLOADED and not error.retry_after_ms
        if request.is_aborted:
            self._end_aborted(request)
            return
        self._place(request)

    def _workers_may_come(self) -> bool:
        """Tell whether the workers of a processor that is away, or closes, may soon take what is refused now."""
        return any(each.is_closing or each.away <= self._patience for each in self.sessions)

    def has_room(self, session: "ClientSession") -> None:
        """Learn that a processor may take requests that it has refused."""
        for request in list(self.requests.values()):
            request.refused_by.discard(session)
            if request.home is None:
                self._place(request)

    def look(self, now: float) -> None:
        """Send the requests that wait for a place, or whose processor is away; to be called often."""
        interval = max(session.interval for session in self.sessions)
        stall, self._looked_at = max(0.0, now - (self._looked_at or now) - interval), now
        for session in self.sessions:
            session.is_silent = session.silence(now) - stall >= self._continue_after
        for session in self.sessions:
            if session.is_silent and any(each.is_here for each in self.sessions):
                self._leave(session)
            if session.lost_since is not None and now - session.lost_since >= self._patience:
                session.lost_since = None
                self._drop_closed(session)
                self.end_all(ErrorCode.ERROR_CODE_DEADLINE, self._unanswered, session)
        for request in [each for each in self.requests.values() if each.home is None]:
            request.waits_since = now if request.waits_since is None else request.waits_since
            if now - request.waits_since >= self._patience:
                error = request_error(request.tokens.request_id, ErrorCode.ERROR_CODE_DEADLINE, self._unanswered)
                self._broken(request, request.refusal or error)
                continue
            request.refused_by.clear()
            self._place(request)
        self._flush_ends()

    def _drop_closed(self, session: "ClientSession") -> None:
        for key in [key for key, request in self._closed.items() if request.home is session]:
            del self._closed[key]
            self._note_ended(key)

    def _leave(self, session: "ClientSession") -> None:
        """Continue the requests of a processor that is away elsewhere; the others wait for it."""
        self._drop_closed(session)
        for request in [each for each in self.requests.values() if each.home is session]:
            code, request_id = ErrorCode.ERROR_CODE_UNKNOWN_REQUEST, request.tokens.request_id
            if request.is_aborted and request.origin is not None:
                self._begin_turn(request, request.origin, code)
            else:
                self._continue(request, request_error(request_id, code, "its processor is away"))


def _unrecoverable(request: OpenRequest) -> RequestError:
    message = "the engine lost its state, and cannot compute it again"
    return request_error(request.tokens.request_id, ErrorCode.ERROR_CODE_ENGINE, message)


def _resume(request: OpenRequest) -> Resume:
    return Resume(
        request_id=request.turn_id,
        next_position=request.next_position,
        include_draft_logprobs=request.include_drafts,
        deadline_unix_ms=request.deadline_unix_ms,
    )


def _places(draft: LogprobBatch, target: LogprobBatch) -> npt.NDArray[np.intp]:
    return np.flatnonzero(np.isin(draft.request_ids, target.request_ids))
