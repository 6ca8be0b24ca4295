"""OpenRequests: a client's open requests, which processor has each, and where those are looked for that lost theirs."""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain, count, repeat
from math import inf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus_contracts import LogprobBatch, RowStatus
from tokenbus_contracts.frames import worker_hash, write_frame
from tokenbus_contracts.generated.client_pb2 import ClientFrame, Ended, Resume
from tokenbus_contracts.generated.request_pb2 import Abort, Admitted, ErrorCode, Generate, RequestError
from tokenbus_contracts.schema import bounds_in
from tokenbus_services.client.progress import MOST_POSITION, NO_SENDER, Progress
from tokenbus_services.delivery import PendingAck, RequestFailedError, RequestTokens, Step
from tokenbus_services.delivery.errors import NOT_HERE, NOT_TAKEN, request_error
from tokenbus_services.delivery.slots import Slots
from tokenbus_services.delivery.step import FINISHED
from tokenbus_services.delivery.tokens import stop_of
from tokenbus_services.delivery.waiter import WakeUps
from tokenbus_services.link import SessionState

if TYPE_CHECKING:
    from tokenbus_services.client.session import ClientSession

_MOST_ENDED_IDS = 1024
_MOST_OVER = bounds_in(Ended.DESCRIPTOR.fields_by_name["request_keys"].GetOptions()).max_items
"""As many as one frame may name."""
_OVERDUE = 2
"""A search ends after so many graces; where a worker was lost, only if one processor was there for a whole one."""
_MOST_LOSSES = 4
"""A request is sent anew for at most so many workers that were lost before they answered: it may be what ends them.

A worker that left its processor counts, too: with fewer, requests would end while processors fail again and again.
"""


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
class Search:
    """A request that no processor has, as far as is known: what the processors said of it."""

    error: RequestError | None = None
    """What it ends with if none of them has it."""
    without: "set[ClientSession]" = field(default_factory=set)
    """Processors that answered "unknown" or "refused" for this request."""
    since: float | None = None
    """When the client first looked at it after the last handshake with a processor, in seconds; None: not yet."""
    is_final: bool = False
    """Whether its worker has had the time to come: what a processor says now counts."""
    looked_at: float | None = None
    """When the client looked at it last, in seconds."""
    searched: float = 0.0
    """For how many seconds a processor was connected meanwhile."""
    is_overdue: bool = False
    """Whether the search has lasted so long that processors which come and go delay its end no longer."""


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request that has not ended."""

    tokens: RequestTokens
    progress: Progress
    """Where its next position is, while it is open."""
    generate: Generate | None
    """The request as it was sent, until a processor is known to have taken it."""
    include_drafts: bool
    stop_texts: tuple[str, ...] = ()
    deadline_unix_ms: int = 0
    """The moment at which it ends at the latest, in milliseconds since 1970-01-01 UTC; zero: none is known."""
    home: "ClientSession | None" = None
    """The processor that has the request, as far as is known; None: the client searches for it."""
    sent_to: str = ""
    """The id of the processor's life that may have received it; empty: none."""
    is_answered: bool = False
    """Whether that processor has answered the last Generate or Resume of it."""
    losses: int = 0
    """How many workers were lost before they answered it."""
    is_aborted: bool = False
    is_submitted: bool = False
    """Whether only the output stream gives its rows: no iterator of its own."""
    search: Search | None = None
    closed_at: int | None = None
    """Its next position when it was closed or ended here; None: it is open."""

    @property
    def key(self) -> int:
        """What processors and workers know it by: its id, or another key once it was sent anew."""
        return self.tokens.resume_id

    @property
    def next_position(self) -> int:
        """The position of the next token that is to come from a processor."""
        return self.progress.next_position(self.tokens.request_id) if self.closed_at is None else self.closed_at

    @property
    def is_unsent(self) -> bool:
        """Whether no processor can have it."""
        return self.generate is not None and not self.sent_to


class OpenRequests:
    """A client's open requests, at one processor or several.

    With one, a request stays there, through its restarts. With several each has a home, which is lost when that is
    silent, closes, or says that it has no worker for the request any more. Then all are asked, each time that a worker
    comes to one; the first that sends something of the request is its new home. A worker has one processor at a time,
    so rows of a request are one sequence whichever processor sends them, and its positions tell what is new.

    A request whose processor is lost before it answered, or does not know it, is sent anew at once, under another key:
    a worker that the client does not hear of may run it under the first one, and the rows of the two are not mixed.
    """

    def __init__(self, max_rows: int, patience: float, *, others_may_come: bool = False) -> None:
        """Take how many rows of a request may wait, and how many seconds a request waits for a processor.

        `others_may_come`: the client's processors come and go.
        """
        self._others_may_come = others_may_come
        self._max_rows = max_rows
        self._patience = patience
        self._on_output: Callable[[StepRows | RequestEnd], None] | None = None
        self._ends: list[RequestEnd] = []
        """Ends that go into the output stream once the rows before them are there."""
        self._ended_ids: dict[int, None] = {}
        """Requests that ended here and whose late rows need no abort any more, the oldest first."""
        self._missing: dict[int, float] = {}
        """The workers that have left their processor, or lost it, and are at no other yet.

        Any of them may soon take a request that none takes now. Each is waited for so many seconds more in which there
        is a processor to come to.
        """
        self._looked_at: float | None = None
        self._over: OrderedDict[int, float] = OrderedDict()
        """The requests that ended last, of which workers may still bring rows to a processor, each with its number.

        It is infinite where a worker may still have the request: that is said each time that a worker comes.
        """
        self._over_numbers = count(1)
        self._discarded: dict[int, OpenRequest] = {}
        """Requests whose consumer closed them, until the processor has ended them; their rows are dropped."""
        self._wake_ups = WakeUps()
        self._sent_anew: dict[int, int] = {}
        """The ids of the open requests that were sent anew, by the key that each has now."""
        self.sessions: list[ClientSession] = []
        self._ordinals = count(NO_SENDER + 1)
        self._progress = Progress()
        self.requests: dict[int, OpenRequest] = {}
        self.repeated = 0
        """How many rows and frames came again."""
        self.is_paused = False
        """Whether nothing is acked for now, because the output stream is full: backpressure for the processor."""

    def __len__(self) -> int:
        """Return how many requests have not ended, without those that their consumers closed."""
        return len(self.requests)

    @property
    def has_several(self) -> bool:
        """Whether there are several processors, or others may come."""
        return self._others_may_come or len(self.sessions) > 1

    @property
    def open_count(self) -> int:
        """How many requests a processor may still have open for this client."""
        return len(self.requests) + len(self._discarded)

    def is_open(self, request_id: int) -> bool:
        """Tell whether a processor may still have a request open for this client."""
        return request_id in self.requests or request_id in self._discarded

    def _known_by(self, key: int) -> OpenRequest | None:
        """Return the open request that processors know by a key; of one that was sent anew only the last is good."""
        request = self.requests.get(self._sent_anew.get(key, key))
        return request if request is not None and request.key == key else None

    def join(self, session: "ClientSession") -> int:
        """Add a session, and return a number that no other has."""
        self.sessions.append(session)
        return next(self._ordinals)

    # Calls of the application.

    def open(self, generate: Generate, *, is_submitted: bool = False) -> RequestTokens:
        """Send a request; a ContractError says which bound it breaks.

        One that is submitted ends with the output stream, which must be open: else RuntimeError.
        """
        if is_submitted and self._on_output is None:
            raise RuntimeError("submit() needs steps() to be open: rows of the request would go nowhere")
        frame = ClientFrame(generate=generate)
        home, sent_to = self._best(generate.model), ""
        if home is None:
            write_frame(frame)
        elif home.say(frame):
            sent_to = home.processor_id
            home.used(generate.model)
        tokens = RequestTokens(generate.request_key, wake_ups=self._wake_ups)
        request = OpenRequest(
            tokens,
            self._progress,
            frame.generate,  # a copy: the application may change its message afterwards
            generate.include_draft_logprobs,
            tuple(generate.sampling.stop),
            generate.deadline_unix_ms,
            home,
            sent_to,
            is_submitted=is_submitted,
        )
        self._add(request, 0)
        if home is None:
            request.search = Search()
        return tokens

    def resume(
        self, request_id: int, position: int, *, include_drafts: bool, deadline_unix_ms: int = 0
    ) -> RequestTokens:
        """Ask for the rest of a request, from a position on."""
        tokens = RequestTokens(request_id, position, wake_ups=self._wake_ups)
        request = OpenRequest(tokens, self._progress, None, include_drafts, deadline_unix_ms=deadline_unix_ms)
        request.closed_at = position
        frame = ClientFrame(resume=_resume(request))
        write_frame(frame)
        self._add(request, position)
        if self.has_several:
            self._lose_home(request, None)
        else:
            request.home = self.sessions[0]
            request.home.say(frame)
        return tokens

    def _add(self, request: OpenRequest, position: int) -> None:
        self.requests[request.tokens.request_id] = request
        self._over.pop(request.tokens.request_id, None)
        self._progress.open(request.tokens.request_id, position, request.tokens.waiting)
        request.closed_at = None

    def abort(self, request_id: int) -> None:
        """End a request at its worker; tokens on their way still come, and then its last row."""
        request = self.requests.get(request_id)
        if request is None or request.is_aborted:
            return
        request.is_aborted = True
        if request.is_unsent:
            self._never_began(request)
            self._flush_ends()
        else:
            self._say_abort(request)

    def discard(self, request_id: int) -> None:
        """End a request at its worker and here at once: rows of it that still come are dropped."""
        request = self.requests.get(request_id)
        if request is None:
            return
        self._remove(request)
        if request.home is not None and not request.is_unsent:
            self._discarded[request.key] = request
            if not request.is_aborted:
                request.is_aborted = True
                self._say_abort(request)
        elif not request.is_unsent:
            self._remember_over(request.key, may_go_on=True)
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
            request.home.say(ClientFrame(abort=Abort(request_key=request.key)))

    # Ends.

    def _remove(self, request: OpenRequest) -> None:
        request_id = request.tokens.request_id
        del self.requests[request_id]
        request.closed_at = self._progress.close(request_id)
        self._sent_anew.pop(request.key, None)

    def _ended(self, request: OpenRequest, status: RowStatus, stop: int | str | None = None) -> None:
        request.tokens.finish(status, stop)
        if self._on_output is not None:
            self._ends.append(RequestEnd(request.tokens.request_id, status, None, stop))

    def _broken(self, request: OpenRequest, error: RequestError) -> None:
        """End a request with an error of a processor; it counts the tokens that came here."""
        self._remove(request)
        if error.code != ErrorCode.ERROR_CODE_TAKEN_UP and not request.is_unsent:
            self._remember_over(request.key, may_go_on=True)
        error.request_key = request.tokens.request_id
        generated, error.emitted_tokens = error.emitted_tokens, request.next_position
        request.tokens.fail(error, generated)
        if self._on_output is not None:
            failed = RequestFailedError(error, generated)
            self._ends.append(RequestEnd(request.tokens.request_id, None, failed))

    def _flush_ends(self) -> None:
        """Put ends into the output stream, after the rows before them."""
        ends, self._ends = self._ends, []
        if self._on_output is not None:
            for end in ends:
                self._on_output(end)

    def _end(self, request: OpenRequest, code: ErrorCode, message: str) -> None:
        """End a request with an error of this side, and at its worker."""
        if not request.is_aborted and not request.is_unsent:
            self._say_abort(request)
        self._broken(request, request_error(request.tokens.request_id, code, message))

    def _never_began(self, request: OpenRequest) -> None:
        """End a request that was aborted before a processor answered it."""
        self._remove(request)
        self._ended(request, RowStatus.ABORTED)

    def end_all(self, code: ErrorCode, message: str, of: "ClientSession | None" = None) -> None:
        """End every request with an error, or those at one processor."""
        for request in list(self.requests.values()):
            if of is None or request.home is of:
                self._end(request, code, message)
        self._flush_ends()

    def give_up(self, message: str) -> None:
        """End every request with an error: there has been no processor for too long, or the client leaves."""
        self.end_all(ErrorCode.ERROR_CODE_DEADLINE, message)
        self._discarded.clear()
        for session in self.sessions:
            session.lost_since = None

    def end_overdue(self, unix_ms: int) -> None:
        """End each request whose deadline passed so long ago that the processor's own end for it is overdue."""
        grace = round(max((session.timeout for session in self.sessions), default=0) * 1000)
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
        step = Step(header.worker_id, header.epoch, header.step, target, draft, PendingAck())
        slots, is_next = self._progress.advance(session.ordinal, target)
        had = is_next.astype(np.intp) - 1
        for place in np.flatnonzero(had).tolist():
            key, status = int(target.request_keys[place]), RowStatus(target.statuses[place])
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
        keys = target.request_keys
        is_late = np.isin(keys, np.fromiter(self._sent_anew.values(), np.uint64))
        if not (is_late.any() or np.isin(keys, np.fromiter(self._sent_anew, np.uint64)).any()):
            return target, draft
        for place in np.flatnonzero(is_late).tolist():
            self._late_row(session, int(keys[place]), RowStatus(target.statuses[place]))
        target = target.select(np.flatnonzero(~is_late))
        draft = None if draft is None else self._with_ids(draft.select(_places(draft, target)))
        return self._with_ids(target), draft

    def _with_ids(self, batch: LogprobBatch) -> LogprobBatch:
        ids = [self._sent_anew.get(key, key) for key in batch.request_keys.tolist()]
        return LogprobBatch.of_views(batch.header, {**batch.columns, "request_keys": np.array(ids, np.uint64)})

    def _put(self, step: Step, slots: Slots, places: Slots) -> None:
        """Let rows wait for the iterators of their requests."""
        waiting = list(map(self._progress.waiting.__getitem__, slots.tolist()))
        # The fastest loop that Python has: `append` of each buffer, and nothing is kept of its results.
        deque(map(deque.append, waiting, zip(repeat(step), places.tolist(), strict=False)), maxlen=0)
        self._wake_ups.look()
        if max(map(len, waiting), default=0) > self._max_rows:
            for key, rows in zip(step.rows.request_keys[places].tolist(), waiting, strict=True):
                if len(rows) > self._max_rows:
                    self._end_slow(self.requests[key])

    def _late_row(self, session: "ClientSession", request_id: int, status: RowStatus) -> None:
        """Drop a row of a request that ended here, and end the request at its worker."""
        if request_id in self._discarded:  # its abort was sent
            if status in FINISHED:
                del self._discarded[request_id]
        elif status not in FINISHED and request_id not in self._ended_ids:
            # It ended here, as when a request was sent twice and the first answer was an error.
            self._ignore_rows_of(request_id)
            session.say(ClientFrame(abort=Abort(request_key=request_id)))

    def _ignore_rows_of(self, request_id: int) -> None:
        """Remember that rows of a request that ended here need no abort."""
        self._ended_ids[request_id] = None
        if len(self._ended_ids) > _MOST_ENDED_IDS:
            del self._ended_ids[next(iter(self._ended_ids))]

    def _row(self, session: "ClientSession", request: OpenRequest, step: Step, place: int, status: RowStatus) -> int:
        """Add a row to its request; return how many of its tokens that had before, or -1 if the row is not for it."""
        position, tokens = int(step.rows.positions[place]), int(step.rows.token_counts[place])
        if status is RowStatus.ABORTED and not request.is_aborted and self.has_several:
            # Not by this client: a processor at which it had not claimed the request told the worker to end it.
            if request.home is session:
                self._lose_home(request, None)
            return -1
        expected = request.next_position
        is_known = position + tokens < expected or (tokens and position + tokens == expected)
        if not request.is_answered or (request.home is not session and not is_known):
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
        self._progress.go_on(request.tokens.request_id, position + tokens)
        self._progress.set_worker(request.tokens.request_id, worker_hash(step.worker_id))
        # The output stream has the rows where there is one: its consumer would not take them from here.
        if self._on_output is None and request.tokens.put(step, place) > self._max_rows:
            self._end_slow(request)
        elif status in FINISHED:
            self._remove(request)
            self._remember_over(request.key)
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
        request = self._known_by(admitted.request_key) or self._discarded.get(admitted.request_key)
        if request is None:
            return
        if request.home in (None, session):
            self._found(request, session)
            request.deadline_unix_ms = admitted.deadline_unix_ms or request.deadline_unix_ms
            if request.closed_at is None:
                self._progress.set_worker(request.tokens.request_id, worker_hash(admitted.worker_id))

    def _found(self, request: OpenRequest, session: "ClientSession") -> None:
        """Learn which processor has a request."""
        was_lost = request.home is None
        request.generate, request.is_answered, request.home = None, True, session
        if request.closed_at is None:
            self._progress.set_sender(request.tokens.request_id, session.ordinal)
        if was_lost and request.is_aborted:
            self._say_abort(request)
        request.search = None

    def _forget_answer(self, request: OpenRequest) -> None:
        """Look at the request's next row by itself: it says which processor has the request."""
        request.is_answered = False
        if request.closed_at is None:
            self._progress.set_sender(request.tokens.request_id, NO_SENDER)

    def failed(self, session: "ClientSession", error: RequestError) -> None:
        """Learn that a request ended with an error, or was not taken."""
        if error.code == ErrorCode.ERROR_CODE_TAKEN_UP:  # another connection has it: rows that still come need no abort
            self._ignore_rows_of(error.request_key)
        request = self._known_by(error.request_key)
        if request is None:
            is_discarded = self._discarded.pop(error.request_key, None) is not None
            if is_discarded and self.has_several and error.code in NOT_HERE:
                self._remember_over(error.request_key, may_go_on=True)
        elif request.home not in (None, session):
            return  # it went on at another processor
        elif request.home is None and request.search is not None and error.code in NOT_HERE | NOT_TAKEN:
            request.search.without.add(session)
            self._conclude(request, request.search)
        elif self.has_several and request.generate is not None and error.code in NOT_TAKEN:
            self._not_taken(request, request.generate, session, error)
        elif self.has_several and error.code in NOT_HERE and not self._has_lost_many(request, error):
            self._lose_home(request, error)
        elif error.code == ErrorCode.ERROR_CODE_UNKNOWN_REQUEST and request.generate is not None:
            self._send_anew(request, request.generate)
        else:
            self._broken(request, error)
        self._flush_ends()

    def _has_lost_many(self, request: OpenRequest, error: RequestError) -> bool:
        """Count a worker that was lost before it answered a request, and tell whether those were too many."""
        if request.generate is not None and error.code == ErrorCode.ERROR_CODE_WORKER_LOST:
            request.losses += 1
        return request.losses > _MOST_LOSSES

    # After each handshake: what the processor may have missed is asked for again.

    def welcomed(self, session: "ClientSession", *, resumed: bool) -> None:
        """Tell a processor that welcomed this client what is wanted of it: `resumed` if it knew this client."""
        homeless = self._homeless()
        if not resumed:
            self.lost(session)
        session.said_over = 0
        self._say_over(session)
        for request in chain(self.requests.values(), self._discarded.values()):
            if request.home is not session:
                continue
            # An earlier life of the processor, or this one where there are others, may have given it to a worker that
            # is elsewhere now: it is sent anew only when this processor says that it does not have it.
            is_nowhere_else = not self.has_several and request.sent_to in ("", session.processor_id)
            if request.generate is not None and is_nowhere_else:
                self._send(request, request.generate, session)
            elif not (resumed and request.is_answered):
                self._forget_answer(request)
                session.say(ClientFrame(resume=_resume(request, only_if_here=self.has_several)))
            if request.is_aborted:
                self._say_abort(request)
        self._forget_refusals(session)
        for request in homeless:
            if request.search is not None:  # its worker may be on its way to this processor
                request.search.since = None
                request.search.is_final = request.search.is_overdue
            self._ask(session, request)

    def _remember_over(self, request_id: int, *, may_go_on: bool = False) -> None:
        """Remember that nothing more of a request is wanted; `may_go_on`: its worker has not said that it ended it."""
        self._over[request_id] = inf if may_go_on else next(self._over_numbers)
        if len(self._over) > _MOST_OVER:
            self._over.popitem(last=False)

    def _say_over(self, session: "ClientSession") -> None:
        """Name to a processor the requests that have ended and were not named to it, if all rows are acked."""
        found = [request_id for request_id, number in self._over.items() if number > session.said_over]
        if found and not self.is_paused and session.say(ClientFrame(ended=Ended(request_keys=found))):
            session.said_over = max((n for n in self._over.values() if n < inf), default=0)

    def _send(self, request: OpenRequest, generate: Generate, session: "ClientSession") -> None:
        """Send a request that no processor has answered to a connected processor, perhaps again."""
        request.home, request.sent_to = session, session.processor_id
        session.say(ClientFrame(generate=generate))
        session.used(generate.model)

    # Several processors: where a request goes, and where it is looked for.

    def _best(self, model: str, search: Search | None = None) -> "ClientSession | None":
        """Return the processor with the most room for a model among those that are there, or None."""
        if not self.has_several:
            return self.sessions[0]
        without = search.without if search is not None else set()
        able = [each for each in self.sessions if each.state is SessionState.OPEN and each not in without]
        return max(able, key=lambda session: session.room_for(model), default=None)

    def lost(self, session: "ClientSession") -> None:
        """Look for the requests of a processor that is silent or closes; with one alone, they wait for it."""
        if not self.has_several:
            return
        for request in [each for each in self.requests.values() if each.home is session]:
            self._lose_home(request, None)
        for key in [key for key, request in self._discarded.items() if request.home is session]:
            del self._discarded[key]
            self._remember_over(key, may_go_on=True)
        self._flush_ends()

    def forget(self, session: "ClientSession") -> None:
        """Ask a processor nothing more: it has gone for good."""
        self.sessions.remove(session)
        self.lost(session)
        self._forget_refusals(session)

    def _homeless(self) -> list[OpenRequest]:
        """Return the requests that the client searches for."""
        return [request for request in self.requests.values() if request.home is None]

    def _lose_home(self, request: OpenRequest, error: RequestError | None) -> None:
        """Look for a request that its processor has no more, or send it anew if that had not answered."""
        request.home = None
        if request.generate is not None:
            self._send_anew(request, request.generate)
            return
        request.search = Search(error)
        self._forget_answer(request)
        for session in self.sessions:
            self._ask(session, request)

    def _send_anew(self, request: OpenRequest, generate: Generate) -> None:
        """Send a request under another key, as a worker may have it under the one before: that is ended wherever it is.

        So the request waits for no worker that may have it, and no processor mixes the rows of the two.
        """
        self._remember_over(request.key, may_go_on=True)
        for session in self.sessions:
            session.say(ClientFrame(ended=Ended(request_keys=[request.key])))
        if request.is_aborted:
            self._never_began(request)
            return
        self._sent_anew.pop(request.key, None)
        request.tokens.resume_id = generate.request_key = _next_key(request.key)
        generate.first_request_key = request.tokens.request_id
        self._sent_anew[request.key] = request.tokens.request_id
        request.sent_to, request.search = "", Search()
        self._place(request, generate, request.search)

    def _ask(self, session: "ClientSession", request: OpenRequest) -> None:
        """Ask a processor for a request that is looked for, or send it one that none has."""
        if session.state is not SessionState.OPEN:
            return
        if request.generate is None:
            session.say(ClientFrame(resume=_resume(request, only_if_here=True)))
        elif request.search is None or session not in request.search.without:
            self._send(request, request.generate, session)  # its search stays, with the processors that refused it

    def lost_with(self, workers: frozenset[int]) -> None:
        """Learn that the processor of some workers is lost: they are on their way to another, or there already."""
        self._miss(workers, _OVERDUE * self._grace())

    def left(self, workers: frozenset[int]) -> None:
        """Learn that some workers are at a processor no more, which is there."""
        self._miss(workers, self._grace(is_told=True))

    def _miss(self, workers: frozenset[int], seconds: float) -> None:
        """Wait for those of some workers that are at no processor here, for so many seconds at least."""
        here = [each.workers for each in self.sessions if each.state is SessionState.OPEN]
        for worker in workers.difference(*here):
            self._missing[worker] = max(seconds, self._missing.get(worker, 0.0))

    def seen(self, workers: frozenset[int]) -> None:
        """Learn that some workers are at a processor; each says of which requests it has."""
        for worker in self._missing.keys() & workers:
            del self._missing[worker]

    def came(self, session: "ClientSession", workers: frozenset[int]) -> None:
        """Learn that some workers are new at a processor: requests of theirs are there, whatever their homes say.

        A home that stands still again and again for less than its timeout would keep its requests from their worker.
        """
        for request_id, request in self.requests.items():
            if request.home not in (None, session) and self._progress.worker_of(request_id) in workers:
                session.say(ClientFrame(resume=_resume(request, only_if_here=True)))

    def arrived(self, session: "ClientSession") -> None:
        """Learn that a worker came to a processor: it may have brought a request that is looked for, or has ended."""
        self._say_over(session)
        self._forget_refusals(session)
        for request in self._homeless():
            self._ask(session, request)

    def _forget_refusals(self, session: "ClientSession") -> None:
        """Let every request be sent to a processor again, those too that wait at another one, which may refuse them."""
        for request in self.requests.values():
            if request.search is not None:
                request.search.without.discard(session)

    def _not_taken(
        self, request: OpenRequest, generate: Generate, session: "ClientSession", error: RequestError
    ) -> None:
        """Send a new request to another processor, or end it if there is none that may take it."""
        search = request.search = request.search or Search()
        search.error, request.home, request.sent_to = error, None, ""
        search.without.add(session)
        # One whose workers are all busy says when another try makes sense; one that closes cannot.
        session.is_closing |= error.code == ErrorCode.ERROR_CODE_OVERLOADED and not error.retry_after_ms
        if request.is_aborted:
            self._never_began(request)
            return
        self._place(request, generate, search)

    def _place(self, request: OpenRequest, generate: Generate, search: Search) -> None:
        """Send a request to a processor that has not refused it; end it if there is none and none may come."""
        best = self._best(generate.model, search)
        if best is not None:
            self._send(request, generate, best)
        elif search.error is not None and not self._workers_may_come():
            self._broken(request, search.error)

    def _workers_may_come(self) -> bool:
        """Tell whether a processor that is away, or workers that left theirs, may soon take what is refused now."""
        return bool(self._missing) or any(each.is_expected for each in self.sessions)

    def _conclude(self, request: OpenRequest, search: Search) -> None:
        """End the search for a request when all have said that they do not have it."""
        is_open = [each for each in self.sessions if each.state is SessionState.OPEN]
        asked = is_open if search.is_overdue else self.sessions
        # Without a processor its worker may still come to the next.
        if search.is_final and is_open and all(each in search.without for each in asked):
            code, request_id = ErrorCode.ERROR_CODE_UNKNOWN_REQUEST, request.tokens.request_id
            self._broken(request, search.error or request_error(request_id, code, "no processor has it"))

    def look(self, now: float) -> None:
        """End the searches whose time is over; to be called once a heartbeat's interval."""
        self._count_missing(now)
        for request in self._homeless():
            search = request.search
            if search is None:
                continue
            if search.since is None:
                search.since, search.is_final = now, False
            self._count_search(search, now)
            if now - search.since >= self._patience:
                message = f"no processor answered for {round(self._patience * 1000)} ms"
                code, request_id = ErrorCode.ERROR_CODE_DEADLINE, request.tokens.request_id
                self._broken(request, search.error or request_error(request_id, code, message))
            elif request.generate is not None:
                if self._workers_may_come():  # perhaps at one that had none
                    search.without &= {each for each in self.sessions if each.is_closing}
                self._place(request, request.generate, search)
            elif search.is_final or not (search.is_overdue or now - search.since >= self._grace()):
                self._conclude(request, search)
            else:  # its worker has had the time to come
                search.is_final = True
                search.without.clear()
                for session in self.sessions:
                    self._ask(session, request)
        self._flush_ends()

    def _count_missing(self, now: float) -> None:
        """Give up the workers that have come to no processor, though there was one for long enough."""
        passed, self._looked_at = now - (now if self._looked_at is None else self._looked_at), now
        if not any(each.state is SessionState.OPEN for each in self.sessions):
            return
        left = {worker: seconds - passed for worker, seconds in self._missing.items()}
        self._missing = {worker: seconds for worker, seconds in left.items() if seconds > 0}

    def _count_search(self, search: Search, now: float) -> None:
        if search.looked_at is not None and any(each.state is SessionState.OPEN for each in self.sessions):
            search.searched += now - search.looked_at
        search.looked_at = now
        grace = self._grace()
        # Where no processor stayed, a worker that lives may have found none.
        has_stayed = any(each.heard_for(now) >= grace for each in self.sessions)
        search.is_overdue = search.error is not None and has_stayed and search.searched >= _OVERDUE * grace

    def _grace(self, *, is_told: bool = False) -> float:
        """How long a worker may take to come to another processor, in seconds; it asks each in turn.

        `is_told`: its processor let go of it. Else the worker may notice the loss only after the timeout.
        """
        notices = (each.interval if is_told else 2 * each.timeout for each in self.sessions)
        return max(notices, default=0) + sum(each.interval for each in self.sessions if not each.has_gone)


def _resume(request: OpenRequest, *, only_if_here: bool = False) -> Resume:
    return Resume(
        request_key=request.key,
        next_position=request.next_position,
        include_draft_logprobs=request.include_drafts,
        deadline_unix_ms=request.deadline_unix_ms,
        only_if_here=only_if_here,
    )


def _next_key(key: int) -> int:
    """Return the key to send a request anew under, computed from the one before, as a reader of a log can do, too."""
    return int.from_bytes(blake2b(key.to_bytes(8, "big"), digest_size=8).digest(), "big") or 1


def _places(draft: LogprobBatch, target: LogprobBatch) -> npt.NDArray[np.intp]:
    return np.flatnonzero(np.isin(draft.request_keys, target.request_keys))
