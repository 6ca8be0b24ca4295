"""What one scrape reads of a processor: its plain counters, and the times of its steps."""

import time
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property

from tokenbus.bus import Usage
from tokenbus.delivery import Step
from tokenbus.metrics.families import Histogram
from tokenbus.metrics.health import LoopWatch
from tokenbus.processor import Processor
from tokenbus.processor.session import Session
from tokenbus.processor.stream import StreamCounts
from tokenbus.processor.workers import Worker

_NS = 1_000_000_000


class StepTimes:
    """Measures steps as they are handed out; costs a microsecond or two a step."""

    def __init__(self, now: Callable[[], float], wall_ns: Callable[[], int] = time.time_ns) -> None:
        self._now = now
        self._wall_ns = wall_ns
        self.assembly = Histogram()
        self.delivery = Histogram()

    def observe(self, step: Step) -> None:
        """Measure a step that was handed to its requests."""
        self.assembly.observe(self._now() - step.first_arrival)
        if produced := step.rows.header.produced_at_ns:
            # A worker's clock may be ahead of this one: a step from the future took no time.
            self.delivery.observe(max(0, self._wall_ns() - produced) / _NS)


class ProcessorView:
    """A processor's counters, read on the thread that scrapes; made anew for each scrape.

    What the processor may change meanwhile is copied in one operation of the interpreter, so the processor never waits
    for a lock: two numbers of one scrape may be a moment apart.
    """

    def __init__(self, processor: Processor, times: StepTimes, watch: LoopWatch) -> None:
        self.processor = processor
        self.times = times
        self.watch = watch
        self.now = time.time()
        self.workers: list[Worker] = list(processor.workers.by_id.values())
        self.sessions: list[Session] = list(processor.clients.sessions.values())

    def lags(self) -> dict[str, float]:
        """Return how long ago each worker's last step was made, of workers that said so."""
        made = {worker.stream.worker_id: worker.stream.produced_at_ns for worker in self.workers}
        return {name: max(0.0, self.now - at / _NS) for name, at in made.items() if at}

    @cached_property
    def counts(self) -> dict[str, StreamCounts]:
        """What was counted of every worker, and of those that left lately."""
        here = {worker.stream.worker_id: worker.stream.counts for worker in self.workers}
        return {**self.processor.workers.departed.copy(), **here}

    @cached_property
    def usage(self) -> Usage:
        """How much of the transport's bounds is in use."""
        return self.processor.usage()

    def bounded(self) -> Iterator[tuple[str, int, int]]:
        """Yield each bounded thing with how much is in it, and the bound."""
        settings, clients = self.processor.settings.processor, self.processor.settings.clients
        acks = [worker.stream.acks for worker in self.workers]
        queues = [session.send_queue for session in self.sessions]
        yield "requests", len(self.processor.registry.table), settings.max_requests
        yield "workers", len(self.workers), settings.max_workers
        yield "clients", len(self.sessions), clients.max_clients
        yield "open_steps", _most(worker.assembler.open_steps for worker in self.workers), settings.max_open_steps
        yield "pending_items", _most(map(len, acks)), settings.pending_items
        yield "pending_bytes", _most(each.bytes for each in acks), settings.pending_bytes
        yield "send_queue_frames", _most(map(len, queues)), clients.send_queue_frames
        yield "send_queue_bytes", _most(queue.bytes for queue in queues), clients.send_queue_bytes
        steps = self.processor.intake.step_queue
        yield "step_queue", 0 if steps is None else steps.qsize(), settings.step_queue
        yield "unread_bytes", self.usage.pending_bytes, self.processor.settings.bus.max_total_pending_bytes
        if (log := self.processor.item_log) is not None:
            yield "log_buffer", log.writer.buffered_bytes, self.processor.settings.durable_log.buffer_bytes


def _most(values: Iterable[int]) -> int:
    return max(values, default=0)
