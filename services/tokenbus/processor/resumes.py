"""Resumes: clients continue to read requests after a client or the processor was away."""

from collections.abc import Callable

import numpy as np

from tokenbus.delivery import PendingAck
from tokenbus.delivery.errors import request_error
from tokenbus.delivery.step import FINISHED
from tokenbus.processor.request_registry import RequestRegistry
from tokenbus.processor.requests import NO_OWNER, Ended, Request, State, client_payer
from tokenbus.processor.session import Session, drafts_of
from tokenbus_contracts import LogprobBatch, RowStatus
from tokenbus_contracts.generated.client_pb2 import Resume
from tokenbus_contracts.generated.request_pb2 import ErrorCode, RequestError

_Rows = tuple[LogprobBatch, LogprobBatch | None, PendingAck]
_CHEAP_SEARCH = 64
"""A search of more queued frames than this number is made at most once per tick."""
_MAX_DEFERRED = 1024
"""Maximum number of deferred resumes, which wait until a worker names the owner of the request."""


class Resumes:
    """Resumes requests, several at once if possible, because rows of the same step can share a frame.

    A request belongs to the client that sent it. Another client that resumes it gets the error `unknown_request`.
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
        self._deferred: dict[tuple[int, int], tuple[Resume, float]] = {}
        """Deferred resumes of requests that another session reads, with the time of the first attempt.

        Such a resume waits until the owner is known, or until the other session is known to be dead.
        """
        self._is_exhausted = False
        """Whether the next search of queued frames must wait for the next tick."""

    def add(self, session: Session, resume: Resume) -> None:
        self._waiting[session.id, resume.request_id] = resume
        if len(self._waiting) == 1 and not self._is_exhausted:
            self._call_soon(self.resume_all)

    def tick(self, *, are_back: bool) -> None:
        """Retry the deferred resumes, and fail resumed requests that no worker has.

        A request is failed only after all workers had time to reconnect (`are_back`) and have replayed their items.
        """
        self._is_exhausted = False
        workers = self._registry.workers.by_id.values()
        if are_back and all(worker.reconcile is None for worker in workers):
            for request in self._registry.table.resumed():
                if not any(worker.assembler.has_last_row(request.id) for worker in workers):
                    self._registry.fail(request, ErrorCode.ERROR_CODE_UNKNOWN_REQUEST, "no worker has it")
        for key, (resume, _) in self._deferred.items():
            self._waiting.setdefault(key, resume)
        if self._waiting:
            self.resume_all()

    def resume_all(self) -> None:
        """Deliver the waiting rows of the resumed requests, and route later rows to the same clients."""
        if self._is_exhausted:
            return
        waiting, self._waiting = self._waiting, {}
        self._deferred = {key: entry for key, entry in self._deferred.items() if key[0] in self._sessions}
        resumed = [(self._sessions[key[0]], each) for key, each in waiting.items() if key[0] in self._sessions]
        found = self._search(resumed)
        sessions = {session for session, _ in resumed}
        for session in sessions:
            session.gather()
        for session, resume in resumed:
            if (error := self._resume(session, resume, found.get(resume.request_id, []))) is not None:
                session.put_error(error)
        for session in sessions:
            session.send_gathered()

    def _search(self, resumed: list[tuple[Session, Resume]]) -> dict[int, list[_Rows]]:
        """Return the rows of resumed requests that are in the send queues of other sessions with the same owners."""
        wanted: dict[int, set[int]] = {}
        for session, resume in resumed:
            if not self._is_queued_for(session, resume.request_id):
                wanted.setdefault(session.owner, set()).add(resume.request_id)
        found: dict[int, list[_Rows]] = {}
        asking = {session.id for session, _ in resumed}
        searched = 0
        for other in self._sessions.values():
            if other.owner not in wanted or asking == {other.id}:
                continue
            searched += len(other.send_queue)
            ids = np.array(sorted(wanted[other.owner]), np.uint64)
            for frame in other.send_queue.frames_of(ids):
                if frame.pending_ack is None or not frame.parts:
                    continue
                target, draft = frame.rows_of(ids, other.limits)
                for row, request_id in enumerate(target.request_ids.tolist()):
                    rows = target.select([row]), draft and drafts_of(draft, request_id), frame.pending_ack
                    found.setdefault(request_id, []).append(rows)
        self._is_exhausted = searched > _CHEAP_SEARCH
        return found

    def _is_queued_for(self, session: Session, request_id: int) -> bool:
        """Return whether the session's own queue has the remaining rows of a request, or will get them."""
        ended = self._registry.table.ended(request_id)
        if ended is None:
            return self._registry.is_read_by(request_id, session)
        return has_last_row(session, ended)

    def _resume(self, session: Session, resume: Resume, found: list[_Rows]) -> RequestError | None:
        request_id, table = resume.request_id, self._registry.table
        _, since = self._deferred.pop((session.id, request_id), (resume, session.last_heard))
        ended, request = table.ended(request_id), table.get(request_id)
        if ended is not None:
            return self._resume_ended(session, resume, ended, found)
        if request is None:
            return self._resume_unknown(session, resume)
        holder = self._registry.consumer_of(request)
        if request.is_claimed and holder is not session:
            return self._take_over(session, resume, request, found, since)
        if request.owner not in (NO_OWNER, session.owner):
            return self._registry.refuse_resume(request_id, session.name)
        return self._claim(session, resume)

    def _resume_unknown(self, session: Session, resume: Resume) -> RequestError | None:
        """Resume a request that this incarnation of the processor does not know.

        The hello of a worker may have named the owner of the request. If the request has ended at the worker, the hello
        does not name it, but its last rows may still be replayed.
        """
        request_id, source = resume.request_id, self._registry.workers.source_of(resume.request_id)
        self._registry.table.forget_end_at_client(request_id, session.owner)
        if source is not None and source.owners[request_id] not in (NO_OWNER, session.owner):
            return self._registry.refuse_resume(request_id, session.name)
        if full := self._registry.table.limit_for(client_payer(session.owner)):
            return request_error(request_id, ErrorCode.ERROR_CODE_OVERLOADED, full)
        self._claim(session, resume)
        if source is not None:
            self._registry.on_worker_has(request_id, source)
        return None

    def _take_over(
        self, session: Session, resume: Resume, request: Request, found: list[_Rows], since: float
    ) -> RequestError | None:
        """Move a request to this session from another session, an earlier incarnation of the same client.

        `since` is the time of the first attempt.
        """
        request_id, holder = request.id, self._registry.consumer_of(request)
        if holder is None or request.owner != session.owner:
            if self._registry.table.state_of(request) is not State.RESUMED:
                return self._registry.refuse_resume(request_id, session.name)
            # The first client to resume may not be the owner, so this attempt waits until a worker names the owner.
            if len(self._deferred) < _MAX_DEFERRED:
                self._deferred[session.id, request_id] = resume, since
            return None
        if not session.is_proven and self._is_alive(holder):
            # A killed session seems alive until the timeout, so this attempt is deferred.
            # A session that has sent something since the first attempt is certainly alive.
            if holder.last_heard > since:
                return self._registry.refuse_resume(request_id, session.name)
            self._deferred[session.id, request_id] = resume, since
            return None
        self._registry.claim(resume, session.route, session.owner)
        holder.put_error(request_error(request_id, ErrorCode.ERROR_CODE_TAKEN_UP, "another connection resumed it"))
        rest, reached = _continuing(found, resume.next_position)
        next_position = int(self._registry.table.next_position[request.slot])
        if reached < next_position:
            kept = (int(rows[0].positions[0]) for rows in found)
            begin = min((each for each in kept if each > reached), default=next_position)
            lost = f"tokens {reached} to {begin - 1} were acknowledged before and are not kept"
            self._registry.fail(request, ErrorCode.ERROR_CODE_GAP, lost)
            return None
        for rows in rest:
            session.put_outputs(*rows)
        self._settle(request)
        return None

    def _claim(self, session: Session, resume: Resume) -> RequestError | None:
        """Route a request to a session and deliver the waiting rows; return the request's error, if it has one."""
        request = self._registry.claim(resume, session.route, session.owner)
        for chunk, pending_ack in request.scores:
            session.scored(request, chunk, pending_ack)
            pending_ack.release()
        request.scores = []
        for step, row in self._registry.table.take_rows(request):
            target, draft = step.rows.select([row]), step.draft_rows
            count = int(target.token_counts[0])
            had = min(max(0, resume.next_position - int(target.positions[0])), count)
            if had < count or RowStatus(target.statuses[0]) in FINISHED:
                if had:
                    target, draft = target.between(np.array([had]), target.token_counts), None
                session.put_outputs(target, draft and drafts_of(draft, request.id), step.pending_ack)
            step.pending_ack.release()
        self._settle(request)
        return request.error

    def _settle(self, request: Request) -> None:
        table = self._registry.table
        if table.get(request.id) is request and table.state_of(request) is State.ENDED:
            table.close(request, None)

    def _resume_ended(self, session: Session, resume: Resume, ended: Ended, found: list[_Rows]) -> RequestError | None:
        """Deliver the remaining rows of an ended request, or return an error if the last row is no longer kept."""
        request_id, position = resume.request_id, resume.next_position
        if ended.owner not in (NO_OWNER, session.owner):
            return self._registry.refuse_resume(request_id, session.name)
        if ended.error is not None:
            return ended.error
        if has_last_row(session, ended):
            return None
        rest, _ = _continuing(found, position)
        if rest and RowStatus(rest[-1][0].statuses[0]) in FINISHED:
            for rows in rest:
                session.put_outputs(*rows)
            return None
        message = "it has ended, and its tokens were read before"
        return request_error(request_id, ErrorCode.ERROR_CODE_UNKNOWN_REQUEST, message, emitted_tokens=ended.tokens)


def _continuing(found: list[_Rows], position: int) -> tuple[list[_Rows], int]:
    """Return the rows of a request that continue from a position, and the position after these rows.

    The queues of several incarnations of a client may contain the same rows, but each row is returned once.
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
    return (
        ended.last_frame is not None
        and ended.last_frame[0] == session.route  # another client may have had the same session id before
        and session.send_queue.still_holds(ended.last_frame[1])
    )
