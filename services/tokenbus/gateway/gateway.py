"""Gateway: the bus client, the buffers and the counters of a process, its periodic work, health and readiness."""

import asyncio
import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager

from tokenbus.client import Client
from tokenbus.gateway.answer import Outcome
from tokenbus.gateway.api_keys import Callers
from tokenbus.gateway.buffers import Buffers
from tokenbus.gateway.completion_request import DEFAULT_MODEL, Reader
from tokenbus.gateway.dispatcher import Dispatcher
from tokenbus.gateway.encoder_pool import EncoderPool, encoders_of
from tokenbus.gateway.errors import ApiError
from tokenbus.gateway.fairness import BodyRoom
from tokenbus.gateway.last_turns import LastTurns
from tokenbus.gateway.processor_status import StatusCache, takes_requests
from tokenbus.gateway.session_reader import SessionReader
from tokenbus.gateway.tls import Certificate
from tokenbus.gateway.vocabulary import vocabulary_of
from tokenbus.logs import DeduplicatedLog, logger
from tokenbus.metrics.families import Histogram
from tokenbus.metrics.server import Health, LoopWatch, stalled
from tokenbus.settings import Settings
from tokenbus.tokenizer_probes import first_difference
from tokenbus_contracts.generated.client_pb2 import ProcessorStatus, WorkerStatus

_log = logger("gateway")
_LEARN_SECONDS = 1.0
_MOST_IGNORED = 256
_OTHERS = "(others)"
"""Metric label that all unknown fields share after the first 256 different fields."""
_FIRST = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_WHOLE = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_BETWEEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))


class ModelCounts:
    """Counts the ended requests of a model as vLLM's server does. Each choice counts as a request."""

    def __init__(self) -> None:
        self.finished: Counter[str] = Counter()
        self.prompt_tokens = Histogram(_TOKENS)
        self.generation_tokens = Histogram(_TOKENS)
        self.most_tokens = Histogram(_TOKENS)
        self.first_token = Histogram(_FIRST)
        self.token_time = Histogram(_BETWEEN)
        self.latency = Histogram(_WHOLE)

    def count(self, outcome: Outcome, asked_at: float, first_at: float | None, ended_at: float) -> None:
        self.finished[outcome.reason] += 1
        self.prompt_tokens.observe(outcome.prompt_tokens)
        self.generation_tokens.observe(outcome.tokens)
        if outcome.most_tokens is not None:
            self.most_tokens.observe(outcome.most_tokens)
        self.latency.observe(ended_at - asked_at)
        if first_at is not None:
            self.first_token.observe(first_at - asked_at)
            if outcome.tokens > 1:
                self.token_time.observe((ended_at - first_at) / (outcome.tokens - 1))


class Counts:
    """Counters of requests and answers. Any thread may read the counters, but only the event loop may change them."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()
        self.refusals: Counter[str] = Counter()
        self.ignored_fields: Counter[str] = Counter()
        self.bridged_turns: Counter[str] = Counter()
        self.open_answers = 0
        self.left_clients = 0
        self.cut_clients = 0
        self.broken_answers: Counter[str] = Counter()
        self.refused_connections = 0
        self.late_requests = 0
        self.to_socket = Histogram()
        self.models: defaultdict[str, ModelCounts] = defaultdict(ModelCounts)


class Gateway:
    """A client of the bus, with all objects that handle HTTP requests and answers."""

    def __init__(
        self, settings: Settings, client: Client, encoders: EncoderPool, repeated_log: DeduplicatedLog
    ) -> None:
        self.settings = settings
        self.client = client
        self.counts = Counts()
        self.vocabulary = vocabulary = vocabulary_of(settings.gateway.tokenizer)
        self.reader = Reader(settings, vocabulary)
        self.encoders = encoders
        self.bodies = BodyRoom(settings.gateway.max_body_bytes, settings.gateway.retry_after_ms)
        self.buffers = Buffers(settings.gateway.buffer_bytes * 8 // 9)  # the dispatcher's backlog may use the rest
        self.repeated_log = repeated_log
        self.dispatcher = Dispatcher(
            client, vocabulary, settings.gateway, self.buffers, repeated_log, self.counts.to_socket
        )
        self.callers = Callers(settings.gateway, repeated_log)
        self.callers.on_revoked = self.dispatcher.revoke
        self.certificate = Certificate(settings.gateway, repeated_log) if settings.gateway.tls_certificate else None
        self.named: dict[str, Sequence[int]] = {}
        """Maps an id that a client chose for an open answer to the ids of the answer's requests on the bus."""
        self.adapter_folders: dict[str, str] = {}
        """Folders of the LoRA adapters that were loaded through this gateway, by the adapters' names."""
        self.status = StatusCache(client, settings.gateway.bus_timeout_ms)
        self.turns = LastTurns(settings.gateway.bridge_bytes)
        self.sessions = SessionReader(settings, repeated_log)
        self.cache_usage: dict[tuple[str, str], float] = {}
        """Usage of each engine's KV cache, from 0 to 1, by worker and model. Engines without a report are absent."""
        loop = asyncio.get_running_loop()
        self.watch = LoopWatch(lambda: loop, time.monotonic)
        self.dispatching: asyncio.Task[None] | None = None
        self.serving: asyncio.Task[None] | None = None
        self.connections = 0

    @property
    def unread_files(self) -> int:
        """Number of changed files that cannot be read. Their earlier contents stay in force."""
        return self.callers.files.is_unread + (self.certificate is not None and self.certificate.files.is_unread)

    def tick(self) -> None:
        self.watch.ask()
        self.repeated_log.expire()
        self.callers.refresh()
        self.buffers.trim(self.dispatcher.backlog.size)
        if self.certificate is not None:
            self.certificate.refresh()

    def note_ignored(self, fields: Iterable[str]) -> None:
        counts = self.counts.ignored_fields
        for name in fields:
            if name in counts:
                counts[name] += 1
            elif len(counts) < _MOST_IGNORED:
                counts[name] = 1
                _log.warning("an unknown field is ignored", field=name)
            else:  # clients may send arbitrarily many names
                counts[_OTHERS] += 1

    def health(self) -> Health:
        """Return whether this process works. The absence of a processor is not a problem of this process."""
        problems = stalled(self.watch, self.settings.bus.stall_timeout_ms)
        if self.client.refusal:
            problems.append(f"its processor refuses it: {self.client.refusal}")
        if self.dispatching is not None and (self.dispatching.done() or not self.client.is_running):
            problems.append("its dispatcher has failed: restart the gateway")
        if self.serving is not None and self.serving.done():
            problems.append("its HTTP server has failed: restart the gateway")
        facts = {
            "service": "gateway",
            "connection": "open" if self.client.is_connected else self.client.sessions[0].state.name.lower(),
            "processor": ", ".join(filter(None, (each.processor_id for each in self.client.sessions))),
            "open_requests": len(self.dispatcher),
            "is_draining": self.dispatcher.is_draining,
        }
        return Health(tuple(problems), facts)

    async def learn_models(self, *, is_new: bool = False) -> None:
        """Ask the processor for the workers' models and cache usage.

        If the processor does not answer, the models stay the same, and the cache usage becomes unknown.
        """
        try:
            status = await self.status.get(is_new=is_new)
        except TimeoutError:
            self.cache_usage = {}
            return
        connected = [worker for worker in status.workers if worker.is_connected]
        self.reader.learn_models(connected)
        self.cache_usage = {
            (worker.worker_id, worker.model or DEFAULT_MODEL): worker.kv_cache_permille / 1000
            for worker in connected
            if worker.HasField("kv_cache_permille")
        }

    async def keep_learning(self) -> None:
        """Call `learn_models` every second until cancelled, so that scrapes in other threads need not wait."""
        while True:
            await self.learn_models()
            await asyncio.sleep(_LEARN_SECONDS)

    def load_report(self) -> Mapping[str, float]:
        """Return the usage of the fullest KV cache, and the number of requests that have no token, by vLLM's names."""
        waiting = sum(each for _, each in self.dispatcher.running_and_waiting().values())
        return {"kv_cache_usage_perc": max(self.cache_usage.values(), default=0.0), "num_requests_waiting": waiting}

    async def why_not_ready(self) -> list[str]:
        """Return the reasons why no worker would accept a request, or an empty list if the gateway is ready."""
        if self.dispatcher.is_draining:
            return ["it is stopping"]
        if not self.client.is_connected:
            return ["no processor answers"]
        try:
            status = await self.status.get()
        except TimeoutError as error:
            return [str(error)]
        models = self.reader.fixed_models or (DEFAULT_MODEL,)
        if not takes_requests(status.workers, models):
            stalled = ", ".join(worker.worker_id for worker in status.workers if worker.is_stalled)
            return ["no connected worker takes requests", *([f"stalled: {stalled}"] if stalled else [])]
        same = [worker for worker in status.workers if not self._differs(worker)]
        if takes_requests(same, models):
            return []
        return [f"no worker has the tokenizer that gateway.tokenizer names{self._difference(status)}"]

    async def pauses(self) -> list[dict[str, object]]:
        try:
            status = await self.status.get()
        except TimeoutError:
            return []
        return [
            {"worker": each.worker_id, "since": each.paused_since_unix_ms / 1000, "by": each.paused_by}
            for each in status.workers
            if each.paused_since_unix_ms
        ]

    async def explained(self, error: ApiError) -> ApiError:
        if error.message.startswith("tokenizer_digest:"):
            with contextlib.suppress(TimeoutError):
                error.message += self._difference(await self.status.get())
        return error

    def _differs(self, worker: WorkerStatus) -> bool:
        own, other = self.vocabulary.digest, worker.tokenizer_digest
        return own != other and 0 not in {own, other}

    def _difference(self, status: ProcessorStatus) -> str:
        """Return a phrase that quotes a text which a worker encodes differently, or return an empty string."""
        for worker in filter(self._differs, status.workers):
            text = first_difference(self.vocabulary.probes, worker.tokenizer_probes)
            if text is not None:
                mend = (
                    "if both name the same folder, "
                    "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) repairs it"
                )
                return f"; worker {worker.worker_id} makes other tokens of {text!r}: {mend}"
        return ""


@asynccontextmanager
async def gateway_of(settings: Settings) -> AsyncIterator[Gateway]:
    with contextlib.closing(DeduplicatedLog()) as repeated_log:
        async with Client(settings) as client, encoders_of(settings, repeated_log) as encoders:
            gateway = Gateway(settings, client, encoders, repeated_log)
            gateway.dispatching = dispatching = asyncio.create_task(gateway.dispatcher.run())
            learning = asyncio.create_task(gateway.keep_learning())
            try:
                # Let the dispatcher run once, because it must open the client's steps before requests are submitted.
                await asyncio.sleep(0)
                yield gateway
            finally:
                gateway.dispatcher.give_up()
                gateway.dispatching = None
                dispatching.cancel()
                learning.cancel()
                await asyncio.gather(dispatching, learning, return_exceptions=True)
