"""A client's side of the client protocol, without sockets and without a clock of its own."""

import asyncio
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tokenbus_contracts import ContractError, Limits, LogprobBatch, RowStatus, Rule, decode
from tokenbus_contracts.frames import read_frame, write_frame
from tokenbus_contracts.generated.client_pb2 import (
    ClientFrame,
    ClientHello,
    ClientWelcome,
    Confirm,
    ProcessorStatus,
    Resume,
    ServerFrame,
    StatusRequest,
    Watch,
)
from tokenbus_contracts.generated.request_pb2 import Abort, ErrorCode, Generate, RequestError
from tokenbus_contracts.generated.stream_pb2 import Goodbye, GoodbyeReason
from tokenbus_services.delivery import PendingAck, RequestTokens, Step
from tokenbus_services.delivery.step import FINISHED
from tokenbus_services.link import PROOF_BYTES, ReconnectingSession, SessionState, check_times

_MOST_STRAYS = 1024
_MOST_POSITION = 2**31 - 1
"""Of a Resume; a row's last token may lie beyond it."""


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request that has not ended."""

    tokens: RequestTokens
    next_position: int
    generate: Generate | None
    """What was asked for, until it is known to have been taken."""
    include_drafts: bool
    deadline_unix_ms: int = 0
    """The moment at which it ends at the latest, in milliseconds since 1970-01-01 UTC; zero: none is known."""
    asked_of: str = ""
    """Which life of a processor may have been asked for it; empty: none."""
    is_answered: bool = False
    """Whether the processor is known to have heard what was said of it last."""
    is_aborted: bool = False


class ClientSession(ReconnectingSession):
    """One life of a client, with whichever processor that is just now."""

    def __init__(self, hello: ClientHello, limits: Limits, max_rows: int, *, interval: float, timeout: float) -> None:
        """Take what the client says of itself, what it takes, and how often peers are to be heard, in seconds."""
        super().__init__(interval, timeout)
        self._introduction = ClientHello()
        self._introduction.CopyFrom(hello)
        self._introduction.proof = secrets.token_bytes(PROOF_BYTES)
        self._limits = limits
        self._max_rows = max_rows
        self._outgoing: deque[bytes] = deque()
        self._number = 0
        self._confirmed = 0
        self._watched_worker: str | None = None
        self._status: asyncio.Future[ProcessorStatus] | None = None
        self._strays: dict[int, None] = {}
        """Keys whose rows need no abort any more, the oldest first."""
        self.requests: dict[int, OpenRequest] = {}
        self.repeated = 0
        self.is_paused = False
        """Whether nothing is confirmed for now, because what came was not taken."""
        self.lost_since: float | None = None
        """Since when there has been no processor, while there are open requests."""
        self.on_watched: Callable[[ServerFrame, bytes], None] = _ignore
        self.on_outputs: Callable[[LogprobBatch, LogprobBatch | None], None] | None = None
        """Who takes whole outputs, if anybody does; the rows are nobody else's then."""

    @property
    def outstanding(self) -> int:
        """How many requests have not ended."""
        return len(self.requests)

    # What the application wants.

    def open(self, generate: Generate) -> RequestTokens:
        """Ask for a request."""
        frame = ClientFrame(generate=generate)
        asked_of = self.processor_id if self._say(frame) else ""
        tokens = RequestTokens(generate.request_key)
        drafts = generate.include_draft_logprobs
        # The frame's own copy: the application may do with its message what it likes.
        deadline = generate.deadline_unix_ms
        self.requests[tokens.key] = OpenRequest(tokens, 0, frame.generate, drafts, deadline, asked_of)
        return tokens

    def resume(self, key: int, position: int, *, include_drafts: bool, deadline_unix_ms: int = 0) -> RequestTokens:
        """Ask for the rest of a request."""
        tokens = RequestTokens(key, position)
        request = OpenRequest(tokens, position, None, include_drafts, deadline_unix_ms)
        self._say(ClientFrame(resume=_resume(key, request)))
        self.requests[key] = request
        return tokens

    def abort(self, key: int) -> None:
        """Ask for a request's end."""
        request = self.requests.get(key)
        if request is not None and not request.is_aborted:
            request.is_aborted = True
            if request.generate is not None and not request.asked_of:
                self._never_began(request)
                return
            self._say(ClientFrame(abort=Abort(request_key=key)))

    def watch(self, worker_id: str) -> None:
        """Ask to be shown a worker's streams, or every worker's."""
        self._say(ClientFrame(watch=Watch(worker_id=worker_id)))
        self._watched_worker = worker_id

    def ask_status(self) -> asyncio.Future[ProcessorStatus]:
        """Ask for the processor's status; all that ask before it comes share one future."""
        self._say(ClientFrame(status=StatusRequest()))
        if self._status is None:
            self._status = asyncio.get_running_loop().create_future()
        return self._status

    def _say(self, frame: ClientFrame) -> bool:
        """Queue a frame, and tell whether it will go out; a ContractError says which bound it breaks.

        While there is no connection, the next welcome says what is still wanted.
        """
        data = write_frame(frame)
        if self.state is SessionState.OPEN:
            self._outgoing.append(data)
            return True
        return False

    # What comes in.

    def receive(self, parts: list[bytes], now: float) -> None:
        """Take one transport message; a ContractError says what is wrong with it.

        It changes nothing, unless tokens are in what cannot be read: then every request that may miss them ends.
        """
        frame = read_frame(ServerFrame, parts[0]) if parts else None
        if frame is None:
            raise ContractError("message", "a frame, and its batches", 0, rule=Rule.LENGTH)
        body = frame.WhichOneof("body")
        if body is None or self.state is SessionState.LEFT:
            return
        if body == "welcome":
            self._welcome(frame.welcome)
        elif body == "refusal":
            self._refused(frame.refusal, now)
        elif self.state is SessionState.OPEN and (not frame.number or self._is_next(frame.number, now)):
            self._open_frame(frame, body, parts[1:], now)
        self._last_heard = now

    def _is_next(self, number: int, now: float) -> bool:
        if number == self._number + 1:
            self._number = number
            return True
        if number > self._number:  # one was lost on the way: say hello, and all that is not confirmed comes again
            self._greet_again(now)
        else:
            self.repeated += 1
        return False

    def _open_frame(self, frame: ServerFrame, body: str, parts: list[bytes], now: float) -> None:
        match body:
            case "outputs":
                self._outputs(parts, has_draft=frame.outputs.has_draft)
            case "admitted":
                if (request := self.requests.get(frame.admitted.request_key)) is not None:
                    request.generate, request.is_answered = None, True
                    request.deadline_unix_ms = frame.admitted.deadline_unix_ms or request.deadline_unix_ms
            case "error":
                self._failed(frame.error)
            case "heartbeat":
                self._echo_ns = frame.heartbeat.sent_at_ns
            case "status":
                status, self._status = self._status, None
                if status is not None:
                    status.set_result(frame.status)
            case "watched_item" | "watched_stream":
                self.on_watched(frame, parts[0] if parts else b"")
            case "goodbye":
                self._greet_again(now + self._interval)

    def _outputs(self, parts: list[bytes], *, has_draft: bool) -> None:
        try:
            target, draft = _read(parts, self._limits, has_draft=has_draft)
        except ContractError as error:
            # The same bytes would come again, and nobody knows whose tokens they hold.
            self._end_all(ErrorCode.ERROR_CODE_GAP, f"tokens came that cannot be read: {error}")
            raise
        header = target.header
        step = Step(header.worker_id, header.epoch, header.step, target, draft, PendingAck())
        rows = zip(
            target.request_keys.tolist(),
            target.positions.tolist(),
            target.token_counts.tolist(),
            target.statuses.tolist(),
            strict=True,
        )
        had = [-1] * target.row_count
        gives_columns = self.on_outputs is not None
        for place, (key, position, tokens, status) in enumerate(rows):
            request = self.requests.get(key)
            if request is not None:
                is_next = tokens and position == request.next_position and position + tokens <= _MOST_POSITION
                if gives_columns and status == RowStatus.ACTIVE and is_next:
                    # Nearly every row is one of these: for them the call below would cost more than what it does.
                    request.generate, request.is_answered = None, True
                    request.next_position = position + tokens
                    had[place] = 0
                else:
                    had[place] = self._row(request, step, place, position, tokens, RowStatus(status))
            elif status not in FINISHED and key not in self._strays:
                # It ended here, as when a request was asked for twice and the first answer was an error.
                self._ignore_rows_of(key)
                self._say(ClientFrame(abort=Abort(request_key=key)))
        if self.on_outputs is not None:
            self._give_columns(target, draft, np.array(had, np.intp))

    def _ignore_rows_of(self, key: int) -> None:
        """Remember that rows of a request that ended here need no abort."""
        self._strays[key] = None
        if len(self._strays) > _MOST_STRAYS:
            del self._strays[next(iter(self._strays))]

    def _row(  # noqa: PLR0913, PLR0917 - a row's own values, read once for the whole batch
        self, request: OpenRequest, step: Step, place: int, position: int, tokens: int, status: RowStatus
    ) -> int:
        """Add a row to its request; return how many of its tokens that had before, or -1 if the row is not for it."""
        request.generate, request.is_answered = None, True
        expected = request.next_position
        if position > expected:
            lost = f"tokens {expected} to {position - 1} never came from the processor"
            self._end(request, ErrorCode.ERROR_CODE_GAP, lost)
            return -1
        if position + tokens > _MOST_POSITION:
            limit = f"at most {_MOST_POSITION} tokens, got {position + tokens}"
            self._end(request, ErrorCode.ERROR_CODE_GAP, f"tokens came that cannot be counted: {limit}")
            return -1
        if position + tokens < expected or (tokens and position + tokens == expected):
            self.repeated += 1
            return -1
        request.next_position = position + tokens
        # Who takes whole outputs has the rows from there; nobody would take them here.
        if self.on_outputs is None and request.tokens.put(step, place) > self._max_rows:
            lost = f"its consumer left {self._max_rows} steps' tokens waiting, from token {request.tokens.position} on"
            self._end(request, ErrorCode.ERROR_CODE_SLOW_CLIENT, lost)
        elif status in FINISHED:
            del self.requests[request.tokens.key]
            request.tokens.finish(status)
        return expected - position

    def _give_columns(self, target: LogprobBatch, draft: LogprobBatch | None, had: npt.NDArray[np.intp]) -> None:
        """Hand out the rows that are new: what was sent again, after a connection broke, was taken before."""
        if self.on_outputs is None or not (had >= 0).any():
            return
        if had.any():
            skipped = np.maximum(had, 0)
            new = np.flatnonzero(had >= 0)
            target = target.between(skipped, target.token_counts).select(new)
            draft = None if draft is None or skipped.any() else draft.select(_places(draft, target))
        self.on_outputs(target, draft)

    def _failed(self, error: RequestError) -> None:
        request = self.requests.get(error.request_key)
        if request is None:
            return
        if error.code == ErrorCode.ERROR_CODE_UNKNOWN_REQUEST and request.generate is not None:
            if request.is_aborted:
                self._never_began(request)
                return
            request.asked_of = self.processor_id
            self._say(ClientFrame(generate=request.generate))
            return
        del self.requests[error.request_key]
        if error.code == ErrorCode.ERROR_CODE_TAKEN_UP:  # its tokens go to another connection: rows left are no strays
            self._ignore_rows_of(error.request_key)
        generated = error.emitted_tokens
        error.emitted_tokens = request.next_position
        request.tokens.fail(error, generated)

    def _end(self, request: OpenRequest, code: ErrorCode, message: str) -> None:
        """End a request from this side."""
        self.abort(request.tokens.key)
        self.requests.pop(request.tokens.key, None)
        request.tokens.fail(
            RequestError(
                request_key=request.tokens.key, code=code, message=message, emitted_tokens=request.next_position
            )
        )

    def _never_began(self, request: OpenRequest) -> None:
        """End a request that was aborted before anybody had it, as any other that is aborted."""
        del self.requests[request.tokens.key]
        request.tokens.finish(RowStatus.ABORTED)

    def give_up(self, message: str) -> None:
        """End every request: there has been no processor for too long."""
        self._end_all(ErrorCode.ERROR_CODE_DEADLINE, message)
        self.lost_since = None

    def end_overdue(self, unix_ms: int) -> None:
        """End each request whose deadline has passed, and whose end the processor had time to tell, but did not."""
        grace = round(self._timeout * 1000)
        for request in list(self.requests.values()):
            if request.deadline_unix_ms and (late := unix_ms - request.deadline_unix_ms) > grace:
                message = f"deadline_unix_ms: no end was heard by {late} ms after it"
                self._end(request, ErrorCode.ERROR_CODE_DEADLINE, message)

    def _end_all(self, code: ErrorCode, message: str) -> None:
        for request in list(self.requests.values()):
            self._end(request, code, message)

    def _welcome(self, welcome: ClientWelcome) -> None:
        check_times(welcome)
        self.lost_since = None
        # Several hellos may be answered at once, after an outage: only the first answer is news.
        resumed = welcome.resumed and welcome.processor_id == self.processor_id
        self._welcomed(welcome)
        self._number = self._confirmed = 0
        if not resumed:
            self._outgoing.clear()
        for key, request in self.requests.items():
            # An earlier life of the processor may have handed it to a worker: asked anew, it could go to another one
            # beside that. Only when nobody has it, it is asked for again.
            if request.generate is not None and request.asked_of in ("", self.processor_id):
                request.asked_of = self.processor_id
                self._say(ClientFrame(generate=request.generate))
            elif not (resumed and request.is_answered):
                request.is_answered = False
                self._say(ClientFrame(resume=_resume(key, request)))
            if request.is_aborted:
                self._say(ClientFrame(abort=Abort(request_key=key)))
        if self._watched_worker is not None:
            self._say(ClientFrame(watch=Watch(worker_id=self._watched_worker)))
        if self._status is not None:
            self._say(ClientFrame(status=StatusRequest()))

    # What goes out.

    def _next(self, now: float) -> list[bytes] | None:
        if self._outgoing:
            return [self._outgoing.popleft()]
        if self._number > self._confirmed and not self.is_paused:
            self._confirmed = self._number
            return [write_frame(ClientFrame(confirm=Confirm(through_number=self._number)))]
        beat = self._heartbeat(now)
        return None if beat is None else [write_frame(ClientFrame(heartbeat=beat))]

    def goodbye(self, reason: GoodbyeReason, message: str = "") -> list[bytes]:
        """Leave: return the last message to send."""
        self.state = SessionState.LEFT
        return [write_frame(ClientFrame(goodbye=Goodbye(reason=reason, message=message)))]

    def _greeting(self, now: float) -> list[bytes] | None:
        if not self.requests:
            self.lost_since = None
        elif self.lost_since is None:
            self.lost_since = now
        return super()._greeting(now)

    def _hello(self) -> list[bytes]:
        return [write_frame(ClientFrame(hello=self._introduction))]


def _read(parts: list[bytes], limits: Limits, *, has_draft: bool) -> tuple[LogprobBatch, LogprobBatch | None]:
    if len(parts) != 1 + has_draft:
        raise ContractError("message", f"{2 + has_draft} parts", 1 + len(parts), rule=Rule.LENGTH)
    return decode(parts[0], limits), decode(parts[1], limits) if has_draft else None


def _resume(key: int, request: OpenRequest) -> Resume:
    return Resume(
        request_key=key,
        next_position=request.next_position,
        include_draft_logprobs=request.include_drafts,
        deadline_unix_ms=request.deadline_unix_ms,
    )


def _ignore(_frame: ServerFrame, _payload: bytes) -> None:
    """Nobody watches."""


def _places(draft: LogprobBatch, target: LogprobBatch) -> npt.NDArray[np.intp]:
    return np.flatnonzero(np.isin(draft.request_keys, target.request_keys))
