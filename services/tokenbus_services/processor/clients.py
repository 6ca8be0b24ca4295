"""The processor's side of the client protocol: requests in, their tokens out, none lost when a client comes back."""

import hmac
from collections import Counter
from collections.abc import Callable
from hashlib import blake2b
from itertools import count

from tokenbus_contracts import ContractError, Rule
from tokenbus_contracts.frames import read_frame, write_frame
from tokenbus_contracts.generated.client_pb2 import (
    ClientFrame,
    ClientHello,
    ClientWelcome,
    Resume,
    ServerFrame,
)
from tokenbus_contracts.generated.request_pb2 import Admitted, ErrorCode, Generate, RequestError
from tokenbus_contracts.generated.stream_pb2 import (
    Goodbye,
    GoodbyeReason,
    Heartbeat,
    Refusal,
    RefusalReason,
)
from tokenbus_contracts.schema import MINOR
from tokenbus_services.bus import Identity, Outcome, Role
from tokenbus_services.delivery import PendingAck
from tokenbus_services.logs import DeduplicatedLog, logger
from tokenbus_services.processor.client_errors import closing_error, error_of, refusal_of
from tokenbus_services.processor.dead_letters import DeadLetters
from tokenbus_services.processor.dispatch import Dispatch
from tokenbus_services.processor.peers import Peers
from tokenbus_services.processor.requests import NO_OWNER, Request
from tokenbus_services.processor.resumes import Resumes, has_last_row
from tokenbus_services.processor.send_queue import Budget, SendQueue, admitted_frame, error_frame, reached_in
from tokenbus_services.processor.session import Session
from tokenbus_services.processor.status import STATUS_INTERVAL, StatusReport
from tokenbus_services.processor.unknown_peers import UnknownPeers
from tokenbus_services.processor.watchers import Watchers
from tokenbus_services.processor.worker import RefusedError, protocol_error
from tokenbus_services.settings import Settings

_log = logger("processor")
_FIRST_ROUTE = 1
_NS = 1_000_000_000
_MOST_HANDSHAKES = 10
"""How many handshakes of a client may follow each other at once."""


class ClientConnections:
    """Takes what clients send, and sends them what is theirs. Without sockets, and without a clock of its own."""

    def __init__(
        self,
        settings: Settings,
        dispatch: Dispatch,
        dead_letters: DeadLetters,
        peers: Peers,
        now: Callable[[], float],
    ) -> None:
        """Take what hands new requests to workers, where refused frames go, the transport's peers, and the time."""
        self._settings = settings
        self._now = now
        self._registry = dispatch.registry
        self._dispatch = dispatch
        self._dead_letters = dead_letters
        self.watchers = Watchers(dispatch.workers)
        self._peers = peers
        self._by_peer: dict[bytes, Session] = {}
        self._routes = count(_FIRST_ROUTE)
        self._repeated_log = DeduplicatedLog()
        self._interval = settings.bus.heartbeat_interval_ms / 1000
        self._unknown_peers = UnknownPeers(self._interval)
        self._timeout = settings.bus.heartbeat_timeout_ms / 1000
        self._budget = Budget(settings.clients.buffer_bytes)
        self.sessions: dict[int, Session] = {}
        self._status = StatusReport(dispatch)
        self.resumes = Resumes(self._registry, self.sessions, self._is_alive)
        self.is_draining = False
        self.refused = 0
        self.refusals: Counter[str] = Counter()
        """How many peers were refused, by why."""
        self.failed_ticks = 0
        self.evicted = 0
        """How many clients lost their requests because too much waited for them."""

    # What comes in.

    def receive(self, peer: bytes, parts: list[bytes], now: float) -> None:
        """Take one message of a peer; whatever it is, it ends nothing but itself."""
        session = self._by_peer.get(peer)
        try:
            self._take(peer, session, parts, now)
        except RefusedError as refused:
            self._refuse(peer, refused)
        except ContractError as error:
            self.refused += 1
            name = session.name if session is not None else "unknown peer"
            self._dead_letters.keep(parts[-1] if parts else b"", error, name)
            self._repeated_log.begin(("frame", name), _log.warning, "frame refused", reason=str(error), client=name)
            if session is None:
                self._tell_refused(peer, protocol_error(error))
            else:
                session.put(error_frame(refusal_of(parts, error)))

    def _take(self, peer: bytes, session: Session | None, parts: list[bytes], now: float) -> None:
        if len(parts) != 1:
            raise ContractError("message", "one part", len(parts), rule=Rule.LENGTH)
        frame = read_frame(ClientFrame, parts[0])
        body = frame.WhichOneof("body")
        if body == "hello":
            self._hello(peer, frame.hello, now)
        elif session is None:
            self._stranger(peer, now)
        else:
            session.last_heard = now
            self._frame(session, frame, body)

    def _frame(self, session: Session, frame: ClientFrame, body: str | None) -> None:
        match body:
            case "generate":
                self._generate(session, frame.generate)
            case "abort":
                if frame.abort.request_key in session.requests:
                    self._registry.abort(frame.abort.request_key)
            case "resume":
                _check_role(session.may_ask, Role.CLIENT)
                self.resumes.add(session, frame.resume)
            case "confirm":
                self._ack(session, frame.confirm.through_number)
            case "watch":
                _check_role(session.may_watch, Role.OBSERVER)
                self.watchers.add(session, frame.watch.worker_id)
            case "heartbeat":
                session.echo_ns = frame.heartbeat.sent_at_ns
            case "status":
                session.wants_status = True
                self._send_status(session, session.last_heard)
            case "goodbye":
                self._end(session, "it said goodbye")

    def _ack(self, session: Session, number: int) -> None:
        if not session.send_queue.ack(number):
            raise ContractError("confirm.through_number", "a number that was sent", number)
        self._send_frames(session)

    def _generate(self, session: Session, generate: Generate) -> None:
        _check_role(session.may_ask, Role.CLIENT)
        key = generate.request_key
        if key in session.requests:  # asked again, because the connection broke before the answer came
            return
        ended, known = self._registry.table.ended(key), self._registry.table.get(key)
        if ended is not None and has_last_row(session, ended):
            return  # the same, and it has ended since: all of it is on its way
        if known is not None and not known.is_claimed and known.owner in (NO_OWNER, session.owner):
            # Asked again for the same reason, after an earlier life of this processor had handed it to a worker.
            again = Resume(
                request_key=key,
                include_draft_logprobs=generate.include_draft_logprobs,
                deadline_unix_ms=generate.deadline_unix_ms,
            )
            self.resumes.add(session, again)
            return
        if self.is_draining:
            error: RequestError | None = closing_error(key)
        else:
            error = self._dispatch.submit(generate, session.route, owner=session.owner, may_wait=True)
        if error is None:
            session.requests.add(key)
        else:
            session.put(error_frame(error))

    # The handshake.

    def _hello(self, peer: bytes, hello: ClientHello, now: float) -> None:
        identity = self._peers.identity(peer)
        may_ask = identity.may(Role.CLIENT, hello.name)
        may_watch = identity.may(Role.OBSERVER)
        if not (may_ask or may_watch):
            message = f"key {identity.name} may not be client {hello.name}"
            raise RefusedError(RefusalReason.REFUSAL_REASON_NOT_AUTHORIZED, message)
        owner = owner_of(identity, hello.name)
        session = self.sessions.get(hello.session)
        resumed = session is not None
        if session is not None:
            self._check_same_life(session, peer, hello, owner)
        if self._by_peer.get(peer, session) is not session:
            raise RefusedError(RefusalReason.REFUSAL_REASON_PROTOCOL, "hello.session: one session a connection")
        if session is None:
            self._make_room()
            session = self._new_session(hello, owner)
        self._count_handshake(session, now)
        session.is_proven, session.may_ask, session.may_watch = bool(identity.name), may_ask, may_watch
        if session.peer is not None:
            self._by_peer.pop(session.peer, None)
        session.peer = peer
        session.last_heard = now
        session.next_heartbeat = now + self._interval
        self._by_peer[peer] = session
        self._unknown_peers.forget(peer)
        self._peers.admit(peer)
        session.send_queue.connect(hello.window_frames, hello.window_bytes)
        welcome = ClientWelcome(
            processor_id=self._settings.processor.id,
            schema_minor=MINOR,
            heartbeat_interval_ms=self._settings.bus.heartbeat_interval_ms,
            heartbeat_timeout_ms=self._settings.bus.heartbeat_timeout_ms,
            resumed=resumed,
        )
        self._send(session, ServerFrame(welcome=welcome))
        _log.info("client connected", client=session.name, resumed=resumed)
        self._send_frames(session)

    def _check_same_life(self, session: Session, peer: bytes, hello: ClientHello, owner: int) -> None:
        """Refuse a hello that takes a session over without being the life that has it."""
        is_same = session.owner == owner and hmac.compare_digest(session.proof, hello.proof)
        if not is_same or (not session.proof and session.peer != peer and self._is_alive(session)):
            message = f"hello.session: {hello.session:016x} is another client's"
            raise RefusedError(RefusalReason.REFUSAL_REASON_SESSION_TAKEN, message)

    def _is_alive(self, session: Session) -> bool:
        """Tell whether a client is there: it was heard in time, and its connection takes messages."""
        if session.peer is None or self._now() - session.last_heard > self._timeout:
            return False
        return self._send_heartbeat(session, self._now()) is not Outcome.GONE

    def _count_handshake(self, session: Session, now: float) -> None:
        """Refuse a client that shakes hands again and again: each time, what it did not acknowledge is sent again."""
        passed = (now - session.shaken_at) / self._interval
        session.handshakes, session.shaken_at = max(0.0, session.handshakes - passed), now
        if session.handshakes + 1 > _MOST_HANDSHAKES:
            message = f"hello: at most {_MOST_HANDSHAKES} at once, then one in {self._interval:g} s"
            raise RefusedError(RefusalReason.REFUSAL_REASON_PROTOCOL, message)
        session.handshakes += 1

    def _make_room(self) -> None:
        """Forget a client that has nothing here, if there are as many as may be; one that is away goes first."""
        most = self._settings.clients.max_clients
        if len(self.sessions) < most:
            return
        idle = [each for each in self.sessions.values() if each.is_idle and each not in self.watchers]
        if not idle:
            raise RefusedError(RefusalReason.REFUSAL_REASON_TOO_MANY_WORKERS, f"clients: at most {most}")
        self._end(min(idle, key=lambda session: session.peer is not None), "another client needs its place")

    def _new_session(self, hello: ClientHello, owner: int) -> Session:
        clients = self._settings.clients
        session = Session(
            hello.session,
            hello.name,
            owner,
            hello.proof,
            next(self._routes),
            SendQueue(clients.send_queue_frames, clients.send_queue_bytes, self._budget),
            self._registry.table,
            self._settings.limits,
            self._send_frames,
        )
        self.sessions[hello.session] = session
        self._registry.router.consumers[session.route] = session
        return session

    def _stranger(self, peer: bytes, now: float) -> None:
        """Tell a peer that nobody knows to say hello: it was connected to an earlier life of this processor."""
        if self._unknown_peers.is_to_be_told(peer, now):
            refusal = Refusal(reason=RefusalReason.REFUSAL_REASON_HELLO_FIRST, message="say hello first")
            self._peers.send(peer, [write_frame(ServerFrame(refusal=refusal))])

    def _refuse(self, peer: bytes, refused: RefusedError) -> None:
        self.refused += 1
        self.refusals[refused.name] += 1
        self._tell_refused(peer, refused)
        self._repeated_log.begin(("refused", str(refused)), _log.warning, "client refused", reason=str(refused))

    def _tell_refused(self, peer: bytes, refused: RefusedError) -> None:
        refusal = Refusal(reason=refused.reason, message=str(refused)[:1000])
        self._peers.send(peer, [write_frame(ServerFrame(refusal=refusal))])

    # Their end.

    def _detach(self, session: Session) -> None:
        if session.peer is not None:
            self._by_peer.pop(session.peer, None)
            session.peer = None

    def _end(self, session: Session, why: str) -> None:
        """Forget a client, and end its requests."""
        self._detach(session)
        self.sessions.pop(session.key, None)
        # Before its requests end: each would put another frame into a queue that is full already.
        self._registry.router.consumers.pop(session.route, None)
        session.send_queue.discard()
        self.watchers.remove(session)
        for key in list(session.requests):
            request = self._registry.table.get(key)
            if request is not None and self._registry.table.route[request.slot] == session.route:
                self._registry.fail(request, ErrorCode.ERROR_CODE_ABORTED, f"client {session.name} is gone: {why}")
        _log.info("client gone", client=session.name, reason=why)

    def _end_slow(self, session: Session) -> None:
        """End the requests of a client that reads too slowly, and drop what waits for it."""
        waiting, size = len(session.send_queue), session.send_queue.bytes
        self.evicted += 1
        self.watchers.remove(session)
        reached = reached_in(session.send_queue.drop_outputs(), session.limits)
        if session.send_queue.is_over_full:
            self._end(session, f"it left {waiting} frames with {size} bytes unacknowledged")
            return
        reason = f"its client left {waiting} frames with {size} bytes waiting"
        for key in list(session.requests):
            request = self._registry.table.get(key)
            if request is not None:
                self._registry.fail(request, ErrorCode.ERROR_CODE_SLOW_CLIENT, reason)
                reached.pop(key, None)
        # Of those that had their last row, only what was dropped is known here any more.
        for key, tokens in reached.items():
            if session.key in self.sessions:  # else all that was put here was too much as well
                session.put(error_frame(error_of(key, ErrorCode.ERROR_CODE_SLOW_CLIENT, reason, tokens)))
        _log.warning("slow client", client=session.name, frames=waiting, bytes=size)

    def evict(self, pending_ack: PendingAck) -> None:
        """End the requests of the clients that have not acknowledged a step, those with most first."""
        queues = {id(queue) for queue in pending_ack.holders}
        slow = [session for session in self.sessions.values() if id(session.send_queue) in queues]
        for session in sorted(slow, key=lambda session: session.send_queue.bytes, reverse=True):
            self._end_slow(session)

    def all_lag(self, stream: int) -> bool:
        """Tell whether every client with requests at a worker is behind: then none of them makes another one wait."""
        table = self._registry.table
        consumers = map(self._registry.router.consumers.get, set(table.route[table.owner == stream].tolist()))
        return not any(isinstance(each, Session) and each.keeps_up for each in consumers)

    # What goes out.

    def _send_frames(self, session: Session) -> None:
        if session.send_queue.is_over_full:
            self._end_slow(session)
        while self._budget.is_exceeded:
            self._end_slow(max(self.sessions.values(), key=lambda each: each.send_queue.bytes))
        while session.peer is not None and (message := session.send_queue.next_message()) is not None:
            if self._peers.send(session.peer, message) is not Outcome.SENT:
                return
            session.send_queue.sent()

    def admitted(self, request: Request, admitted: Admitted) -> None:
        """Tell a request's client that a worker took it."""
        holder = self._registry.consumer_of(request)
        if isinstance(holder, Session):
            admitted.deadline_unix_ms = request.deadline_unix_ms
            holder.put(admitted_frame(admitted))

    def tick(self, now: float, *, all_are_back: bool) -> None:
        """Do what time alone demands: heartbeats, silent clients, clients that do not come back.

        `all_are_back`: every worker that lives has come back after a restart, with all that it retained.
        """
        for session in list(self.sessions.values()):
            try:
                self._look_at(session, now)
            except Exception:  # noqa: BLE001 - a defect of ours must not keep the others from their turn
                self.failed_ticks += 1
                self._repeated_log.begin("defect", _log.exception, "tick failed", client=session.name)
                self._detach(session)
        self.resumes.tick(all_are_back=all_are_back)
        self._repeated_log.expire()

    def _look_at(self, session: Session, now: float) -> None:
        patience = self._settings.clients.detached_timeout_ms / 1000
        silent = now - session.last_heard
        if session.peer is not None and silent > self._timeout:
            self._detach(session)
            _log.warning("client silent", client=session.name)
        if session.peer is None and silent > self._timeout + patience:
            self._end(session, f"it did not come back within {self._settings.clients.detached_timeout_ms} ms")
        elif session.peer is not None:
            self._send_frames(session)
            self._send_status(session, now)
            if now >= session.next_heartbeat:
                self._send_heartbeat(session, now)

    def _send_status(self, session: Session, now: float) -> None:
        """Answer a status request, or leave it to a later tick: too soon after the last answer, or the link is full."""
        if session.wants_status and now >= session.next_status:
            connected = sum(each.peer is not None for each in self.sessions.values())
            message = self._status.message(now, connected)
            if session.peer is not None and self._peers.send(session.peer, message) is Outcome.SENT:
                session.wants_status, session.next_status = False, now + STATUS_INTERVAL

    def _send_heartbeat(self, session: Session, now: float) -> Outcome:
        session.next_heartbeat = now + self._interval
        beat = Heartbeat(sent_at_ns=max(1, int(now * _NS)), echo_ns=session.echo_ns)
        return self._send(session, ServerFrame(heartbeat=beat))

    def extend_deadlines(self, seconds: float, now: float) -> None:
        """Do not count some seconds as the clients' silence."""
        for session in self.sessions.values():
            session.last_heard = min(now, session.last_heard + seconds)

    def close(self, reason: GoodbyeReason, message: str) -> None:
        """Say goodbye to every client."""
        for session in self.sessions.values():
            self._send_frames(session)
            self._send(session, ServerFrame(goodbye=Goodbye(reason=reason, message=message)))
        self._repeated_log.close()

    def _send(self, session: Session, frame: ServerFrame) -> Outcome:
        if session.peer is None:
            return Outcome.GONE
        return self._peers.send(session.peer, [write_frame(frame)])


def owner_of(identity: Identity, name: str) -> int:
    """Return whose a client's requests are: its key's, or where none is needed, those of all clients of its name."""
    said = f"key {identity.name}" if identity.name else f"name {name}"
    return int.from_bytes(blake2b(said.encode(), digest_size=8).digest()) or 1


def _check_role(is_granted: bool, role: Role) -> None:  # noqa: FBT001 - private, and named at the call
    if not is_granted:
        raise RefusedError(RefusalReason.REFUSAL_REASON_NOT_AUTHORIZED, f"role {role}: not granted to this key")
