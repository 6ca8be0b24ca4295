"""Core: the parts of a processor, wired together, without sockets, event loop and clock."""

from collections.abc import Callable

from tokenbus_services.bus import Listener
from tokenbus_services.clock import Clock
from tokenbus_services.logs import DeduplicatedLog, logger
from tokenbus_services.processor.client_connections import ClientConnections
from tokenbus_services.processor.dead_letters import DeadLetters
from tokenbus_services.processor.dispatch import Dispatch
from tokenbus_services.processor.intake import Intake
from tokenbus_services.processor.request_registry import RequestRegistry
from tokenbus_services.processor.worker_connections import WorkerConnections
from tokenbus_services.processor.workers import Workers
from tokenbus_services.settings import Settings

_log = logger("processor")


class Core:
    """The managers of connections, and what they need: each part is given only parts that were made before it."""

    def __init__(self, settings: Settings, clock: Clock, call_soon: Callable[[Callable[[], None]], object]) -> None:
        """Take the settings, the time, and how to put a call off until the next moment."""
        self._repeated_log = DeduplicatedLog()
        self._failed_ticks = 0
        self._timeout = settings.bus.heartbeat_timeout_ms / 1000
        self._back_at = clock.now() + self._timeout
        self.dead_letters = DeadLetters(settings.dead_letters)
        self.workers = Workers(settings.processor)
        self.registry = RequestRegistry(settings.processor, clock, self.workers)
        self.dispatch = Dispatch(settings, self.registry, self.workers)
        self.clients = ClientConnections(settings, self.dispatch, self.dead_letters, clock.now, call_soon)
        self.intake = Intake(settings, self.dispatch, self.clients, self.dead_letters, clock.now)
        self.worker_connections = WorkerConnections(settings, self.workers, self.intake, self.dead_letters)
        self.clients.ack_observers.append(self.worker_connections.proceed_after_ack)

    @property
    def failed_ticks(self) -> int:
        """How many ticks of a peer, a request or a part failed: a defect."""
        parts = self.registry.failed_ticks, self.worker_connections.failed_ticks, self.clients.failed_ticks
        return self._failed_ticks + sum(parts)

    def listen(self, workers: Listener, clients: Listener) -> None:
        """Learn where workers and clients connect."""
        self.workers.listener, self.clients.peers.listener = workers, clients

    def begin(self, now: float) -> None:
        """Learn that messages may come from now on."""
        self._back_at = now + self._timeout
        self.dispatch.expect_workers(now)

    def extend_deadlines(self, seconds: float, now: float) -> None:
        """Extend the peers' deadlines after a local stall of some seconds: what looks like their silence was ours."""
        self._back_at = min(now + self._timeout, self._back_at + seconds)
        for part in (self.dispatch, self.worker_connections, self.clients):
            part.extend_deadlines(seconds, now)

    def tick(self, now: float) -> None:
        """Do what time alone demands; a part that fails keeps no other from its turn."""
        parts = (
            self._expire,
            self._send_away,
            self.dispatch.tick,
            self.worker_connections.tick,
            self.clients.tick,
            self._take_up,
        )
        for part in parts:
            try:
                part(now)
            except Exception:  # noqa: BLE001 - a defect of ours must not keep the others from their turn
                self._failed_ticks += 1
                self._repeated_log.begin("defect", _log.exception, "tick failed")
        self._repeated_log.expire()

    def _expire(self, _now: float) -> None:
        self.registry.expire()

    def _send_away(self, now: float) -> None:
        self.worker_connections.send_away(self.dispatch.alone(now), "no decode worker is here")

    def _take_up(self, now: float) -> None:
        self.clients.resumes.tick(are_back=now >= self._back_at)
