"""Core: the parts of a processor, wired together, without sockets, event loop and clock."""

from collections.abc import Callable

from tokenbus_services.bus import Outcome
from tokenbus_services.delivery import Hold
from tokenbus_services.processor.book import RequestBook
from tokenbus_services.processor.clients import ClientDesk
from tokenbus_services.processor.dead_letters import DeadLetters
from tokenbus_services.processor.dispatch import Dispatch
from tokenbus_services.processor.intake import Intake
from tokenbus_services.processor.worker import Worker
from tokenbus_services.processor.workers import WorkerDesk
from tokenbus_services.settings import Settings

Send = Callable[[bytes, list[bytes]], Outcome]


class Core:
    """Takes messages through its two desks, and answers through two functions; whoever runs it tells the time."""

    def __init__(self, settings: Settings, now: Callable[[], float], send_worker: Send, send_client: Send) -> None:
        """Take the settings, the time, and how to send to a worker and to a client."""
        self.letters = DeadLetters(settings.dead_letters)
        self.book = RequestBook(settings.processor, now)
        self.intake = Intake(settings, self.book, self.letters, now)
        self.workers = WorkerDesk(settings, self.intake, self.letters, send_worker)
        self.dispatch = Dispatch(settings, self.book, self.workers)
        self.clients = ClientDesk(settings, self.dispatch, self.letters, send_client)
        self.book.abort_at_worker = self.workers.abort
        self.intake.on_admitted = self.clients.admitted
        self.intake.on_stream = self._on_stream
        self.intake.on_item = self.clients.watchers.show_item
        self.intake.relieve = self._relieve
        self.intake.resend = self.dispatch.resend

    def begin(self, now: float) -> None:
        """Learn that messages may come from now on."""
        self.dispatch.begin(now)

    def forgive(self, seconds: float, now: float) -> None:
        """Learn that for so long nobody listened here: that was nobody's silence but our own."""
        self.workers.forgive(seconds, now)
        self.clients.forgive(seconds, now)

    def tick(self, now: float) -> None:
        """Do what time alone demands."""
        self.book.expire()
        self.dispatch.tick(now)
        self.workers.tick(now)
        self.clients.tick(now)

    def _on_stream(self, worker: Worker) -> None:
        """Learn that a worker is there, or there again."""
        self.clients.watchers.show_stream(worker)
        self.dispatch.hand_out_waiting()

    def _relieve(self, hold: Hold) -> None:
        """End what holds a stream back the longest."""
        self.clients.relieve(hold)
        self.book.relieve(hold)
