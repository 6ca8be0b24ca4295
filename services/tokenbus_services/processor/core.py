"""Core: the parts of a processor, wired together, without sockets, event loop and clock."""

from tokenbus_services.delivery import PendingAck
from tokenbus_services.logs import DeduplicatedLog, logger
from tokenbus_services.processor.clients import ClientConnections
from tokenbus_services.processor.dead_letters import DeadLetters
from tokenbus_services.processor.dispatch import Dispatch
from tokenbus_services.processor.intake import Intake
from tokenbus_services.processor.peers import Peers
from tokenbus_services.processor.request_registry import RequestRegistry, Time
from tokenbus_services.processor.worker import Worker
from tokenbus_services.processor.workers import WorkerConnections
from tokenbus_services.settings import Settings

_log = logger("processor")


class Core:
    """Takes messages through its two desks, and answers through two functions; whoever runs it tells the time."""

    def __init__(self, settings: Settings, clock: Time, workers: Peers, clients: Peers) -> None:
        """Take the settings, the time, and the peers at both addresses."""
        self._repeated_log = DeduplicatedLog()
        self._failed_ticks = 0
        self._timeout = settings.bus.heartbeat_timeout_ms / 1000
        self._back_at = clock.now() + self._timeout
        self.dead_letters = DeadLetters(settings.dead_letters)
        self.registry = RequestRegistry(settings.processor, clock)
        self.intake = Intake(settings, self.registry, self.dead_letters, clock.now)
        self.workers = WorkerConnections(settings, self.intake, self.dead_letters, workers)
        self.dispatch = Dispatch(settings, self.registry, self.workers)
        self.clients = ClientConnections(settings, self.dispatch, self.dead_letters, clients, clock.now)
        self.registry.abort_at_worker = self.workers.abort
        self.registry.workers = self.workers.by_stream
        self.registry.on_vouched = self.clients.resumes.settle_owner
        self.intake.on_admitted = self.clients.admitted
        self.intake.on_stream = self._on_stream
        self.intake.on_item = self.clients.watchers.show_item
        self.intake.evict = self._evict
        self.intake.all_clients_lag = lambda worker: self.clients.all_lag(worker.source.stream)
        self.intake.resend = self.dispatch.resend

    @property
    def failed_ticks(self) -> int:
        """How often looking at something failed."""
        return self._failed_ticks + self.registry.failed_ticks + self.workers.failed_ticks + self.clients.failed_ticks

    def begin(self, now: float) -> None:
        """Learn that messages may come from now on."""
        self._back_at = now + self._timeout
        self.dispatch.begin(now)

    def extend_deadlines(self, seconds: float, now: float) -> None:
        """Learn that for so long nobody listened here: that was nobody's silence but our own."""
        self.workers.extend_deadlines(seconds, now)
        self.clients.extend_deadlines(seconds, now)

    def tick(self, now: float) -> None:
        """Do what time alone demands."""
        for part in (self._expire, self.dispatch.tick, self.workers.tick, self._tick_clients):
            try:
                part(now)
            except Exception:  # noqa: BLE001 - a defect of ours must not keep the others from their turn
                self._failed_ticks += 1
                self._repeated_log.begin("defect", _log.exception, "tick failed")
        self._repeated_log.expire()

    def _tick_clients(self, now: float) -> None:
        self.clients.tick(now, all_are_back=now >= self._back_at and self.workers.are_caught_up)

    def _expire(self, _now: float) -> None:
        self.registry.expire()

    def _on_stream(self, worker: Worker) -> None:
        """Learn that a worker is there, or there again."""
        self.clients.watchers.show_stream(worker)
        self.dispatch.hand_out_waiting()

    def _evict(self, pending_ack: PendingAck, through: int) -> None:
        """End the requests of those that hold a stream back the longest."""
        held_here = pending_ack.count > len(pending_ack.holders)
        self.clients.evict(pending_ack)
        if held_here:
            self.registry.evict_slowest(pending_ack, through)
