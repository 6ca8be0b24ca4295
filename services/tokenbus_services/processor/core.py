"""Core: the parts of a processor, wired together, without sockets, event loop and clock."""

from collections.abc import Callable

from tokenbus_contracts.generated.request_pb2 import Admitted
from tokenbus_services.delivery import PendingAck
from tokenbus_services.logs import DeduplicatedLog, logger
from tokenbus_services.processor.clients import ClientConnections
from tokenbus_services.processor.connections import Peers
from tokenbus_services.processor.dead_letters import DeadLetters
from tokenbus_services.processor.dispatch import Dispatch
from tokenbus_services.processor.intake import Intake, Worker
from tokenbus_services.processor.request_registry import RequestRegistry, Time
from tokenbus_services.processor.requests import Request, Source
from tokenbus_services.processor.stream import Arrived
from tokenbus_services.processor.workers import WorkerConnections
from tokenbus_services.settings import Settings

_log = logger("processor")


class Core:
    """Takes messages through its two connection managers, and sends through the peers that it was given.

    It is the Upstream of the registry and the Downstream of the intake: by it they reach the parts made after them.
    """

    def __init__(
        self,
        settings: Settings,
        clock: Time,
        workers: Peers,
        clients: Peers,
        call_soon: Callable[[Callable[[], None]], object],
    ) -> None:
        """Take the settings, the time, the peers at both addresses, and how to put a call off until the next moment."""
        self._repeated_log = DeduplicatedLog()
        self._failed_ticks = 0
        self._timeout = settings.bus.heartbeat_timeout_ms / 1000
        self._back_at = clock.now() + self._timeout
        self.dead_letters = DeadLetters(settings.dead_letters)
        self.registry = RequestRegistry(settings.processor, clock, self)
        self.intake = Intake(settings, self.registry, self.dead_letters, clock.now, self)
        self.workers = WorkerConnections(settings, self.intake, self.dead_letters, workers)
        self.dispatch = Dispatch(settings, self.registry, self.workers)
        self.clients = ClientConnections(settings, self.dispatch, self.dead_letters, clients, clock.now, call_soon)

    @property
    def failed_ticks(self) -> int:
        """How many ticks of a peer, a request or a part failed: a defect."""
        return self._failed_ticks + self.registry.failed_ticks + self.workers.failed_ticks + self.clients.failed_ticks

    def begin(self, now: float) -> None:
        """Learn that messages may come from now on."""
        self._back_at = now + self._timeout
        self.dispatch.begin(now)

    def extend_deadlines(self, seconds: float, now: float) -> None:
        """Extend the peers' deadlines after a local stall of some seconds: what looks like their silence was ours."""
        self.workers.extend_deadlines(seconds, now)
        self.clients.extend_deadlines(seconds, now)

    def tick(self, now: float) -> None:
        """Do what time alone demands; a part that fails keeps no other from its turn."""
        for part in (self._expire, self.dispatch.tick, self.workers.tick, self.clients.tick, self._take_up):
            try:
                part(now)
            except Exception:  # noqa: BLE001 - a defect of ours must not keep the others from their turn
                self._failed_ticks += 1
                self._repeated_log.begin("defect", _log.exception, "tick failed")
        self._repeated_log.expire()

    def _expire(self, _now: float) -> None:
        self.registry.expire()

    def _take_up(self, now: float) -> None:
        self.clients.resumes.tick(all_are_back=now >= self._back_at and self.workers.are_caught_up)

    # What the registry needs of the others.

    def abort_at_worker(self, stream: int, request_id: int) -> None:
        """Tell the worker of a stream to end a request."""
        self.workers.abort(stream, request_id)

    def source_of(self, request_id: int) -> Source | None:
        """Return the stream whose worker said in its handshake that it has a request."""
        workers = self.workers.by_stream.values()
        return next((each.source for each in workers if request_id in each.source.owners), None)

    def is_known_stream(self, stream: int) -> bool:
        """Tell whether the worker of a stream is there, or may come back."""
        return stream in self.workers.by_stream

    def vouched(self, request: Request, owner: int) -> None:
        """Learn from a worker which client a request belongs to that was resumed before."""
        self.clients.resumes.settle_owner(request, owner)

    # What the intake needs of the others.

    def item_arrived(self, worker: Worker, entry: Arrived) -> None:
        """Show an item to the clients that watch its stream."""
        self.clients.watchers.show_item(worker, entry)

    def stream_connected(self, worker: Worker) -> None:
        """Tell the watchers of a stream that its worker is there, and give it the requests that wait."""
        self.clients.watchers.show_stream(worker)
        self.dispatch.hand_out_waiting()

    def admitted(self, request: Request, admitted: Admitted) -> None:
        """Tell a request's client that a worker took it."""
        self.clients.admitted(request, admitted)

    def evict(self, pending_ack: PendingAck, through: int) -> None:
        """End the requests of the consumers that hold a stream back the longest."""
        is_pending_here = pending_ack.count > len(pending_ack.holders)
        self.clients.evict(pending_ack)
        if is_pending_here:
            self.registry.evict_slowest(pending_ack, through)

    def all_clients_lag(self, worker: Worker) -> bool:
        """Tell whether every client with requests at a worker is behind."""
        return self.clients.all_lag(worker.source.stream)

    def resend(self, worker: Worker, request: Request) -> None:
        """Send a worker a request again that it never got."""
        self.dispatch.resend(worker, request)
