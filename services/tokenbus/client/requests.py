"""OpenRequests: the calls of an application, and the frames of processors, that change a client's requests."""

from collections import deque
from collections.abc import Callable
from itertools import repeat

import numpy as np

from tokenbus.client.open_request import OpenRequest
from tokenbus.client.progress import MOST_POSITION
from tokenbus.client.received_scores import ReceivedScores
from tokenbus.client.request_table import RequestTable
from tokenbus.client.session import ClientSession
from tokenbus.client.steps import RequestEnd, StepRows, drafts_of
from tokenbus.client.tokens import RequestTokens, stop_of
from tokenbus.delivery import Step
from tokenbus.delivery.slots import Slots
from tokenbus.delivery.step import FINISHED
from tokenbus_contracts import ContractError, LogprobBatch, RowStatus
from tokenbus_contracts.frames import write_frame
from tokenbus_contracts.generated.client_pb2 import ClientFrame
from tokenbus_contracts.generated.request_pb2 import (
    Abort,
    Admitted,
    ErrorCode,
    Generate,
    PromptScoresChunk,
    RequestError,
)

_MOST_IGNORED = 1024
_ENGINE, _UNRECOVERABLE = ErrorCode.ERROR_CODE_ENGINE, "the engine lost its state, and cannot compute it again"


class OpenRequests(RequestTable):
    """The table of a client's requests, with the application's calls and the processors' frames that change it."""

    def open(self, generate: Generate, *, is_submitted: bool = False) -> RequestTokens:
        """Send a request; a ContractError says which bound it breaks.

        A submitted request ends with the output stream, which must be open: else RuntimeError.
        """
        if is_submitted and not self._output.is_open:
            raise RuntimeError("submit() needs steps() to be open: rows of the request would go nowhere")
        origin = Generate()
        origin.CopyFrom(generate)  # the application may change its message afterwards
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
            write_frame(request.frame())  # checks the bounds, as sending it would
        self._add(request, position)
        return request.tokens

    def abort(self, request_id: int) -> None:
        """End a request at its worker; tokens that are on their way still arrive, and then its last row.

        A request that is not open here may belong to another client of the same owner.
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
        """End a request at its worker and here at once: its later rows are dropped."""
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
        """Pass the rows and the ends of all requests to a function from now on.

        RuntimeError: another function gets them.
        """
        self._output.open(consume)

    def close_stream(self) -> None:
        """Give rows to their requests again, and end the requests that were submitted for the stream."""
        self._output.close()
        self.is_paused = False
        for request_id in [request_id for request_id, request in self.requests.items() if request.is_submitted]:
            self.discard(request_id)

    # Frames of a processor.

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
        # The fastest loop in Python: `append` of each buffer, without keeping the results.
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
        """Deliver a row that `Progress.advance` did not; return how many of its tokens are not new, or -1: all."""
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
        # An output stream gets the row itself, because nobody would take it from the request's buffer.
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
        if turn_id in self._closed:  # its abort was sent
            if status in FINISHED:
                del self._closed[turn_id]
        elif status not in FINISHED and turn_id not in self._ignored_ids:
            # It has ended here, for example because a request was sent twice and the first answer was an error.
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
        # The worker of a later turn counts accepted tokens as prompt.
        has_accepted = request.turn and request.tokens.turns[-1].begin
        if admitted.HasField("cached_tokens") and not has_accepted:
            self._note_cached(request, admitted.cached_tokens)

    def scored(self, session: ClientSession, chunk: PromptScoresChunk) -> None:
        """Add a chunk of a prompt's scores; a resumed request ignores it."""
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
        """Handle a request that ended with an error or was refused: end it, continue it, or send it elsewhere."""
        if error.code == ErrorCode.ERROR_CODE_TAKEN_UP:  # another connection has it, so its late rows need no abort
            self._ignore_rows_of(error.request_id)
        request = self._of_turn(error.request_id)
        if request is None:
            self._closed.pop(error.request_id, None)
        elif request.home is not session:
            return  # it continued at another processor
        elif request.may_go_elsewhere(error.code, has_several=self.has_several):
            self._refused(request, session, error)
        else:
            self._end_turn(request, error)

    def _under_request_ids(
        self, target: LogprobBatch, draft: LogprobBatch | None
    ) -> tuple[LogprobBatch, LogprobBatch | None, LogprobBatch | None]:
        """Return a step with request ids in the place of turn ids, and the rows of first turns that are over."""
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
