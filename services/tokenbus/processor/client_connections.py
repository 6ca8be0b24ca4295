"""The processor's side of the client protocol: handshakes, requests, acks, and the eviction of slow clients."""

from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from itertools import count
from math import inf

from google.protobuf.message import DecodeError

from tokenbus.bus import Identity, Outcome, Role
from tokenbus.delivery import AckTracker, PendingAck
from tokenbus.delivery.errors import request_error
from tokenbus.logs import logger
from tokenbus.processor.client_frames import emitted_in
from tokenbus.processor.connections import Connections, Peers, RefusedError, protocol_error
from tokenbus.processor.dispatch import Dispatch
from tokenbus.processor.open_commands import OpenCommands
from tokenbus.processor.refused_messages import RefusedMessages
from tokenbus.processor.requests import NO_OWNER, UNCLAIMED
from tokenbus.processor.resumes import Resumes, has_last_row
from tokenbus.processor.send_queue import Budget, SendQueue
from tokenbus.processor.session import Session
from tokenbus.processor.status import STATUS_BURST_SECONDS, STATUS_INTERVAL, StatusReport
from tokenbus.processor.watchers import Watchers
from tokenbus.settings import Settings
from tokenbus_contracts import ContractError, Rule
from tokenbus_contracts.frames import read_frame, write_frame
from tokenbus_contracts.generated.client_pb2 import (
    ClientFrame,
    ClientHello,
    ClientWelcome,
    Ended,
    Resume,
    Room,
    ServerFrame,
)
from tokenbus_contracts.generated.control_pb2 import Control
from tokenbus_contracts.generated.request_pb2 import ErrorCode, Generate, RequestError
from tokenbus_contracts.generated.stream_pb2 import RefusalReason

_log = logger("processor")
_MOST_HANDSHAKES = 10
"""Number of handshakes that a client may make in quick succession."""
_GATHER_SECONDS = 0.001
"""Maximum time for which frames are gathered while more steps arrive."""
_ROOM_SECONDS = 0.0002
"""Seconds per client: with n clients, two broadcasts of Room messages are at least n times this period apart."""
_LARGE_SHARE = 0.25
"""A client's frames count as large if they fill more than this fraction of the consumers' buffer."""


class ClientConnections(Connections[Session]):
    """Handles frames from clients, and sends each client the frames in its send queue."""

    def __init__(
        self,
        settings: Settings,
        dispatch: Dispatch,
        refused_messages: RefusedMessages,
        now: Callable[[], float],
        call_soon: Callable[[Callable[[], None]], object],
    ) -> None:
        """Create the connections; `call_soon` calls a function after the arrived messages are handled."""
        self.sessions: dict[int, Session] = {}
        super().__init__("client", ClientFrame, Peers(ServerFrame), self.sessions, settings, refused_messages)
        self._now = now
        self._registry = dispatch.registry
        self._dispatch = dispatch
        self._routes = count(UNCLAIMED + 1)
        self._budget = Budget(settings.clients.buffer_bytes)
        self.watchers = Watchers(dispatch.workers.by_id)
        self._status = StatusReport(settings.processor.id, dispatch)
        self.commands = OpenCommands(dispatch.workers, on_adapters=self._status.expire)
        self._room: tuple[float, int, Room, list[bytes]] | None = None
        self.resumes = Resumes(
            self._registry, self.sessions, lambda session: self._is_alive(session, self._now()), call_soon
        )
        self._gathered: dict[Session, None] = {}
        self._gathers_until = -inf
        self.on_ack: Callable[[], object] = lambda: None
        """Callback that runs after a client has acknowledged frames."""
        self.evicted = 0
        """Number of evictions because a client's send queue was too full."""

    def _refuse_frame(self, peer: bytes, known: Session | None, frame: bytes, error: ContractError) -> None:
        super()._refuse_frame(peer, known, frame, error)
        if known is None:
            return
        request_id = 0
        with suppress(DecodeError):
            parsed = ClientFrame.FromString(frame)
            body = parsed.WhichOneof("body")
            request_id = getattr(getattr(parsed, body), "request_id", 0) if body else 0
        known.put_error(request_error(request_id, ErrorCode.ERROR_CODE_INVALID_REQUEST, str(error)))

    def _handle(self, peer: bytes, known: Session | None, parts: list[bytes], now: float) -> None:
        if len(parts) != 1:
            raise ContractError("message", "one part", len(parts), rule=Rule.LENGTH)
        frame = read_frame(ClientFrame, parts[0])
        body = frame.WhichOneof("body")
        if body == "hello":
            self._hello(peer, frame.hello, now)
        elif known is None:
            self._ask_for_handshake(peer, now)
        elif body == "goodbye":
            self._end(known, "it said goodbye")
        else:
            known.last_heard = now
            self._frame(known, frame, body)

    def _frame(self, session: Session, frame: ClientFrame, body: str | None) -> None:
        match body:
            case "generate":
                self._generate(session, frame.generate)
            case "abort":
                self._abort(session, frame.abort.request_id)
            case "resume":
                _check_role(session, Role.CLIENT)
                self.resumes.add(session, frame.resume)
            case "ended":
                self._ended(session, frame.ended)
            case "confirm":
                self._ack(session, frame.confirm.through_number)
            case "watch":
                _check_role(session, Role.OBSERVER)
                self.watchers.add(session, frame.watch.worker_id)
            case "control":
                self._control(session, frame.control)
            case "heartbeat":
                session.echo_ns = frame.heartbeat.sent_at_ns
            case "status":
                session.wants_status = True
                self._send_status(session, session.last_heard)

    def _control(self, session: Session, control: Control) -> None:
        try:
            _check_role(session, Role.OPERATOR)
            if not session.is_proven and not self._settings.gateway.control:
                message = "commands not granted to a peer without a key, as gateway.control is false"
                raise RefusedError(RefusalReason.REFUSAL_REASON_NOT_AUTHORIZED, message)  # noqa: TRY301
        except RefusedError as refused:
            # The client's requests continue, because only the command is refused.
            self._count_refused(session, refused)
            self.commands.refuse(session, control, str(refused))
        else:
            self.commands.submit(session, control)

    def _abort(self, session: Session, request_id: int) -> None:
        """Abort a request of the session's owner, even if another session of the same owner reads the request."""
        request = self._registry.table.get(request_id)
        if request is not None and request.is_claimed and request.owner == session.owner:
            self._registry.abort(request_id)

    def _ended(self, session: Session, ended: Ended) -> None:
        _check_role(session, Role.CLIENT)
        for request_id in ended.request_ids:
            if self._registry.is_read_by(request_id, session):
                self._registry.abort(request_id)
            self._registry.client_ended(request_id, session.owner)

    def _ack(self, session: Session, number: int) -> None:
        if not session.send_queue.ack(number):
            raise ContractError("confirm.through_number", "a number that was sent", number)
        self._flush(session)
        self.on_ack()

    def _generate(self, session: Session, generate: Generate) -> None:
        _check_role(session, Role.CLIENT)
        request_id, table = generate.request_id, self._registry.table
        if self._registry.is_read_by(request_id, session):
            return  # the client repeats the request, because the connection broke before the answer arrived
        ended, known = table.ended(request_id), table.get(request_id)
        if ended is not None and ended.asked_after != session.hellos and has_last_row(session, ended):
            return  # the client repeats a request that has ended, and its send queue contains the last rows
        is_open = known is not None and not known.is_claimed and known.owner in (NO_OWNER, session.owner)
        is_at_worker = known is None and ended is None and self._registry.workers.source_of(request_id) is not None
        if is_open or is_at_worker:
            # The client repeats a request that an earlier incarnation of this processor had sent to a worker.
            again = Resume(
                request_id=request_id,
                include_draft_logprobs=generate.include_draft_logprobs,
                deadline_unix_ms=generate.deadline_unix_ms,
            )
            self.resumes.add(session, again)
            return
        if self.is_draining:
            overloaded = ErrorCode.ERROR_CODE_OVERLOADED
            session.put_error(request_error(request_id, overloaded, "the processor is closing"))
            return
        request = self._dispatch.submit(generate, session.route, session.owner)
        if isinstance(request, RequestError):
            session.put_error(request)
        else:
            request.asked_after = session.hellos

    def _hello(self, peer: bytes, hello: ClientHello, now: float) -> None:
        identity = self.peers.listener.identity(peer)
        roles = identity.roles if identity.may(Role.CLIENT, hello.name) else identity.roles - {Role.CLIENT}
        if not roles & {Role.CLIENT, Role.OBSERVER, Role.OPERATOR}:
            message = f"key {identity.name} may not be client {hello.name}"
            raise RefusedError(RefusalReason.REFUSAL_REASON_NOT_AUTHORIZED, message)
        owner = owner_of(identity, hello.name)
        session = self.sessions.get(hello.session)
        resumed = session is not None and session.hellos > 0
        if session is not None and (session.owner != owner or not self._is_same_life(session, peer, hello.proof, now)):
            message = f"hello.session: {hello.session:016x} is another client's"
            raise RefusedError(RefusalReason.REFUSAL_REASON_SESSION_TAKEN, message)
        if self.peers.at(peer) not in {None, session}:
            raise protocol_error("hello.session: one session for each connection")
        if session is None:
            self._make_room()
            session = self._new_session(hello, owner)
        if not self._may_shake_hands(session, now):
            return
        session.is_proven, session.roles = bool(identity.name), roles
        session.knows_others, session.room = hello.wants_room, None
        is_new = session.peer != peer
        self._connect(session, peer, now)
        welcome = ClientWelcome(resumed=resumed, owner=owner, **self._welcome())
        if self.peers.send(session, ServerFrame(welcome=welcome)) is not Outcome.SENT:
            # Without the welcome, the client would take the renumbered frames for frames that it already has.
            self.peers.disconnect(session)
            return
        session.hellos += 1
        session.send_queue.connect(hello.window_frames, hello.window_bytes)
        if is_new:
            _log.info("client connected", client=session.name, resumed=resumed)
        if session.knows_others:
            self._send_room(session, now, is_due=True)
        self._flush(session)

    def _may_shake_hands(self, session: Session, now: float) -> bool:
        """Return whether a client is within the limit on handshakes, each of which resends unacknowledged frames.

        A hello beyond the limit is ignored, because a client repeats its hello many times while the processor stalls.
        """
        passed = (now - session.handshakes_at) / self._interval
        session.handshakes, session.handshakes_at = max(0.0, session.handshakes - passed), now
        if session.handshakes + 1 > _MOST_HANDSHAKES:
            limit = f"at most {_MOST_HANDSHAKES} at once, then one in {self._interval:g} s"
            self._warn_once(("hello", session.id), "hello not answered", session, limit=limit)
            return False
        session.handshakes += 1
        return True

    def _make_room(self) -> None:
        """Remove an idle client if the limit on clients is reached; disconnected clients are removed first."""
        most = self._settings.clients.max_clients
        if len(self.sessions) < most:
            return
        sessions = [each for each in self.sessions.values() if each not in self.watchers]
        busy = set(self._registry.table.route.tolist())
        idle = [each for each in sessions if each.route not in busy and not len(each.send_queue)]
        if not idle:
            raise RefusedError(RefusalReason.REFUSAL_REASON_TOO_MANY_WORKERS, f"clients: at most {most}")
        self._end(min(idle, key=lambda session: session.peer is not None), "another client needs its place")

    def _new_session(self, hello: ClientHello, owner: int) -> Session:
        clients = self._settings.clients
        session = Session(
            id=hello.session,
            name=hello.name,
            log_fields={"client": hello.name},
            owner=owner,
            proof=hello.proof,
            route=next(self._routes),
            send_queue=SendQueue(clients.send_queue_frames, clients.send_queue_bytes, self._budget),
            table=self._registry.table,
            limits=self._settings.limits,
            on_frame=self._put,
        )
        self.sessions[hello.session] = session
        self._registry.consumers[session.route] = session
        return session

    def _end(self, session: Session, why: str) -> None:
        self.peers.cut_off(session)
        self.sessions.pop(session.id, None)
        # The queue is discarded before the requests fail, because each failure would put another frame into the queue.
        self._registry.consumers.pop(session.route, None)
        session.send_queue.discard()
        self.watchers.remove(session)
        self.commands.forget(session)
        for request in self._registry.table.of_route(session.route):
            self._registry.fail(request, ErrorCode.ERROR_CODE_ABORTED, f"client {session.name} is gone: {why}")
        _log.info("client gone", client=session.name, reason=why)

    def _end_slow(self, session: Session) -> None:
        """Fail requests of a client that reads too slowly or is away, and drop the frames of these requests.

        A gateway is one client for many users. If a few requests fill most of its queue, only these requests fail.
        """
        queue, requests = session.send_queue, self._registry.table.of_route(session.route)
        waiting, size = len(queue), queue.bytes
        self.evicted += 1
        if session.peer is not None and (largest := queue.largest()):
            requests, dropped = [each for each in requests if each.id in largest], queue.drop_own(largest)
            most = f"most of the {waiting} frames with {size} bytes that wait for its client"
            reason = f"{len(largest)} requests have {most}"
            _log.warning("slow requests", client=session.name, ended=len(largest), frames=waiting, bytes=size)
        else:
            self.watchers.remove(session)
            dropped = queue.drop_outputs()
            if queue.is_over_full:
                self._end(session, f"it left {waiting} frames with {size} bytes unacknowledged")
                return
            # A client that was killed may have restarted; its new incarnation is not slow and may resume requests.
            is_away = session.peer is None
            reason = f"its client {'was away and ' if is_away else ''}left {waiting} frames with {size} bytes waiting"
            _log.warning("slow client", client=session.name, frames=waiting, bytes=size, is_away=is_away)
        emitted = emitted_in(dropped, session.limits)
        for request in requests:
            self._registry.fail(request, ErrorCode.ERROR_CODE_SLOW_CLIENT, reason)
            emitted.pop(request.id, None)
        for request_id, tokens in emitted.items():  # these requests have ended, but their last rows were dropped
            if session.id in self.sessions:  # another overflow of the queue may have removed the session
                code = ErrorCode.ERROR_CODE_SLOW_CLIENT
                session.put_error(request_error(request_id, code, reason, emitted_tokens=tokens))

    def evict(self, pending_ack: PendingAck, *, even_small: bool) -> None:
        """Fail requests of the clients that have not acknowledged a step, beginning with the fullest send queue.

        A client that holds a small part of the consumers' buffer is spared unless `even_small` is set.
        """
        queues = {id(queue) for queue in pending_ack.holders}
        slow = [
            session
            for session in self.sessions.values()
            if id(session.send_queue) in queues and (even_small or self._has_large_share(session, pending_ack.stream))
        ]
        for session in sorted(slow, key=lambda session: session.send_queue.bytes, reverse=True):
            self._end_slow(session)

    def _has_large_share(self, session: Session, stream: AckTracker | None) -> bool:
        items, size = (0, 0) if stream is None else session.send_queue.held_of(stream)
        most = self._settings.processor
        return max(items / most.pending_items, size / most.pending_bytes) > _LARGE_SHARE

    def gather(self, now: float) -> None:
        """Gather frames for a millisecond or until `send_gathered`, so that a client wakes once for several steps.

        The caller must call `send_gathered` before any other code runs.
        """
        if now >= self._gathers_until:
            self.send_gathered()
            self._gathers_until = now + _GATHER_SECONDS

    def send_gathered(self) -> None:
        """Send the gathered frames, and stop gathering."""
        gathered, self._gathered, self._gathers_until = self._gathered, {}, -inf
        for session in gathered:
            self._flush(session)

    def _put(self, session: Session) -> None:
        """Send or gather a frame that was put into a client's queue; an overfull queue is flushed at once.

        Frames for a watcher are never gathered, because a waiting frame makes the watcher's window look full.
        """
        is_too_much = session.send_queue.is_over_full or self._budget.is_exceeded
        if is_too_much or self._gathers_until == -inf or session in self.watchers:
            self._flush(session)
        else:
            self._gathered[session] = None

    def _flush(self, known: Session) -> None:
        if known.send_queue.is_over_full:
            self._end_slow(known)
        while self._budget.is_exceeded:
            self._end_slow(max(self.sessions.values(), key=lambda each: each.send_queue.bytes))
        while known.peer is not None and (message := known.send_queue.next_message()) is not None:
            if self.peers.listener.send(known.peer, message) is not Outcome.SENT:
                return
            known.send_queue.sent()

    def _check(self, known: Session, now: float) -> None:
        patience = self._settings.clients.detached_timeout_ms / 1000
        silent = now - known.last_heard
        if known.peer is not None and silent > self._timeout:
            self.peers.cut_off(known)
            _log.warning("client silent", client=known.name)
        if known.peer is None and silent > self._timeout + patience:
            self._end(known, f"it did not come back within {self._settings.clients.detached_timeout_ms} ms")
        elif known.peer is not None:
            self._flush(known)
            self._send_status(known, now)
            is_due = now >= known.next_heartbeat
            if is_due:
                self._send_heartbeat(known, now)
            if known.knows_others:
                self._send_room(known, now, is_due=is_due)

    def _send_status(self, session: Session, now: float) -> None:
        """Answer a status request. If the request comes too early or the connection is full, a later tick answers."""
        if session.wants_status and now >= session.next_status:
            connected = sum(each.peer is not None for each in self.sessions.values())
            message = self._status.message(now, connected)
            if session.peer is not None and self.peers.listener.send(session.peer, message) is Outcome.SENT:
                session.wants_status = False
                session.next_status = max(session.next_status, now - STATUS_BURST_SECONDS) + STATUS_INTERVAL

    def _send_room(self, session: Session, now: float, *, is_due: bool) -> None:
        """Tell a client how many requests the workers can still accept, after a worker's handshake or with a heartbeat.

        While many workers connect, for example after a restart, one message covers several handshakes.
        """
        if self._room is None or self._room[0] != now:
            room = self._dispatch.room()
            self._room = now, self._dispatch.workers.arrivals, room, [write_frame(ServerFrame(room=room))]
        _, arrivals, room, message = self._room
        seconds = _ROOM_SECONDS * len(self.sessions)
        has_arrival = session.room is None or (arrivals != session.arrivals and now - session.room_at >= seconds)
        if session.peer is None or not (has_arrival or (is_due and room != session.room)):
            return
        if self.peers.listener.send(session.peer, message) is Outcome.SENT:
            session.room, session.room_at, session.arrivals = room, now, arrivals


def owner_of(identity: Identity, name: str) -> int:
    """Return the owner of a client's requests: a hash of its key's name, or without a key, of the client's name."""
    text = f"key {identity.name}" if identity.name else f"name {name}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) or 1


def _check_role(session: Session, role: Role) -> None:
    if role not in session.roles:
        raise RefusedError(RefusalReason.REFUSAL_REASON_NOT_AUTHORIZED, f"role {role}: not granted to this key")
