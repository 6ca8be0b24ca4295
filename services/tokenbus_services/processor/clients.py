"""The processor's side of the client protocol: requests in, their tokens out, none lost when a client comes back."""

from collections.abc import Callable
from itertools import count

from tokenbus_contracts import ContractError, LogprobBatch, RowStatus, Rule
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
from tokenbus_services.bus import Outcome
from tokenbus_services.delivery import Hold
from tokenbus_services.delivery.tokens import FINISHED
from tokenbus_services.logs import Episodes, logger
from tokenbus_services.processor.answers import closing_error, ended_error, error_of, refusal_of
from tokenbus_services.processor.dead_letters import DeadLetters
from tokenbus_services.processor.dispatch import Dispatch
from tokenbus_services.processor.mailbox import Mailbox, admitted_letter, error_letter, reached_in
from tokenbus_services.processor.requests import Request
from tokenbus_services.processor.session import Session, drafts_of
from tokenbus_services.processor.strangers import Strangers
from tokenbus_services.processor.watchers import Watchers
from tokenbus_services.processor.worker import RefusedError, protocol_error
from tokenbus_services.settings import Settings

_log = logger("processor")
_FIRST_ROUTE = 1
_NS = 1_000_000_000


class ClientDesk:
    """Takes what clients send, and sends them what is theirs. Without sockets, and without a clock of its own."""

    def __init__(
        self,
        settings: Settings,
        dispatch: Dispatch,
        letters: DeadLetters,
        send: Callable[[bytes, list[bytes]], Outcome],
    ) -> None:
        """Take who hands new requests to workers, where what is refused goes, and how to send."""
        self._settings = settings
        self._book = dispatch.book
        self._dispatch = dispatch
        self._letters = letters
        self.watchers = Watchers(dispatch.workers)
        self._send_parts = send
        self._by_peer: dict[bytes, Session] = {}
        self._routes = count(_FIRST_ROUTE)
        self._episodes = Episodes()
        self._interval = settings.bus.heartbeat_interval_ms / 1000
        self._strangers = Strangers(self._interval)
        self._timeout = settings.bus.heartbeat_timeout_ms / 1000
        self._resumed: list[tuple[Session, Resume]] = []
        self.sessions: dict[int, Session] = {}
        self.is_draining = False
        self.refused = 0
        self.call_soon: Callable[[Callable[[], None]], object] = lambda call: call()

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
            self._letters.keep(parts[-1] if parts else b"", error, name)
            self._episodes.begin(("frame", name), _log.warning, "frame refused", reason=str(error), client=name)
            if session is None:
                self._tell_refused(peer, protocol_error(error))
            else:
                session.put(error_letter(refusal_of(parts, error)))
                self._watch_news(session)

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
            self._watch_news(session)

    def _watch_news(self, session: Session) -> None:
        """End a client that asks on and on, and confirms no answer."""
        if session.mailbox.news > 2 * self._settings.processor.max_requests:  # each admitted, and ended
            self._end(session, "it does not confirm what it is told")

    def _frame(self, session: Session, frame: ClientFrame, body: str | None) -> None:
        match body:
            case "generate":
                self._generate(session, frame.generate)
            case "abort":
                if frame.abort.request_key in session.requests:
                    self._book.abort(frame.abort.request_key)
            case "resume":
                self._resume(session, frame.resume)
            case "confirm":
                if not session.mailbox.confirm(frame.confirm.through_number):
                    number = frame.confirm.through_number
                    raise ContractError("confirm.through_number", "a number that was sent", number)
                self._send_letters(session)
            case "watch":
                self.watchers.add(session, frame.watch.worker_id)
            case "heartbeat":
                session.echo_ns = frame.heartbeat.sent_at_ns
            case "goodbye":
                self._end(session, "it said goodbye")

    def _generate(self, session: Session, generate: Generate) -> None:
        key = generate.request_key
        if key in session.requests:  # asked again, because the connection broke before the answer came
            return
        if self._book.table.ended(key) is not None and session.mailbox.has_rows_of(key, session.limits):
            return  # the same, and it has ended since: all of it is on its way
        known = self._book.table.get(key)
        if known is not None and not known.is_claimed:
            # Asked again for the same reason, after an earlier life of this processor had handed it to a worker.
            again = Resume(request_key=key, include_draft_logprobs=generate.include_draft_logprobs)
            self._resume(session, again)
            return
        if self.is_draining:
            error: RequestError | None = closing_error(key)
        else:
            error = self._dispatch.submit(generate, session.route, may_wait=True)
        if error is None:
            session.requests.add(key)
        else:
            session.put(error_letter(error))

    def _resume(self, session: Session, resume: Resume) -> None:
        """Take up a request again, with those that are resumed in the same moment: they share steps."""
        self._resumed.append((session, resume))
        if len(self._resumed) == 1:
            self.call_soon(self.take_up_resumed)

    def take_up_resumed(self) -> None:
        """Take up the requests that were resumed: what waits goes to their clients, and so does what follows."""
        # Of several clients that want one request the last has it; one that has left in the meantime has none.
        latest = {each.request_key: (session, each) for session, each in self._resumed if session.key in self.sessions}
        resumed, self._resumed = list(latest.values()), []
        sessions = {session for session, _ in resumed}
        for session in sessions:
            session.gather()
        endings = [ending for session, resume in resumed if (ending := self._take_up(session, resume)) is not None]
        for session in sessions:
            session.send_gathered()
        for session, error in endings:
            session.put(error_letter(error))

    def _take_up(self, session: Session, resume: Resume) -> tuple[Session, RequestError] | None:
        """Take up one request; return the error that it ended with, if it did."""
        key, table = resume.request_key, self._book.table
        ended, before = table.ended(key), table.get(key)
        if ended is not None:
            if ended.error is None and self._take_rest(session, key, resume.next_position):
                return None
            return session, ended.error or ended_error(key, ended.tokens)
        if before is None and table.is_full:
            return session, error_of(key, ErrorCode.ERROR_CODE_OVERLOADED, "too many open requests")
        was_claimed, other = before is not None and before.is_claimed, self._holder(key)
        request = self._book.claim(key, resume.next_position, session.route, drafts=resume.include_draft_logprobs)
        session.requests.add(key)
        error = None
        if not was_claimed:
            tokens = self._book.buffers.tokens_of(request)
            error = tokens.error
            for step, row in tokens.give_up():
                draft = step.draft_rows
                session.put_outputs(step.rows.select([row]), draft and drafts_of(draft, key), step.hold)
                step.hold.release()
        elif other is not None and other is not session:
            self._take_from(other, session, request, resume.next_position)
        if table.get(key) is request:
            self._book.settle(request)
        if table.get(key) is not request:  # it had ended
            session.requests.discard(key)
        return None if error is None else (session, error)

    def _holder(self, key: int) -> Session | None:
        request = self._book.table.get(key)
        if request is None:
            return None
        route = int(self._book.table.route[request.slot])
        consumer = self._book.router.consumers.get(route)
        return consumer if isinstance(consumer, Session) else None

    def _take_rest(self, session: Session, key: int, position: int) -> bool:
        """Give a client what is still on its way of a request that has ended; False if some of it is not."""
        letters = [letter for other in self.sessions.values() for letter in other.mailbox.letters()]
        found = [
            (*rows, letter.hold)
            for letter in letters
            if letter.hold is not None and (rows := letter.rows_of(key, session.limits)) is not None
        ]
        rest: list[tuple[LogprobBatch, LogprobBatch | None, Hold]] = []
        # Several clients that went away may each have some of it, or the same.
        for target, draft, hold in sorted(found, key=lambda entry: int(entry[0].positions[0])):
            begin, status = int(target.positions[0]), RowStatus(target.statuses[0])
            end = begin + int(target.token_counts[0])
            if begin <= position and (end > position or (end == position and status in FINISHED)):
                rest.append((target, draft, hold))
                position = end
                if status in FINISHED:
                    for entry in rest:
                        session.put_outputs(*entry)
                    return True
        return False

    def _take_from(self, other: Session, session: Session, request: Request, position: int) -> None:
        """Move what is on its way to another client: this one has taken the request up."""
        other.requests.discard(request.key)
        first = int(self._book.table.next_position[request.slot])
        found: list[tuple[LogprobBatch, LogprobBatch | None, Hold]] = []
        for letter in other.mailbox.letters():
            rows = letter.rows_of(request.key, session.limits)
            if rows is not None and letter.hold is not None:
                found.append((*rows, letter.hold))
                first = min(first, int(rows[0].positions[0]))
        if position < first:
            lost = f"tokens {position} to {first - 1} were confirmed before and are not kept"
            self._book.fail(request, ErrorCode.ERROR_CODE_GAP, lost)
            return
        for target, draft, hold in found:
            session.put_outputs(target, draft, hold)

    # The handshake.

    def _hello(self, peer: bytes, hello: ClientHello, now: float) -> None:
        session = self.sessions.get(hello.session)
        resumed = session is not None
        if session is None:
            if len(self.sessions) >= self._settings.clients.max_clients:
                message = f"clients: at most {self._settings.clients.max_clients}"
                raise RefusedError(RefusalReason.REFUSAL_REASON_TOO_MANY_WORKERS, message)
            session = self._new_session(hello)
        if session.peer is not None:
            self._by_peer.pop(session.peer, None)
        session.peer = peer
        session.last_heard = now
        session.next_heartbeat = now + self._interval
        self._by_peer[peer] = session
        self._strangers.forget(peer)
        session.mailbox.connect(hello.window_frames, hello.window_bytes)
        welcome = ClientWelcome(
            processor_id=self._settings.processor.id,
            schema_minor=MINOR,
            heartbeat_interval_ms=self._settings.bus.heartbeat_interval_ms,
            heartbeat_timeout_ms=self._settings.bus.heartbeat_timeout_ms,
            resumed=resumed,
        )
        self._send(session, ServerFrame(welcome=welcome))
        _log.info("client connected", client=session.name, resumed=resumed)
        self._send_letters(session)

    def _new_session(self, hello: ClientHello) -> Session:
        clients = self._settings.clients
        session = Session(
            hello.session,
            hello.name,
            next(self._routes),
            Mailbox(clients.mailbox_frames, clients.mailbox_bytes),
            self._book.table,
            self._settings.limits,
            self._send_letters,
        )
        self.sessions[hello.session] = session
        self._book.router.consumers[session.route] = session
        return session

    def _stranger(self, peer: bytes, now: float) -> None:
        """Tell a peer that nobody knows to say hello: it was connected to an earlier life of this processor."""
        if self._strangers.is_to_be_told(peer, now):
            refusal = Refusal(reason=RefusalReason.REFUSAL_REASON_HELLO_FIRST, message="say hello first")
            self._send_parts(peer, [write_frame(ServerFrame(refusal=refusal))])

    def _refuse(self, peer: bytes, refused: RefusedError) -> None:
        self.refused += 1
        self._tell_refused(peer, refused)
        self._episodes.begin(("refused", str(refused)), _log.warning, "client refused", reason=str(refused))

    def _tell_refused(self, peer: bytes, refused: RefusedError) -> None:
        refusal = Refusal(reason=refused.reason, message=str(refused)[:1000])
        self._send_parts(peer, [write_frame(ServerFrame(refusal=refusal))])

    # Their end.

    def _detach(self, session: Session) -> None:
        if session.peer is not None:
            self._by_peer.pop(session.peer, None)
            session.peer = None

    def _end(self, session: Session, why: str) -> None:
        """Forget a client; nobody is there any more to be told how its requests end."""
        self._detach(session)
        self.sessions.pop(session.key, None)
        for key in list(session.requests):
            request = self._book.table.get(key)
            if request is not None and self._book.table.route[request.slot] == session.route:
                self._book.fail(request, ErrorCode.ERROR_CODE_ABORTED, f"client {session.name} is gone: {why}")
        session.mailbox.discard()
        self._book.router.consumers.pop(session.route, None)
        self.watchers.remove(session)
        _log.info("client gone", client=session.name, reason=why)

    def _end_slow(self, session: Session) -> None:
        """End the requests of a client that reads too slowly, and drop what waits for it."""
        waiting, size = len(session.mailbox), session.mailbox.bytes
        reached = reached_in(session.mailbox.drop_outputs(), session.limits)
        self.watchers.remove(session)
        reason = f"its client left {waiting} frames with {size} bytes waiting"
        for key in list(session.requests):
            request = self._book.table.get(key)
            if request is not None:
                self._book.fail(request, ErrorCode.ERROR_CODE_SLOW_CLIENT, reason)
                reached.pop(key, None)
        # Of those that had their last row, only what was dropped is known here any more.
        for key, tokens in reached.items():
            session.put(error_letter(error_of(key, ErrorCode.ERROR_CODE_SLOW_CLIENT, reason, tokens)))
        _log.warning("slow client", client=session.name, frames=waiting, bytes=size)

    def relieve(self, hold: Hold) -> None:
        """End what holds a stream back the longest, where that is a client."""
        for session in list(self.sessions.values()):
            if session.mailbox.holds_back(hold):
                self._end_slow(session)

    # What goes out.

    def _send_letters(self, session: Session) -> None:
        if session.mailbox.is_over_full:
            self._end_slow(session)
        while session.peer is not None and (message := session.mailbox.next_message()) is not None:
            if self._send_parts(session.peer, message) is not Outcome.SENT:
                return
            session.mailbox.sent()

    def admitted(self, request: Request, admitted: Admitted) -> None:
        """Tell a request's client that a worker took it."""
        holder = self._holder(request.key)
        if holder is not None:
            holder.put(admitted_letter(admitted))

    def tick(self, now: float) -> None:
        """Do what time alone demands: heartbeats, silent clients, clients that do not come back."""
        patience = self._settings.clients.detached_timeout_ms / 1000
        for session in list(self.sessions.values()):
            silent = now - session.last_heard
            if session.peer is not None and silent > self._timeout:
                self._detach(session)
                _log.warning("client silent", client=session.name)
            if session.peer is None and silent > self._timeout + patience:
                self._end(session, f"it did not come back within {self._settings.clients.detached_timeout_ms} ms")
            elif session.peer is not None:
                self._send_letters(session)
                if now >= session.next_heartbeat:
                    session.next_heartbeat = now + self._interval
                    beat = Heartbeat(sent_at_ns=max(1, int(now * _NS)), echo_ns=session.echo_ns)
                    self._send(session, ServerFrame(heartbeat=beat))
        self._episodes.expire()

    def forgive(self, seconds: float, now: float) -> None:
        """Do not count some seconds as the clients' silence."""
        for session in self.sessions.values():
            session.last_heard = min(now, session.last_heard + seconds)

    def close(self, reason: GoodbyeReason, message: str) -> None:
        """Say goodbye to every client."""
        for session in self.sessions.values():
            self._send_letters(session)
            self._send(session, ServerFrame(goodbye=Goodbye(reason=reason, message=message)))
        self._episodes.close()

    def _send(self, session: Session, frame: ServerFrame) -> None:
        if session.peer is not None:
            self._send_parts(session.peer, [write_frame(frame)])
