"""OpenRequests: the open requests of a client; decides whether a request continues after it lost its worker."""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain, repeat

import numpy as np

from tokenbus.client.ids import random_id
from tokenbus.client.open_request import OpenRequest
from tokenbus.client.progress import MOST_POSITION, NO_SENDER, Progress
from tokenbus.client.received_scores import ReceivedScores
from tokenbus.client.session import ClientSession
from tokenbus.client.steps import RequestEnd, StepOutput, StepRows, drafts_of
from tokenbus.client.tokens import RequestTokens, Turn, stop_of
from tokenbus.client.waiter import WakeUps
from tokenbus.client.weight_spans import WeightSpans
from tokenbus.delivery import RequestFailedError, Step
from tokenbus.delivery.errors import NOT_TAKEN, brief
from tokenbus.delivery.slots import Slots
from tokenbus.delivery.step import FINISHED
from tokenbus_contracts import ContractError, LogprobBatch, PromptScores, RowStatus
from tokenbus_contracts.frames import write_frame
from tokenbus_contracts.generated.client_pb2 import ClientFrame, Ended
from tokenbus_contracts.generated.request_pb2 import (
    Abort,
    Admitted,
    ContinuationPolicy,
    ErrorCode,
    Generate,
    PromptScoresChunk,
    RequestError,
)
from tokenbus_contracts.schema import bounds_in

_MOST_ENDED = bounds_in(Ended.DESCRIPTOR.fields_by_name["request_ids"].GetOptions()).max_items
"""Number of requests that one frame may name."""
_COMPLETE = frozenset({RowStatus.FINISHED_STOP, RowStatus.FINISHED_LENGTH})
_NOT_CONTINUED = NOT_TAKEN | {ErrorCode.ERROR_CODE_INVALID_REQUEST}
"""Errors that show that no worker can continue a request, which then fails with the error of its previous turn."""
_SAME_WEIGHTS = ContinuationPolicy.CONTINUATION_POLICY_SAME_WEIGHTS
_MOST_IGNORED = 1024
_ENGINE, _UNRECOVERABLE = ErrorCode.ERROR_CODE_ENGINE, "the engine lost its state, and cannot compute it again"


class OpenRequests:
    """The open requests of a client at one or several processors.

    After a restart of its processor, a request stays at that processor. After `continue_after` seconds without its
    processor, the request moves to another processor, with a new id and the accepted tokens.
    """

    def __init__(  # noqa: PLR0913 - most arguments are passed by name
        self,
        max_rows: int,
        patience: float,
        *,
        continue_after: float = 2.0,
        has_several: bool = False,
        where: str = "",
        new_id: Callable[[], int] = random_id,
    ) -> None:
        """Limit each request to `max_rows` buffered rows, and to `patience` seconds of waiting for a processor."""
        self.has_several = has_several
        self._new_id = new_id
        self._max_rows = max_rows
        self._patience = patience
        self._continue_after = continue_after
        self._looked_at: float | None = None
        self._unanswered = f"no processor answered for {round(patience * 1000)} ms{where}"
        self.on_scored: Callable[[PromptScores], None] = lambda _: None
        """Callback that gets the scores of each prompt, before the output stream gets the request's first row."""
        self.on_turns: Callable[[int, Sequence[Turn]], None] = lambda _, __: None
        """Callback that gets a request's turns when the request continues at another worker."""
        self.on_cached: Callable[[int, int | None], None] = lambda _, __: None
        """Callback that gets a request's number of cached prompt tokens before its first row, or None if unknown."""
        self.sessions: list[ClientSession] = []
        self.requests: dict[int, OpenRequest] = {}
        self._closed: dict[int, OpenRequest] = {}
        """Requests that their consumers closed, by turn id, until the processor ends them; their rows are dropped."""
        self._ended_ids: dict[int, None] = {}
        """Ended turns, oldest first, which are reported to each processor that comes back."""
        self._ignored_ids: dict[int, None] = {}
        """Turns whose late rows are dropped without sending an abort, oldest first."""
        self._request_ids: dict[int, int] = {}
        """Request ids of continued requests, by the id of their current turn."""
        self._progress = Progress()
        self._weights = WeightSpans()
        self._output = StepOutput()
        self._wake_ups = WakeUps()
        self.repeated = 0
        """Number of repeated rows and frames."""
        self.late = 0
        """Number of rows that arrived after the end of their turn or request."""
        self.is_paused = False
        """Whether acks are withheld because the output stream is full, which slows the processor down."""

    def __len__(self) -> int:
        return len(self.requests)  # requests that their consumers closed do not count

    @property
    def open_count(self) -> int:
        """Number of the client's requests that may still be open at a processor."""
        return len(self.requests) + len(self._closed)

    def is_open(self, request_id: int) -> bool:
        return request_id in self.requests or request_id in self._closed

    def join(self, session: ClientSession) -> int:
        """Add a session, and return its number as a sender of rows."""
        self.sessions.append(session)
        return NO_SENDER + len(self.sessions)

    def open(self, generate: Generate, *, is_submitted: bool = False) -> RequestTokens:
        """Send a request; raises ContractError if the request is out of bounds.

        Closing the output stream ends a submitted request. Submitting without an open stream raises RuntimeError.
        """
        if is_submitted and not self._output.is_open:
            raise RuntimeError("submit() needs steps() to be open: rows of the request would go nowhere")
        origin = Generate()
        origin.CopyFrom(generate)  # the application may change its message after this call
        request = OpenRequest(
            RequestTokens(generate.request_id, wake_ups=self._wake_ups),
            self._progress,
            origin,
            generate.include_draft_logprobs,
            origin,
            scoring=ReceivedScores(generate) if generate.HasField("prompt_scoring") else None,
            deadline_unix_ms=generate.deadline_unix_ms,
            is_submitted=is_submitted,
        )
        return self._open(request, 0)

    def resume(
        self, request_id: int, position: int, *, include_drafts: bool, deadline_unix_ms: int = 0
    ) -> RequestTokens:
        tokens = RequestTokens(request_id, position, wake_ups=self._wake_ups)
        request = OpenRequest(
            tokens, self._progress, None, include_drafts, is_resumed=True, deadline_unix_ms=deadline_unix_ms
        )
        return self._open(request, position)

    def _open(self, request: OpenRequest, position: int) -> RequestTokens:
        request.closed_at = position
        self._place(request)
        if request.home is None:
            write_frame(request.frame())  # encoding checks the bounds, although nothing is sent
        self._add(request, position)
        return request.tokens

    def abort(self, request_id: int) -> None:
        """Abort a request at its worker; tokens in flight still arrive, followed by the last row.

        A request that is not open at this client may belong to another client with the same owner.
        """
        request = self.requests.get(request_id)
        if request is None:
            for session in self.sessions:
                session.say(ClientFrame(abort=Abort(request_id=request_id)))
        elif not request.is_aborted:
            request.is_aborted = True
            if request.was_never_sent:
                self._finish(request, RowStatus.ABORTED)
            else:
                self._say_abort(request)

    def discard(self, request_id: int) -> None:
        """Abort a request at its worker, and end it at this client at once, so that later rows are dropped."""
        request = self.requests.get(request_id)
        if request is None:
            return
        self._finish(request, RowStatus.ABORTED)
        if request.was_never_sent:
            return
        if request.home is None:
            self._note_ended(request.turn_id)
            return
        self._closed[request.turn_id] = request
        if not request.is_aborted:
            request.is_aborted = True
            self._say_abort(request)

    def open_stream(self, consume: Callable[[StepRows | RequestEnd], None]) -> None:
        """Pass the rows and ends of all requests to a function from now on.

        Raises RuntimeError if another function already receives them.
        """
        self._output.open(consume)

    def close_stream(self) -> None:
        """Buffer rows in their requests again, and end the requests that were submitted for the stream."""
        self._output.close()
        self.is_paused = False
        for request_id in [request_id for request_id, request in self.requests.items() if request.is_submitted]:
            self.discard(request_id)

    def receive_step(self, session: ClientSession, target: LogprobBatch, draft: LogprobBatch | None) -> None:
        target, draft, late = self._under_request_ids(target, draft)
        if late is not None:
            for turn_id, status in zip(late.request_ids.tolist(), late.statuses.tolist(), strict=True):
                self._receive_late_row(session, turn_id, RowStatus(status))
        header = target.header
        step = Step(header.worker_id, header.epoch, header.step, target, draft)
        slots, is_next = self._progress.advance(session.ordinal, target)
        self._weights.note(header.weight_version, target.request_ids[is_next], target.positions[is_next])
        skips = is_next.astype(np.intp) - 1
        output = self._output
        output.hold_ends()
        try:
            for index in np.flatnonzero(skips).tolist():
                request_id, status = int(target.request_ids[index]), RowStatus(target.statuses[index])
                request = self.requests.get(request_id)
                if request is not None:
                    skips[index] = self._receive_row(session, request, step, index, status)
                else:
                    self._receive_late_row(session, request_id, status)
            if output.is_open:
                output.put_rows(target, draft, skips)
            else:
                self._buffer(step, slots[is_next], np.flatnonzero(is_next))
        finally:
            output.release_ends()

    def _buffer(self, step: Step, slots: Slots, indexes: Slots) -> None:
        waiting = list(map(self._progress.waiting.__getitem__, slots.tolist()))
        # This is the fastest loop in Python: it calls `append` of each buffer without keeping the results.
        deque(map(deque.append, waiting, zip(repeat(step), indexes.tolist(), strict=False)), maxlen=0)
        self._wake_ups.look()
        if max(map(len, waiting), default=0) > self._max_rows:
            for request_id, rows in zip(step.rows.request_ids[indexes].tolist(), waiting, strict=True):
                if len(rows) > self._max_rows:
                    self._end_slow(self.requests[request_id])

    def _end_slow(self, request: OpenRequest) -> None:
        lost = f"its consumer left the tokens of {self._max_rows} steps unread, from token {request.tokens.position} on"
        self._abort_with(request, ErrorCode.ERROR_CODE_SLOW_CLIENT, lost)

    def _receive_row(
        self, session: ClientSession, request: OpenRequest, step: Step, index: int, status: RowStatus
    ) -> int:
        """Deliver a row that `Progress.advance` did not count; return its number of old tokens, or -1 if dropped."""
        position, tokens = int(step.rows.positions[index]), int(step.rows.token_counts[index])
        if request.home is not session:
            return -1
        expected = request.next_position
        is_repeated = position + tokens < expected or (tokens and position + tokens == expected)
        request.answered_by(session)
        if position > expected:
            lost = f"tokens {expected} to {position - 1} never came from the processor"
            self._abort_with(request, ErrorCode.ERROR_CODE_GAP, lost)
            return -1
        if position + tokens > MOST_POSITION:
            limit = f"at most {MOST_POSITION} tokens, got {position + tokens}"
            self._abort_with(request, ErrorCode.ERROR_CODE_GAP, f"the number of tokens exceeds the limit: {limit}")
            return -1
        if is_repeated:
            self.repeated += 1
            return -1
        self._weights.note_row(step.rows.header.weight_version, request.request_id, expected)
        begin = int(step.rows.token_counts[:index].sum())
        token_ids = step.rows.token_ids[begin + expected - position : begin + tokens]
        is_last = status in FINISHED and status is not RowStatus.UNRECOVERABLE
        self._progress.go_on(request.request_id, token_ids, is_last=is_last)
        # With an output stream, the row is not buffered, because nobody would read it from the request.
        if not self._output.is_open and request.tokens.put(step, index) > self._max_rows:
            self._end_slow(request)
        elif status is RowStatus.UNRECOVERABLE and self._continue(request, request.error(_ENGINE, _UNRECOVERABLE)):
            pass
        elif status in FINISHED:
            self._note_ended(request.turn_id)
            self._finish(request, status, stop_of(step.rows, index, request.origin.sampling.stop))
        return expected - position

    def _receive_late_row(self, session: ClientSession, turn_id: int, status: RowStatus) -> None:
        self.late += 1
        if turn_id in self._closed:  # an abort for this turn was sent already
            if status in FINISHED:
                del self._closed[turn_id]
        elif status not in FINISHED and turn_id not in self._ignored_ids:
            # The turn has ended, for example because the request was sent twice and the first answer was an error.
            self._ignore_rows_of(turn_id)
            session.say(ClientFrame(abort=Abort(request_id=turn_id)))

    def _ignore_rows_of(self, turn_id: int) -> None:
        self._ignored_ids[turn_id] = None
        if len(self._ignored_ids) > _MOST_IGNORED:
            del self._ignored_ids[next(iter(self._ignored_ids))]

    def admitted(self, session: ClientSession, admitted: Admitted) -> None:
        request = self._of_turn(admitted.request_id) or self._closed.get(admitted.request_id)
        if request is None or request.home is not session:
            return
        request.answered_by(session)
        request.deadline_unix_ms = admitted.deadline_unix_ms or request.deadline_unix_ms
        request.tokens.admitted(admitted.worker_id, admitted.weight_version)
        # The worker of a later turn counts accepted tokens as prompt tokens, so its number of cached tokens is ignored.
        has_accepted = request.turn and request.tokens.turns[-1].begin
        if admitted.HasField("cached_tokens") and not has_accepted:
            self._note_cached(request, admitted.cached_tokens)

    def scored(self, session: ClientSession, chunk: PromptScoresChunk) -> None:
        """Add a chunk of prompt scores; chunks of a resumed request are ignored."""
        request = self._of_turn(chunk.request_id)
        if request is None or request.scoring is None or request.home is not session:
            return
        try:
            is_whole = request.scoring.add(chunk)
        except ContractError as error:
            message = f"scores of its prompt cannot be read: {error}"
            self._abort_with(request, ErrorCode.ERROR_CODE_GAP, message)
            return
        if is_whole:
            request.tokens.prompt_scores = scores = request.scoring.scores(request.request_id)
            self.on_scored(scores)

    def failed(self, session: ClientSession, error: RequestError) -> None:
        """Handle an error or refusal of a request: end the request, continue it, or send it to another processor."""
        if error.code == ErrorCode.ERROR_CODE_TAKEN_UP:  # another connection reads the request, so it is not aborted
            self._ignore_rows_of(error.request_id)
        request = self._of_turn(error.request_id)
        if request is None:
            self._closed.pop(error.request_id, None)
        elif request.home is not session:
            return  # the request has moved to another processor
        elif request.may_go_elsewhere(error.code, has_several=self.has_several):
            self._refused(request, session, error)
        else:
            self._end_turn(request, error)

    def _under_request_ids(
        self, target: LogprobBatch, draft: LogprobBatch | None
    ) -> tuple[LogprobBatch, LogprobBatch | None, LogprobBatch | None]:
        """Return a step's rows and drafts with request ids for turn ids, and the late rows of lost first turns."""
        if not self._request_ids:
            return target, draft, None
        ids = target.request_ids
        is_late = np.isin(ids, np.fromiter(self._request_ids.values(), np.uint64))
        if not (is_late.any() or np.isin(ids, np.fromiter(self._request_ids, np.uint64)).any()):
            return target, draft, None
        late, target = target.select(np.flatnonzero(is_late)), target.select(np.flatnonzero(~is_late))
        draft = None if draft is None else self._renamed(drafts_of(target, draft))
        return self._renamed(target), draft, late

    def _renamed(self, batch: LogprobBatch) -> LogprobBatch:
        ids = [self._request_ids.get(turn_id, turn_id) for turn_id in batch.request_ids.tolist()]
        return LogprobBatch.of_views(batch.header, {**batch.columns, "request_ids": np.array(ids, np.uint64)})

    def _of_turn(self, turn_id: int) -> OpenRequest | None:
        request = self.requests.get(self._request_ids.get(turn_id, turn_id))
        return request if request is not None and request.turn_id == turn_id else None

    def _at(self, session: ClientSession) -> list[OpenRequest]:
        return [request for request in self.requests.values() if request.home is session]

    def _add(self, request: OpenRequest, position: int) -> None:
        self.requests[request.request_id] = request
        self._ended_ids.pop(request.request_id, None)
        self._progress.open(request.request_id, position, request.tokens.waiting)
        request.closed_at = None

    def _remove(self, request: OpenRequest) -> None:
        """Remove an ended request; `_finish` and `_fail` record how it ended."""
        request_id = request.request_id
        del self.requests[request_id]
        request.tokens.weight_spans = self._weights.of(request_id, request.next_position)
        self._weights.forget(request_id)
        request.closed_at = self._progress.close(request_id)
        self._request_ids.pop(request.turn_id, None)

    def _finish(self, request: OpenRequest, status: RowStatus, stop: int | str | None = None) -> None:
        self._remove(request)
        tokens = request.tokens
        if status in _COMPLETE and request.scoring is not None and tokens.prompt_scores is None:
            message = "its last row arrived before all scores of its prompt"
            self._fail(request, request.error(ErrorCode.ERROR_CODE_GAP, message), request.next_position)
            return
        tokens.finish(status, stop)
        known = tokens.prompt_scores, tokens.weight_spans, tokens.cached_tokens
        self._output.put_end(RequestEnd(tokens.request_id, status, None, stop, *known))

    def _fail(self, request: OpenRequest, error: RequestError, generated: int) -> None:
        request.tokens.fail(error, generated)
        failed = RequestFailedError(error, generated)
        self._output.put_end(RequestEnd(request.request_id, None, failed, weight_spans=request.tokens.weight_spans))

    def _note_ended(self, turn_id: int) -> None:
        self._ended_ids[turn_id] = None
        if len(self._ended_ids) > _MOST_ENDED:
            del self._ended_ids[next(iter(self._ended_ids))]

    def _drop_closed(self, session: ClientSession) -> None:
        """Stop waiting for a processor to end the requests that consumers have closed."""
        for turn_id in [turn_id for turn_id, request in self._closed.items() if request.home is session]:
            del self._closed[turn_id]
            self._note_ended(turn_id)

    # An error ends a turn, and also the request if no other turn follows.

    def _end_turn(self, request: OpenRequest, error: RequestError) -> None:
        if self._continue(request, error):
            return
        if request.loss is not None and error.code in _NOT_CONTINUED:
            request.loss.message = brief(f"{request.loss.message}; not continued: {error.message}", error.code)
            error = request.loss
        self._remove(request)
        if error.code != ErrorCode.ERROR_CODE_TAKEN_UP and not request.was_never_sent:
            self._note_ended(request.turn_id)
        error.request_id = request.request_id
        generated, error.emitted_tokens = error.emitted_tokens, request.next_position
        self._fail(request, error, generated)

    def _abort_with(self, request: OpenRequest, code: ErrorCode, message: str) -> None:
        if not request.is_aborted and not request.was_never_sent:
            self._say_abort(request)
        self._end_turn(request, request.error(code, message))

    def end_all(self, code: ErrorCode, message: str, at: ClientSession | None = None) -> None:
        for request in list(self.requests.values()) if at is None else self._at(at):
            self._abort_with(request, code, message)

    def give_up(self, message: str) -> None:
        """Fail every request, because the client leaves."""
        self.end_all(ErrorCode.ERROR_CODE_DEADLINE, message)
        self._closed.clear()
        for session in self.sessions:
            session.lost_since = None

    def end_overdue(self, unix_ms: int) -> None:
        """Fail each request whose deadline has passed, if the processor has not ended the request."""
        grace = round(max(session.timeout for session in self.sessions) * 1000)
        for request in list(self.requests.values()):
            if request.deadline_unix_ms and (late := unix_ms - request.deadline_unix_ms) > grace:
                message = f"deadline_unix_ms: no end arrived within {late} ms after it"
                self._abort_with(request, ErrorCode.ERROR_CODE_DEADLINE, message)

    def _continue(self, request: OpenRequest, loss: RequestError) -> bool:
        """Begin another turn for a request that has lost its current turn, or return False if the request must end."""
        if not request.may_continue(loss.code):
            return False
        request.loss = loss
        self._begin_turn(request, loss.code)
        return True

    def _begin_turn(self, request: OpenRequest, reason: ErrorCode) -> None:
        """Ask for the rest of a request under a new id, so that no worker can confuse two turns.

        All processors are told first that the previous turn has ended.
        """
        self._note_ended(request.turn_id)
        for session in self.sessions:
            session.say(ClientFrame(ended=Ended(request_ids=[request.turn_id])))
        if request.is_aborted:
            self._finish(request, RowStatus.ABORTED)
            return
        self._request_ids.pop(request.turn_id, None)
        spans = self._weights.of(request.request_id, request.next_position)
        accepted = self._progress.accepted(request.request_id).tolist()
        request.begin_turn(self._new_id(), reason, accepted, spans[-1].weight_version if spans else 0)
        self._request_ids[request.turn_id] = request.request_id
        self.on_turns(request.request_id, request.tokens.turns)
        self._forget_answer(request)
        self._place(request)

    def _forget_answer(self, request: OpenRequest) -> None:
        request.forget_answer()
        if not request.next_position:  # the Admitted frame with the final number of cached tokens may be lost
            self._note_cached(request, None)

    def _note_cached(self, request: OpenRequest, cached_tokens: int | None) -> None:
        request.tokens.cached_tokens = cached_tokens
        self.on_cached(request.request_id, cached_tokens)

    def _say_abort(self, request: OpenRequest) -> None:
        if request.home is not None:
            request.home.say(ClientFrame(abort=Abort(request_id=request.turn_id)))

    def welcomed(self, session: ClientSession, *, resumed: bool) -> None:
        """Send or resume requests after a processor's welcome; `resumed` means that the processor knew this client."""
        if not self.is_paused and self._ended_ids:
            session.say(ClientFrame(ended=Ended(request_ids=self._ended_ids)))
        for request in chain(self.requests.values(), self._closed.values()):
            if request.home is not session:
                continue
            # If another incarnation of the processor got the request, a worker may still run it, so it is resumed.
            if request.generate is not None and request.sent_to in ("", session.processor_id):
                self._send(request, session)
            elif not (resumed and request.is_answered):
                self._forget_answer(request)
                session.say(request.resume_frame())
            if request.is_aborted:
                self._say_abort(request)
        self.has_room(session)

    def _best(self, request: OpenRequest) -> ClientSession | None:
        if not self.has_several and request.loss is None:
            return self.sessions[0]
        able = [each for each in self.sessions if each.is_here and each not in request.refused_by]
        return max(able, key=lambda session: session.room_for(request.origin.model), default=None)

    def _place(self, request: OpenRequest) -> None:
        """Send a request to the processor with the most free capacity, or end it if every processor refuses it."""
        best = self._best(request)
        if best is not None:
            self._send(request, best)
        elif request.refusal is not None and self._is_refused_by_all(request, request.refusal):
            self._end_turn(request, request.refusal)

    def _is_refused_by_all(self, request: OpenRequest, refusal: RequestError) -> bool:
        if request.loss is not None:
            is_same = request.origin.continuation_policy == _SAME_WEIGHTS
            return is_same and refusal.code == ErrorCode.ERROR_CODE_NO_WORKER
        # If a processor is away or closing, its workers may soon connect to another processor.
        return not any(each.is_closing or each.away <= self._patience for each in self.sessions)

    def _send(self, request: OpenRequest, session: ClientSession) -> None:
        request.home = session
        if session.say(request.frame()) and request.generate is not None:
            request.sent_to = session.processor_id
            session.used(request.generate.model)

    def _refused(self, request: OpenRequest, session: ClientSession, error: RequestError) -> None:
        request.refusal, request.home, request.sent_to = error, None, ""
        request.refused_by.add(session)
        # A busy processor says when to try again, but a closing processor cannot.
        session.is_closing |= error.code == ErrorCode.ERROR_CODE_OVERLOADED and not error.retry_after_ms
        if request.is_aborted:
            self._finish(request, RowStatus.ABORTED)
        else:
            self._place(request)

    def has_room(self, session: ClientSession) -> None:
        """Offer a processor the waiting requests, including the requests that this processor has refused."""
        for request in list(self.requests.values()):
            request.refused_by.discard(session)
            if request.home is None:
                self._place(request)

    def look(self, now: float) -> None:
        """Send requests that wait for a processor or whose processor is away; callers must call this often."""
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
                overdue = request.error(ErrorCode.ERROR_CODE_DEADLINE, self._unanswered)
                self._end_turn(request, request.refusal or overdue)
            else:
                request.refused_by.clear()
                self._place(request)

    def _leave(self, session: ClientSession) -> None:
        """Continue requests of an absent processor elsewhere; only resumed requests wait for that processor."""
        self._drop_closed(session)
        code = ErrorCode.ERROR_CODE_UNKNOWN_REQUEST
        for request in self._at(session):
            if request.is_aborted and not request.is_resumed:
                self._begin_turn(request, code)
            else:
                self._continue(request, request.error(code, "its processor is away"))
