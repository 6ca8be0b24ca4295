"""The client's side of the client protocol, without sockets and without a clock of its own."""

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

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
from tokenbus_services.delivery import PendingAck, RequestFailedError, RequestTokens, Step
from tokenbus_services.delivery.step import FINISHED
from tokenbus_services.delivery.tokens import stop_of
from tokenbus_services.link import PROOF_BYTES, ReconnectingSession, SessionState

_MOST_ENDED_IDS = 1024
_MOST_POSITION = 2**31 - 1
"""The largest position that a Resume can name; a row's last token may lie beyond it."""


class StepRows(NamedTuple):
    """A client's rows of one step, as columns: an item of `Client.steps`.

    Each row and each token comes once, in the order in which its request had it. Compare `isinstance(item, StepRows)`,
    or match as in the example of `Client.steps`.

    Example:
        assert tokenbus.StepRows._fields == ("target", "draft")
    """

    target: LogprobBatch
    """The tokens that were accepted."""
    draft: LogprobBatch | None
    """What the draft model proposed for the same step, where a request asked for that; else None."""


class RequestEnd(NamedTuple):
    """How one request ended: an item of `Client.steps`, after the request's last rows.

    Example:
        end = tokenbus.RequestEnd(request_id=7, status=tokenbus.RowStatus.FINISHED_STOP, error=None)
        assert end.error is None
    """

    request_id: int
    """The request."""
    status: RowStatus | None
    """The status of its last row; None: it ended with an error."""
    error: RequestFailedError | None
    """The error that it ended with, and how many tokens came before; None: it has a status."""
    stop: int | str | None = None
    """The stop token or the stop text that ended it, as `Generation.stop`."""


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request that has not ended."""

    tokens: RequestTokens
    next_position: int
    generate: Generate | None
    """The request as it was sent, until the processor is known to have taken it."""
    include_drafts: bool
    stop_texts: tuple[str, ...] = ()
    deadline_unix_ms: int = 0
    """The moment at which it ends at the latest, in milliseconds since 1970-01-01 UTC; zero: none is known."""
    sent_to: str = ""
    """The id of the processor's life that may have received it; empty: none."""
    is_answered: bool = False
    """Whether the processor has answered the last Generate or Resume of it."""
    is_aborted: bool = False
    is_submitted: bool = False
    """Whether only the output stream gives its rows: no iterator of its own."""


class ClientSession(ReconnectingSession):
    """One life of a client: its requests, and the frames it exchanges with whichever processor is there."""

    def __init__(self, hello: ClientHello, limits: Limits, max_rows: int, *, interval: float, timeout: float) -> None:
        """Take the hello, the limits to decode by, how many rows of a request may wait, and heartbeats in seconds."""
        super().__init__(interval, timeout)
        self._introduction = deepcopy(hello)
        self._introduction.proof = secrets.token_bytes(PROOF_BYTES)
        self._limits = limits
        self._max_rows = max_rows
        self._outgoing: deque[bytes] = deque()
        self._number = 0
        self._acked = 0
        self._watched_worker: str | None = None
        self._status: asyncio.Future[ProcessorStatus] | None = None
        self._on_watched: Callable[[ServerFrame, bytes], None] | None = None
        self._on_output: Callable[[StepRows | RequestEnd], None] | None = None
        self._ends: list[RequestEnd] = []
        """Ends that go into the output stream once the rows before them are there."""
        self._ended_ids: dict[int, None] = {}
        """Requests that ended here and whose late rows need no abort any more, the oldest first."""
        self._discarded: dict[int, OpenRequest] = {}
        """Requests whose consumer closed them, until the processor has ended them; their rows are dropped."""
        self.requests: dict[int, OpenRequest] = {}
        self.repeated = 0
        self.is_paused = False
        """Whether nothing is acked for now, because the output stream is full: backpressure for the processor."""
        self.lost_since: float | None = None
        """Since when there has been no processor, while there are open requests."""

    @property
    def outstanding(self) -> int:
        """How many requests have not ended, without those that their consumers closed."""
        return len(self.requests)

    @property
    def open_count(self) -> int:
        """How many requests the processor may still have open for this client."""
        return len(self.requests) + len(self._discarded)

    def is_open(self, request_id: int) -> bool:
        """Tell whether the processor may still have a request open for this client."""
        return request_id in self.requests or request_id in self._discarded

    # Calls of the application.

    def open(self, generate: Generate, *, is_submitted: bool = False) -> RequestTokens:
        """Send a request; a ContractError says which bound it breaks.

        One that is submitted ends with the output stream, which must be open: else RuntimeError.
        """
        if is_submitted and self._on_output is None:
            raise RuntimeError("submit() needs steps() to be open: rows of the request would go nowhere")
        frame = ClientFrame(generate=generate)
        sent_to = self.processor_id if self._say(frame) else ""
        tokens = RequestTokens(generate.request_key)
        drafts = generate.include_draft_logprobs
        # The frame's own copy: the application may change its message afterwards.
        deadline = generate.deadline_unix_ms
        texts = tuple(generate.sampling.stop)
        request = OpenRequest(tokens, 0, frame.generate, drafts, texts, deadline, sent_to, is_submitted=is_submitted)
        self.requests[tokens.request_id] = request
        return tokens

    def resume(
        self, request_id: int, position: int, *, include_drafts: bool, deadline_unix_ms: int = 0
    ) -> RequestTokens:
        """Ask for the rest of a request, from a position on."""
        tokens = RequestTokens(request_id, position)
        request = OpenRequest(tokens, position, None, include_drafts, deadline_unix_ms=deadline_unix_ms)
        self._say(ClientFrame(resume=_resume(request_id, request)))
        self.requests[request_id] = request
        return tokens

    def abort(self, request_id: int) -> None:
        """End a request at its worker; tokens on their way still come, and then its last row."""
        request = self.requests.get(request_id)
        if request is not None:
            self._abort(request)
            self._flush_ends()

    def discard(self, request_id: int) -> None:
        """End a request at its worker and here at once: rows of it that still come are dropped."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return
        if request.generate is None or request.sent_to:
            self._discarded[request_id] = request
            if not request.is_aborted:
                request.is_aborted = True
                self._say(ClientFrame(abort=Abort(request_key=request_id)))
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

    def watch(self, worker_id: str, take: Callable[[ServerFrame, bytes], None]) -> None:
        """Ask to be shown a worker's streams, or every worker's; RuntimeError: another function is shown them."""
        if self._on_watched is not None:
            raise RuntimeError("watch() is being iterated over already: close that iterator first")
        self._say(ClientFrame(watch=Watch(worker_id=worker_id)))
        self._watched_worker = worker_id
        self._on_watched = take

    def unwatch(self) -> None:
        """Drop what a watched worker publishes from now on."""
        self._on_watched = None

    def ask_status(self) -> asyncio.Future[ProcessorStatus]:
        """Ask for the processor's status; all that ask before it comes share one future."""
        self._say(ClientFrame(status=StatusRequest()))
        if self._status is None:
            self._status = asyncio.get_running_loop().create_future()
        return self._status

    def _say(self, frame: ClientFrame) -> bool:
        """Queue a frame, and return whether it will be sent; a ContractError says which bound it breaks.

        Without a connection the next welcome sends what is still wanted.
        """
        data = write_frame(frame)
        if self.state is SessionState.OPEN:
            self._outgoing.append(data)
            return True
        return False

    def _abort(self, request: OpenRequest) -> None:
        if request.is_aborted:
            return
        request.is_aborted = True
        if request.generate is not None and not request.sent_to:
            self._never_began(request)
        else:
            self._say(ClientFrame(abort=Abort(request_key=request.tokens.request_id)))

    # Ends.

    def _ended(self, request: OpenRequest, status: RowStatus, stop: int | str | None = None) -> None:
        request.tokens.finish(status, stop)
        if self._on_output is not None:
            self._ends.append(RequestEnd(request.tokens.request_id, status, None, stop))

    def _broken(self, request: OpenRequest, error: RequestError, generated_tokens: int = 0) -> None:
        request.tokens.fail(error, generated_tokens)
        if self._on_output is not None:
            failed = RequestFailedError(error, generated_tokens)
            self._ends.append(RequestEnd(request.tokens.request_id, None, failed))

    def _flush_ends(self) -> None:
        """Put ends into the output stream, after the rows before them."""
        ends, self._ends = self._ends, []
        if self._on_output is not None:
            for end in ends:
                self._on_output(end)

    # Frames that come in.

    def receive(self, parts: list[bytes], now: float) -> None:
        """Take one transport message; a ContractError says what is wrong with it.

        It changes nothing, unless tokens are in what cannot be read: then every request that may miss them ends.
        """
        try:
            super().receive(parts, now)
        finally:
            if self._ends:
                self._flush_ends()

    def _read(self, parts: list[bytes]) -> ServerFrame:
        if not parts:
            raise ContractError("message", "a frame, and its batches", 0, rule=Rule.LENGTH)
        return read_frame(ServerFrame, parts[0])

    def _is_next(self, number: int, now: float) -> bool:
        if number == self._number + 1:
            self._number = number
            return True
        if number > self._number:  # one was lost on the way: say hello, and all that is not acked comes again
            self._greet_again(now)
        else:
            self.repeated += 1
        return False

    def _take(self, frame: ServerFrame, body: str, parts: list[bytes], now: float) -> None:
        if frame.number and not self._is_next(frame.number, now):
            return
        match body:
            case "outputs":
                self._outputs(parts, has_draft=frame.outputs.has_draft)
            case "admitted":
                if (request := self._find(frame.admitted.request_key)) is not None:
                    request.generate, request.is_answered = None, True
                    request.deadline_unix_ms = frame.admitted.deadline_unix_ms or request.deadline_unix_ms
            case "error":
                self._failed(frame.error)
            case "status":
                self._answer_status(frame.status)
            case "watched_item" | "watched_stream":
                if self._on_watched is not None:
                    self._on_watched(frame, parts[0] if parts else b"")

    def _answer_status(self, status: ProcessorStatus) -> None:
        asked, self._status = self._status, None
        if asked is not None and not asked.done():
            asked.set_result(status)

    def _outputs(self, parts: list[bytes], *, has_draft: bool) -> None:
        try:
            target, draft = _read(parts, self._limits, has_draft=has_draft)
        except ContractError as error:
            # The same bytes would come again, and any request may have tokens in them.
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
        gives_columns = self._on_output is not None
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
            else:
                self._late_row(key, RowStatus(status))
        if gives_columns:
            self._give_columns(target, draft, np.array(had, np.intp))

    def _late_row(self, request_id: int, status: RowStatus) -> None:
        """Drop a row of a request that ended here, and end the request at its worker."""
        if request_id in self._discarded:  # its abort was sent
            if status in FINISHED:
                del self._discarded[request_id]
        elif status not in FINISHED and request_id not in self._ended_ids:
            # It ended here, as when a request was sent twice and the first answer was an error.
            self._ignore_rows_of(request_id)
            self._say(ClientFrame(abort=Abort(request_key=request_id)))

    def _ignore_rows_of(self, request_id: int) -> None:
        """Remember that rows of a request that ended here need no abort."""
        self._ended_ids[request_id] = None
        if len(self._ended_ids) > _MOST_ENDED_IDS:
            del self._ended_ids[next(iter(self._ended_ids))]

    def _find(self, request_id: int) -> OpenRequest | None:
        return self.requests.get(request_id) or self._discarded.get(request_id)

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
        # The output stream has the rows where there is one: its consumer would not take them from here.
        if self._on_output is None and request.tokens.put(step, place) > self._max_rows:
            lost = f"its consumer left {self._max_rows} steps' tokens waiting, from token {request.tokens.position} on"
            self._end(request, ErrorCode.ERROR_CODE_SLOW_CLIENT, lost)
        elif status in FINISHED:
            del self.requests[request.tokens.request_id]
            self._ended(request, status, stop_of(step.rows, place, request.stop_texts))
        return expected - position

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

    def _failed(self, error: RequestError) -> None:
        if error.code == ErrorCode.ERROR_CODE_TAKEN_UP:  # another connection has it: rows that still come need no abort
            self._ignore_rows_of(error.request_key)
        request = self.requests.get(error.request_key)
        if request is None:
            self._discarded.pop(error.request_key, None)
            return
        if error.code == ErrorCode.ERROR_CODE_UNKNOWN_REQUEST and request.generate is not None:
            if request.is_aborted:
                self._never_began(request)
                return
            request.sent_to = self.processor_id
            self._say(ClientFrame(generate=request.generate))
            return
        del self.requests[error.request_key]
        generated = error.emitted_tokens
        error.emitted_tokens = request.next_position
        self._broken(request, error, generated)

    def _end(self, request: OpenRequest, code: ErrorCode, message: str) -> None:
        """End a request with an error of this side, and at its worker."""
        request_id, emitted = request.tokens.request_id, request.next_position
        del self.requests[request_id]
        if not request.is_aborted and (request.generate is None or request.sent_to):
            self._say(ClientFrame(abort=Abort(request_key=request_id)))
        error = RequestError(request_key=request_id, code=code, message=message, emitted_tokens=emitted)
        self._broken(request, error)

    def _never_began(self, request: OpenRequest) -> None:
        """End a request that was aborted before any processor had it."""
        del self.requests[request.tokens.request_id]
        self._ended(request, RowStatus.ABORTED)

    def give_up(self, message: str) -> None:
        """End every request with an error: there has been no processor for too long, or the client leaves."""
        self._end_all(ErrorCode.ERROR_CODE_DEADLINE, message)
        self._discarded.clear()
        self.lost_since = None
        self._flush_ends()

    def end_overdue(self, unix_ms: int) -> None:
        """End each request whose deadline passed so long ago that the processor's own end for it is overdue."""
        grace = round(self._timeout * 1000)
        for request in list(self.requests.values()):
            if request.deadline_unix_ms and (late := unix_ms - request.deadline_unix_ms) > grace:
                message = f"deadline_unix_ms: no end was heard by {late} ms after it"
                self._end(request, ErrorCode.ERROR_CODE_DEADLINE, message)
        self._flush_ends()

    def _end_all(self, code: ErrorCode, message: str) -> None:
        for request in list(self.requests.values()):
            self._end(request, code, message)

    def _welcome(self, welcome: ClientWelcome) -> None:
        # Several hellos may be answered at once, after an outage: only the first answer is news.
        resumed = welcome.resumed and welcome.processor_id == self.processor_id
        self._welcomed(welcome)
        self.lost_since = None
        self._number = self._acked = 0
        if not resumed:
            self._outgoing.clear()
        for key, request in self._all_requests():
            # An earlier life of the processor may have given it to a worker: sent anew, it could go to another one
            # beside that. It is sent again only when the processor says that no worker has it.
            if request.generate is not None and request.sent_to in ("", self.processor_id):
                request.sent_to = self.processor_id
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

    def _all_requests(self) -> Iterator[tuple[int, OpenRequest]]:
        return chain(self.requests.items(), self._discarded.items())

    # Frames that go out.

    def _written(self, **body: Any) -> bytes:  # noqa: ANN401 - messages
        return write_frame(ClientFrame(**body))

    def _next(self) -> list[bytes] | None:
        if self._outgoing:
            return [self._outgoing.popleft()]
        if self._number > self._acked and not self.is_paused:
            self._acked = self._number
            return [self._written(confirm=Confirm(through_number=self._number))]
        return None

    def _greeting(self, now: float) -> list[bytes] | None:
        if not self.requests:
            self.lost_since = None
        elif self.lost_since is None:
            self.lost_since = now
        return super()._greeting(now)

    def _hello(self) -> ClientHello:
        return self._introduction


def _read(parts: list[bytes], limits: Limits, *, has_draft: bool) -> tuple[LogprobBatch, LogprobBatch | None]:
    if len(parts) != 1 + has_draft:
        raise ContractError("message", f"{2 + has_draft} parts", 1 + len(parts), rule=Rule.LENGTH)
    return decode(parts[0], limits), decode(parts[1], limits) if has_draft else None


def _resume(request_id: int, request: OpenRequest) -> Resume:
    return Resume(
        request_key=request_id,
        next_position=request.next_position,
        include_draft_logprobs=request.include_drafts,
        deadline_unix_ms=request.deadline_unix_ms,
    )


def _places(draft: LogprobBatch, target: LogprobBatch) -> npt.NDArray[np.intp]:
    return np.flatnonzero(np.isin(draft.request_keys, target.request_keys))
