"""ProcessorView: a processor's plain counters as one scrape sees them."""

from collections.abc import Callable, Iterator
from functools import cached_property

from tokenbus_services.delivery import RequestTokens
from tokenbus_services.metrics.loop import LoopWatch
from tokenbus_services.metrics.steps import StepStatistics
from tokenbus_services.processor import Processor
from tokenbus_services.processor.intake import Worker
from tokenbus_services.processor.session import Session
from tokenbus_services.processor.stream import StreamCounts

Samples = Iterator[tuple[tuple[str, ...], float]]


class ProcessorView:
    """Made anew for each scrape, on a thread that is not the processor's.

    What the processor may change meanwhile is copied in one operation of the interpreter, and the processor never
    waits: two numbers of one scrape may be a moment apart.
    """

    def __init__(
        self, processor: Processor, statistics: StepStatistics, watch: LoopWatch, wall: Callable[[], float]
    ) -> None:
        """Take the processor and what measures it; `wall` is the time of day, in seconds."""
        self.processor = processor
        self.statistics = statistics
        self.watch = watch
        self.now = wall()
        self.workers: list[Worker] = list(processor.workers.by_id.values())
        self.sessions: list[Session] = list(processor.clients.sessions.values())

    def each_worker(self, read: Callable[[Worker], float]) -> Samples:
        """Read a number of every worker that is known."""
        return (((worker.stream.worker_id,), read(worker)) for worker in self.workers)

    def each_count(self, read: Callable[[StreamCounts], float]) -> Samples:
        """Read a count of every worker, and of those that were here."""
        return (((name,), read(counts)) for name, counts in self._counts)

    def lags(self) -> Samples:
        """Return how long ago each worker's last step was made; none for who has handed out none, or does not say."""
        for worker in self.workers:
            if worker.stream.produced_at_ns:
                yield (worker.stream.worker_id,), max(0.0, self.now - worker.stream.produced_at_ns / 1e9)

    def missing_drafts(self) -> Samples:
        """Return how many drafts never came, of every worker and of those that were here."""
        here = {worker.stream.worker_id: worker.assembler.drafts_missing for worker in self.workers}
        return (((name,), counts.missing_drafts + here.get(name, 0)) for name, counts in self._counts)

    @cached_property
    def _counts(self) -> list[tuple[str, StreamCounts]]:
        found = dict(self.processor.workers.departed.copy())
        found.update((worker.stream.worker_id, worker.stream.counts) for worker in self.workers)
        return list(found.items())

    @cached_property
    def buffered(self) -> list[int]:
        """How many rows wait for each request that is iterated over here."""
        contexts = self.processor.registry.table.contexts.copy()
        return [len(context) for context in contexts if isinstance(context, RequestTokens)]

    @property
    def feed(self) -> tuple[int, int]:
        """How many steps wait for whoever iterates over steps, and how many did at most."""
        feed = self.processor.intake.step_queue
        return (0, 0) if feed is None else (len(feed), feed.peak)

    def fill(self) -> Samples:
        """Return how full each bounded thing is: of several, the fullest."""
        settings, clients, feed = self.processor.settings.processor, self.processor.settings.clients, self.feed
        acks = [worker.stream.acks for worker in self.workers]
        send_queues = [session.send_queue for session in self.sessions]
        yield ("requests",), len(self.processor.registry.table) / settings.max_requests
        yield ("workers",), len(self.workers) / settings.max_workers
        yield ("clients",), len(self.sessions) / clients.max_clients
        yield ("open_steps",), _most(worker.assembler.open_steps for worker in self.workers) / settings.max_open_steps
        yield ("pending_ack_items",), _most(map(len, acks)) / settings.pending_ack_items
        yield ("pending_ack_bytes",), _most(pending_ack.bytes for pending_ack in acks) / settings.pending_ack_bytes
        yield ("buffer_rows",), _most(self.buffered) / settings.request_buffer_rows
        yield ("send_queue_frames",), _most(map(len, send_queues)) / clients.send_queue_frames
        yield ("send_queue_bytes",), _most(send_queue.bytes for send_queue in send_queues) / clients.send_queue_bytes
        yield ("step_queue",), feed[0] / settings.step_queue

    def peaks(self) -> Samples:
        """Return how full each of those was at most, as far as that is known."""
        settings, clients, feed = self.processor.settings.processor, self.processor.settings.clients, self.feed
        send_queues = [session.send_queue for session in self.sessions]
        yield ("requests",), self.processor.registry.table.peak / settings.max_requests
        yield (
            ("pending_ack_items",),
            _most(worker.stream.acks.peak for worker in self.workers) / settings.pending_ack_items,
        )
        yield ("send_queue_frames",), _most(send_queue.peak for send_queue in send_queues) / clients.send_queue_frames
        yield (
            ("send_queue_bytes",),
            _most(send_queue.peak_bytes for send_queue in send_queues) / clients.send_queue_bytes,
        )
        yield ("step_queue",), feed[1] / settings.step_queue


def _most(values: "Iterator[int] | map[int] | list[int]") -> int:
    return max(values, default=0)
