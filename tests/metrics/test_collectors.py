"""What a processor and a publisher tell, held against a run whose numbers are known."""

from typing import Any

import pytest

from tests.metrics.running import Bus, Scrape, scrape, settings
from tests.metrics.test_speculation import rows
from tests.support.waiting import until
from tokenbus.bus import ANONYMOUS
from tokenbus.delivery import RequestFailedError
from tokenbus.metrics.families import Family
from tokenbus.metrics.processor import PROCESSOR, StepTimes, processor_collector
from tokenbus.metrics.publisher import PUBLISHER, publisher_collector
from tokenbus.metrics.server import LoopWatch
from tokenbus.worker import RetentionFullError
from tokenbus_contracts.generated.request_pb2 import ErrorCode, Generate, SamplingParameters, TokenPrompt
from tokenbus_contracts.generated.stream_pb2 import Hello

W = "worker-0"


def _too_much() -> Generate:
    sampling = SamplingParameters(max_tokens=1, min_tokens=2)
    return Generate(request_id=5, tokens=TokenPrompt(token_ids=[1]), sampling=sampling)


class Watched:
    """A bus whose processor and publisher are collected from."""

    def __init__(self, bus: Bus) -> None:
        processor = bus.processor
        self.bus = bus
        self.times = StepTimes(processor.clock.now)
        processor.intake.step_observers.append(self.times.observe)
        watch = LoopWatch(lambda: None, processor.clock.now)
        self._processor = processor_collector(processor, self.times, watch)
        self._publisher = publisher_collector(bus.publisher, watch)

    def processor(self) -> Scrape:
        return scrape(self._processor)

    def publisher(self) -> Scrape:
        return scrape(self._publisher)


@pytest.fixture
def watched() -> Watched:
    return Watched(Bus(drafts=True))


async def test_a_run_is_told_as_it_went(watched: Watched) -> None:
    """Ten requests of 30 tokens are 10 steps each, of a target and a draft; the admissions are items too."""
    async with watched.bus.running():
        await until(lambda: bool(watched.bus.publisher.session.handshakes))
        assert watched.processor()("stream_credit_items", worker=W) == watched.bus.settings.processor.credit_items
        await watched.bus.serve(requests=10, tokens=30)
        await until(lambda: not len(watched.bus.publisher.retention))
        told, worker = watched.processor(), watched.publisher()
        watched.bus.processor.workers.by_id[W].is_stalled = True
        assert watched.processor()("peers", side="worker", state="stalled") == 1
        hello = watched.bus.processor.workers.by_id[W].stream.hello
        hello.paused_by, hello.paused_since_unix_ms = "client: c", 5000
        assert watched.processor()("worker_paused_since_seconds", worker=W, client="client: c") == 5
    assert worker("worker_connected_processors", worker=W) == worker("worker_handshakes_total", worker=W) == 1
    assert worker("worker_items_total", worker=W, outcome="published") == 210
    assert worker("worker_items_total", worker=W, outcome="replayed") == worker("fill_ratio", of="retention") == 0
    assert told("stream_steps_total", worker=W, outcome="complete") == 100
    assert told("stream_tokens_total", worker=W) == 300
    assert told("stream_items_total", worker=W, outcome="taken") == 210
    assert (told("stream_bytes_total", worker=W) or 0) > 2100
    for outcome in ("opened", "finished"):
        assert told("requests_total", outcome=outcome, code="") == 10
    assert told("settled_rows_total", outcome="delivered") == 100
    assert told("settled_rows_total", outcome="repeated") == 0
    assert told("open_requests", state="running") == 0
    assert told("peers", side="worker", state="connected") == 1
    assert told("step_assembly_seconds_count") == told("delivery_latency_seconds_count") == 100
    assert told("delivery_latency_seconds_bucket", le="+Inf") == 100
    for name in ("draft", "accepted"):
        assert [told(f"speculative_{name}_tokens_total", worker=W, head=head) for head in ("1", "2", "3")] == [
            100,
            100,
            None,
        ]
    lag = told("stream_lag_seconds", worker=W)
    assert lag is not None
    assert 0 <= lag < 3600


async def test_what_waits_is_told(watched: Watched) -> None:
    async with watched.bus.running():
        watched.bus.publisher.publish(rows([(0, 1)]))
        await until(lambda: watched.processor()("buffered_rows") == 1)
        told = watched.processor()
    assert told("fill_ratio", of="pending_items") == 1 / watched.bus.settings.processor.pending_items
    assert told("open_requests", state="running") == 1


async def test_errors_are_told_by_code(watched: Watched) -> None:
    """All codes that have no name, as a worker may send them, are counted as one."""
    publisher = watched.bus.publisher
    async with watched.bus.running():
        for key, code in enumerate((ErrorCode.ERROR_CODE_ENGINE, 77, 78, 79), 1):
            publisher.publish(rows([(0, 1)] * key, step=key))
            tokens = watched.bus.client.resume(key, 0)
            await anext(tokens)
            publisher.failed_request(key, code, "on fire", emitted_tokens=1)  # type: ignore[arg-type]
            with pytest.raises(RequestFailedError):
                await anext(tokens)
        refused = watched.bus.client.generate(_too_much())
        with pytest.raises(RequestFailedError):
            await anext(refused)
        told = watched.processor()
    codes = [told("requests_total", outcome="failed", code=code) for code in ("engine", "other", "77")]
    assert codes == [1, 3, None]
    assert told("requests_total", outcome="refused", code="invalid_request") == 1


async def test_refusals_are_told_by_rule_and_by_side(watched: Watched) -> None:
    processor = watched.bus.processor
    async with watched.bus.running():
        for connections in (processor.clients, processor.worker_connections):
            connections.receive(next(iter(connections.peers._by_connection)), [b"\xff"], 0.0)
    processor._transport_refused("1.2.3.4:5: cut off")
    told = watched.processor()
    assert told("refused_messages_total", rule="malformed") == 2
    assert told("refusals_total", side="transport") == 1
    assert told("refusals_total", side="client") == processor.clients.refused > 0
    assert told("refusals_total", side="worker") == processor.worker_connections.refused > 0


async def test_a_workers_counts_go_on_when_it_comes_back() -> None:
    bus = Bus(settings(processor__max_workers=1))
    watched = Watched(bus)
    async with bus.running():
        await bus.serve(requests=1, tokens=3)
    assert watched.processor()("peers", side="worker", state="connected") == 0
    assert watched.processor()("gone_workers_total") == 1
    assert watched.processor()("stream_tokens_total", worker=W) == 3
    connections = bus.processor.worker_connections
    hello = Hello(worker_id=W, first_sequence=1, next_sequence=1, schema_major=1)
    back = connections._new_worker(hello, 2, ANONYMOUS, 0.0)
    back.stream.counts.tokens += 4
    assert watched.processor()("stream_tokens_total", worker=W) == 7
    connections._lose(back, "again")
    connections._lose(
        connections._new_worker(Hello(worker_id="w", first_sequence=1, next_sequence=1), 1, ANONYMOUS, 0.0), "too"
    )
    assert list(bus.processor.workers.departed) == ["w"]
    assert watched.processor()("stream_tokens_total", worker=W) is None


@pytest.mark.parametrize(("policy", "blocked"), [("fail", 0), ("block", 1)])
async def test_policies_are_told(policy: str, blocked: int) -> None:
    chosen = settings(
        worker__policy=policy, worker__retention_items=2, worker__drain_timeout_ms=0, worker__block_timeout_ms=1
    )
    watched = Watched(Bus(chosen))
    publisher = watched.bus.publisher
    publisher.begin()  # without a connection nothing is acknowledged
    publisher.publish(rows([(0, 1)]))
    with pytest.raises(RetentionFullError):
        publisher.publish(rows([(0, 1), (0, 1)]))
    publisher.gated += 1
    told = watched.publisher()
    assert told("worker_unpublished_rows_total", worker=W) == 2
    assert told("fill_ratio", of="retention") == 1  # the item, and the gap that tells of the loss
    assert told("worker_policy_batches_total", worker=W, action="gated") == 1
    assert told("worker_policy_batches_total", worker=W, action="blocked") == blocked
    assert ((told("worker_blocked_seconds_total", worker=W) or 0) >= 0.001) is bool(blocked)
    assert told("worker_connected_processors", worker=W) == 0


# What holds for all metrics.


async def test_every_metric_is_told_under_its_name_and_kind(watched: Watched) -> None:
    async with watched.bus.running():
        await watched.bus.serve(requests=1, tokens=6)
        found = watched.processor().families | watched.publisher().families
    ours: list[Family[Any]] = [*PROCESSOR, *PUBLISHER]
    documented = {family.name.removesuffix("_total"): family for family in ours}
    assert {name for name in found if not name.startswith("process_")} == {*documented, "tokenbus_build_info"}
    for name, family in documented.items():
        assert (found[name].type, found[name].documentation) == (family.kind, family.help)
