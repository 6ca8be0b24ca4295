"""Resumes: requests that a client takes up again, after it or the processor was away."""

from collections.abc import Callable

import numpy as np

from tokenbus.delivery import PendingAck
from tokenbus.delivery.errors import request_error
from tokenbus.delivery.step import FINISHED
from tokenbus.processor.client_frames import RequestIds
from tokenbus.processor.request_registry import RequestRegistry
from tokenbus.processor.requests import NO_OWNER, Ended, Request, State, client_payer
from tokenbus.processor.session import Session, drafts_of
from tokenbus_contracts import LogprobBatch, RowStatus
from tokenbus_contracts.generated.client_pb2 import Resume
from tokenbus_contracts.generated.request_pb2 import ErrorCode, RequestError

_Rows = tuple[LogprobBatch, LogprobBatch | None, PendingAck]
_CHEAP_SEARCH = 64
"""How many queued frames may be looked through at any time; more than that, once a tick."""
_MOST_PUT_OFF = 1024
"""Of requests that another client resumed first, and that no worker has vouched for yet."""


class Resumes:
    """Takes up again what clients resume, all that came in the same moment together: those requests share steps.

    A request belongs to the client that asked for it. To another client that resumes it there is none.
    """

    def __init__(
        self,
        registry: RequestRegistry,
        sessions: dict[int, Session],
        is_alive: Callable[[Session], bool],
        call_soon: Callable[[Callable[[], None]], object],
    ) -> None:
        self._registry = registry
        self._sessions = sessions
        self._is_alive = is_alive
        self._call_soon = call_soon
        self._waiting: dict[tuple[int, int], Resume] = {}
        self._put_off: dict[tuple[int, int], tuple[Resume, float]] = {}
        """Resumes of what another session has, and since when they wait: until its owner is known, or its life over."""
        self._is_searched_out = False

    def add(self, session: Session, resume: Resume) -> None:
        """Take one up, with those that come in the same moment."""
        self._waiting[session.id, resume.request_id] = resume
        if len(self._waiting) == 1 and not self._is_searched_out:
            self._call_soon(self.take_up)

    def tick(self, *, are_back: bool) -> None:
        """Take up what was put off, or had to wait because much had been looked through; end what no worker has.

        That is known once all workers had the time to come back, `are_back`, and have sent again what they retained.
        """
        self._is_searched_out = False
        if are_back and self._registry.workers.are_caught_up:
            for request in self._registry.table.resumed():
                if not self._registry.is_in_open_step(request):
                    self._registry.fail_unknown(request)
        for place, (resume, _) in self._put_off.items():
            self._waiting.setdefault(place, resume)
        if self._waiting:
            self.take_up()

    def take_up(self) -> None:
        """Take up the requests that were resumed: what waits goes to their clients, and so does what follows."""
        if self._is_searched_out:
            return
        waiting, self._waiting = self._waiting, {}
        self._put_off = {place: entry for place, entry in self._put_off.items() if place[0] in self._sessions}
        resumed = [(self._sessions[place[0]], each) for place, each in waiting.items() if place[0] in self._sessions]
        found = self._search(resumed)
        sessions = {session for session, _ in resumed}
        for session in sessions:
            session.gather()
        for session, resume in resumed:
            error = self._take_up(session, resume, found.get(resume.request_id, []))
            if error is not None:
                session.put_error(error)
        for session in sessions:
            session.send_gathered()

    # What is found where.

    def _search(self, resumed: list[tuple[Session, Resume]]) -> dict[int, list[_Rows]]:
        """Return the rows of resumed requests that are on their way to other sessions of the same owners."""
        wanted: dict[int, set[int]] = {}
        for session, resume in resumed:
            if not self._is_on_its_way(session, resume.request_id):
                wanted.setdefault(session.owner, set()).add(resume.request_id)
        found: dict[int, list[_Rows]] = {}
        asking = {session.id for session, _ in resumed}
        searched = 0
        for other in self._sessions.values():
            ids = wanted.get(other.owner)
            if not ids or (asking == {other.id}):
                continue
            searched += len(other.send_queue)
            self._search_one(other, np.array(sorted(ids), np.uint64), found)
        self._is_searched_out = searched > _CHEAP_SEARCH
        return found

    def _search_one(self, other: Session, ids: RequestIds, found: dict[int, list[_Rows]]) -> None:
        for frame in other.send_queue.frames_of(ids):
            if frame.pending_ack is None or not frame.parts:
                continue
            target, draft = frame.rows_of(ids, other.limits)
            for row, request_id in enumerate(target.request_ids.tolist()):
                rows = target.select([row]), draft and drafts_of(draft, request_id), frame.pending_ack
                found.setdefault(request_id, []).append(rows)

    def _is_on_its_way(self, session: Session, request_id: int) -> bool:
        """Tell whether a request's last row waits in the session's own queue: it comes without being looked for."""
        ended = self._registry.table.ended(request_id)
        if ended is None:
            request = self._registry.table.get(request_id)
            return request is not None and self._registry.consumer_of(request) is session
        return has_last_row(session, ended)

    # What becomes of one.

    def _take_up(self, session: Session, resume: Resume, found: list[_Rows]) -> RequestError | None:
        request_id, table = resume.request_id, self._registry.table
        _, since = self._put_off.pop((session.id, request_id), (resume, session.last_heard))
        ended, request = table.ended(request_id), table.get(request_id)
        if ended is not None:
            return self._take_rest(session, resume, ended, found)
        if request is None:
            return self._take_unknown(session, resume)
        holder = self._registry.consumer_of(request)
        if request.is_claimed and holder is not session:
            return self._take_over(session, resume, request, found, since)
        if request.owner not in (NO_OWNER, session.owner):
            return self._registry.not_theirs(request_id, session.name)
        return self._claim(session, resume)

    def _take_unknown(self, session: Session, resume: Resume) -> RequestError | None:
        """Take up what this life of the processor has not met; a worker may have named its owner.

        A worker that has just come may have its last rows, which it has not sent again yet, and have named it no more.
        """
        request_id, source = resume.request_id, self._registry.workers.source_of(resume.request_id)
        self._registry.table.asked_again(request_id, session.owner)
        if source is not None and source.owners[request_id] not in (NO_OWNER, session.owner):
            return self._registry.not_theirs(request_id, session.name)
        if full := self._registry.table.limit_for(client_payer(session.owner)):
            return request_error(request_id, ErrorCode.ERROR_CODE_OVERLOADED, full)
        self._claim(session, resume)
        if source is not None:
            self._registry.answer(request_id, source)
        return None

    def _take_over(
        self, session: Session, resume: Resume, request: Request, found: list[_Rows], since: float
    ) -> RequestError | None:
        """Take a request from another session, if that is an earlier life of the same client; `since` it is wanted."""
        request_id, holder = request.id, self._registry.consumer_of(request)
        if holder is None or request.owner != session.owner:
            if self._registry.table.state_of(request) is not State.RESUMED:
                return self._registry.not_theirs(request_id, session.name)
            # Until a worker names the owner: the first that came has no better right.
            if len(self._put_off) < _MOST_PUT_OFF:
                self._put_off[session.id, request_id] = resume, since
            return None
        if not session.is_proven and self._is_alive(holder):
            # A life that was killed looks alive until its silence has lasted; one that is heard again lives.
            if holder.last_heard > since:
                return self._registry.not_theirs(request_id, session.name)
            self._put_off[session.id, request_id] = resume, since
            return None
        holder.requests.discard(request_id)
        holder.put_error(request_error(request_id, ErrorCode.ERROR_CODE_TAKEN_UP, "another connection took it up"))
        error = self._claim(session, resume, settle=False)
        rest, reached = _continuing(found, resume.next_position)
        next_position = int(self._registry.table.next_position[request.slot])
        if reached < next_position:
            kept = (int(rows[0].positions[0]) for rows in found)
            begin = min((each for each in kept if each > reached), default=next_position)
            lost = f"tokens {reached} to {begin - 1} were acknowledged before and are not kept"
            self._registry.fail(request, ErrorCode.ERROR_CODE_GAP, lost)
            return error
        for rows in rest:
            session.put_outputs(*rows)
        self._settle(session, request)
        return error

    def _claim(self, session: Session, resume: Resume, *, settle: bool = True) -> RequestError | None:
        """Lead a request to a session; return the error that it ended with before, if it did."""
        registry, request_id = self._registry, resume.request_id
        before = registry.table.get(request_id)
        was_claimed = before is not None and before.is_claimed
        request = registry.claim(
            request_id,
            resume.next_position,
            session.route,
            drafts=resume.include_draft_logprobs,
            owner=session.owner,
            deadline_unix_ms=resume.deadline_unix_ms,
        )
        session.requests.add(request_id)
        error = None
        if not was_claimed:
            error = request.error
            for chunk, pending_ack in request.scores:
                session.scored(request, chunk, pending_ack)
                pending_ack.release()
            request.scores = []
            for step, row in registry.table.take_rows(request):
                target, draft = step.rows.select([row]), step.draft_rows
                count = int(target.token_counts[0])
                had = min(max(0, resume.next_position - int(target.positions[0])), count)
                if had < count or RowStatus(target.statuses[0]) in FINISHED:
                    if had:
                        target, draft = target.between(np.array([had]), target.token_counts), None
                    session.put_outputs(target, draft and drafts_of(draft, request_id), step.pending_ack)
                step.pending_ack.release()
        if settle:
            self._settle(session, request)
        return error

    def _settle(self, session: Session, request: Request) -> None:
        table = self._registry.table
        if table.get(request.id) is request and table.state_of(request) is State.ENDED:
            table.close(request, None)
        if table.get(request.id) is not request:  # it had ended
            session.requests.discard(request.id)

    def _take_rest(self, session: Session, resume: Resume, ended: Ended, found: list[_Rows]) -> RequestError | None:
        """Give a client what is still on its way of a request that has ended, or return why not."""
        request_id, position = resume.request_id, resume.next_position
        if ended.owner not in (NO_OWNER, session.owner):
            return self._registry.not_theirs(request_id, session.name)
        if ended.error is not None:
            return ended.error
        if has_last_row(session, ended):
            return None
        rest, _ = _continuing(found, position)
        if rest and RowStatus(rest[-1][0].statuses[0]) in FINISHED:
            for rows in rest:
                session.put_outputs(*rows)
            return None
        message = "it has ended, and what it had was taken before"
        return request_error(request_id, ErrorCode.ERROR_CODE_UNKNOWN_REQUEST, message, emitted_tokens=ended.tokens)


def _continuing(found: list[_Rows], position: int) -> tuple[list[_Rows], int]:
    """Return the rows of a request that continue from a position, and the position behind them.

    Several earlier lives of a client may each have some of the rows in their queues, or the same: each is taken once.
    """
    rest: list[_Rows] = []
    for rows in sorted(found, key=lambda entry: int(entry[0].positions[0])):
        target = rows[0]
        begin, status = int(target.positions[0]), RowStatus(target.statuses[0])
        end = begin + int(target.token_counts[0])
        if begin <= position and (end > position or (end == position and status in FINISHED)):
            rest.append(rows)
            position = end
            if status in FINISHED:
                break
    return rest, position


def has_last_row(session: Session, ended: Ended) -> bool:
    """Tell whether a session's queue has the last row of a request that has ended."""
    return (
        ended.last_frame is not None
        and ended.last_frame[0] == session.route  # its id a client that was given up has again
        and session.send_queue.still_holds(ended.last_frame[1])
    )
