"""HandoffReceiver: takes the requests that prefill workers hand off, once each, and answers what the engine says."""

import asyncio
import contextlib
import secrets
from collections import OrderedDict
from types import TracebackType
from typing import Self

from tokenbus_contracts import ContractError
from tokenbus_contracts.generated.handoff_pb2 import Handoff
from tokenbus_services.bus import ClosedError, Listener, Role, Transport
from tokenbus_services.logs import DeduplicatedLog, logger
from tokenbus_services.settings import Settings
from tokenbus_services.worker.counts import WorkerCounts
from tokenbus_services.worker.handoff.message import read_handoff, reply_of
from tokenbus_services.worker.handshake import HandoffPoint
from tokenbus_services.worker.publisher import Publisher
from tokenbus_services.worker.taken import TakenOver

_log = logger("worker")
_TICKET_BYTES = 32


class HandoffReceiver:
    """Listens for hand-offs while `async with` lasts, and hands them to the publisher's engine from `serve` on."""

    def __init__(self, settings: Settings, transport: Transport) -> None:
        """Take the settings of a decode worker."""
        self._settings = settings
        self._transport = transport
        self._ticket = secrets.token_bytes(_TICKET_BYTES)
        self._listener: Listener | None = None
        self._publisher: Publisher | None = None
        self._task: asyncio.Task[None] | None = None
        self._answers: OrderedDict[int, str | None] = OrderedDict()
        self._repeated_log = DeduplicatedLog()
        self.counts = WorkerCounts()

    async def __aenter__(self) -> Self:
        """Listen; an address that cannot be had is an AddressError."""
        self._listener = await self._transport.listen(self._settings.worker.handoff_address, self._connection_refused)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take nothing more."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._listener is not None:
            await self._listener.close()

    @property
    def point(self) -> HandoffPoint:
        """Where prefill workers send to, with the port that was chosen, and what they need there."""
        if self._listener is None:
            return HandoffPoint()
        return HandoffPoint(self._listener.address, self._ticket, self._listener.server_key)

    def serve(self, publisher: Publisher) -> None:
        """Begin to take hand-offs, for the engine that takes its requests from a publisher."""
        self._publisher = publisher
        self.counts = publisher.counts
        self._task = asyncio.create_task(self._receive())

    async def _receive(self) -> None:
        while self._listener is not None:
            try:
                peer, parts = await self._listener.receive()
            except ClosedError:
                return
            try:
                handoff = read_handoff(parts, self._ticket)
                if handoff is not None:
                    self._check_right(peer, handoff.worker_id)
            except ContractError as error:
                self.counts.refused += 1
                self._repeated_log.begin("handoff", _log.warning, "hand-off refused", reason=str(error))
                continue
            if handoff is not None:
                self._listener.admit(peer)
                self._take(peer, handoff, parts[1])

    def _connection_refused(self, reason: str) -> None:
        self.counts.refused_connections += 1
        self._repeated_log.begin("transport", _log.warning, "connection refused", reason=reason)

    def _check_right(self, peer: bytes, worker_id: str) -> None:
        identity = None if self._listener is None else self._listener.identity(peer)
        if identity is None or not identity.may(Role.HANDOFF, worker_id):
            who = "" if identity is None else identity.name
            raise ContractError("handoff.worker_id", f"one that the key {who!r} may hand off as", repr(worker_id))

    def _take(self, peer: bytes, handoff: Handoff, state: bytes) -> None:
        number, key = handoff.number, handoff.generate.request_key
        if number in self._answers:
            answer = self._answers[number]
            if answer is not None:  # the first time it was answered, nobody heard
                self._reply(peer, handoff, answer)
            return
        publisher, worker = self._publisher, self._settings.worker
        if publisher is None or len(publisher.session.requests) >= worker.max_requests:
            self._settle(peer, handoff, f"it has {worker.max_requests} requests, as many as it takes")
            return
        if key in publisher.session.requests:
            self._settle(peer, handoff, "it has an open request of that key")
            return
        waiting = self.counts.waiting_state_bytes
        if waiting and waiting + len(state) > worker.handoff_bytes:
            limit = f"at most {worker.handoff_bytes} bytes of states that wait (worker.handoff_bytes)"
            self._settle(peer, handoff, f"state: {limit}, got {waiting + len(state)}")
            return
        self._answers[number] = None
        self.counts.waiting_state_bytes += len(state)
        loop = asyncio.get_running_loop()

        def _answered(refusal: str) -> None:
            self.counts.waiting_state_bytes -= len(state)
            self._settle(peer, handoff, refusal)

        def _answer(refusal: str) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody hears it any more
                loop.call_soon_threadsafe(_answered, refusal)

        publisher.hand_in(TakenOver(handoff.generate, state, _answer))
        # Twice as many as may be open: who asks again for an older one has given it up long ago.
        while len(self._answers) > 2 * worker.max_requests:
            self._answers.popitem(last=False)

    def _settle(self, peer: bytes, handoff: Handoff, refusal: str) -> None:
        key = handoff.generate.request_key
        if refusal:
            self.counts.refused += 1
            self._answers.pop(handoff.number, None)  # there may be room when it comes again
            # By the field that is wrong: a value that differs each time must not fill the log.
            kind = ("handoff", refusal.partition(":")[0])
            self._repeated_log.begin(kind, _log.warning, "hand-off refused", reason=refusal, request=f"{key:016x}")
        else:
            self.counts.taken_over += 1
            self._answers[handoff.number] = refusal
        self._reply(peer, handoff, refusal)

    def _reply(self, peer: bytes, handoff: Handoff, refusal: str) -> None:
        if self._listener is not None:
            self._listener.send(peer, reply_of(handoff, refusal))  # one that is lost is asked for again
