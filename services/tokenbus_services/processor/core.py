"""Core: the parts of a processor, wired together, without sockets, event loop and clock."""

from collections.abc import Callable

from tokenbus_services.clock import Clock
from tokenbus_services.logs import DeduplicatedLog, logger
from tokenbus_services.processor.clients import ClientConnections
from tokenbus_services.processor.dead_letters import DeadLetters
from tokenbus_services.processor.dispatch import Dispatch
from tokenbus_services.processor.intake import Intake
from tokenbus_services.processor.request_registry import RequestRegistry
from tokenbus_services.processor.workers import WorkerConnections
from tokenbus_services.settings import Settings

_log = logger("processor")


class Core:
    """Takes messages through its two connection managers, and sends through the peers that it was given.

    The registry and the intake are given the core itself, through which they reach the parts that are made after them.
    """

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        call_soon: Callable[[Callable[[], None]], object],
    ) -> None:
        """Take the settings, the time, and how to put a call off until the next moment."""
        self._repeated_log = DeduplicatedLog()
        self._failed_ticks = 0
        self._timeout = settings.bus.heartbeat_timeout_ms / 1000
        self._back_at = clock.now() + self._timeout
        self.dead_letters = DeadLetters(settings.dead_letters)
        self.registry = RequestRegistry(settings.processor, clock, self)
        self.intake = Intake(settings, self, clock.now)
        self.workers = WorkerConnections(settings, self.intake, self.dead_letters)
        self.dispatch = Dispatch(settings, self.registry, self.workers)
        self.clients = ClientConnections(settings, self.dispatch, self.dead_letters, clock.now, call_soon)

    @property
    def failed_ticks(self) -> int:
        """How many ticks of a peer, a request or a part failed: a defect."""
        return self._failed_ticks + self.registry.failed_ticks + self.workers.failed_ticks + self.clients.failed_ticks

    def begin(self, now: float) -> None:
        """Learn that messages may come from now on."""
        self._back_at = now + self._timeout
        self.dispatch.expect_workers(now)

    def extend_deadlines(self, seconds: float, now: float) -> None:
        """Extend the peers' deadlines after a local stall of some seconds: what looks like their silence was ours."""
        self._back_at = min(now + self._timeout, self._back_at + seconds)
        self.dispatch.extend_deadlines(seconds, now)
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
        self.clients.resumes.tick(are_back=now >= self._back_at)
