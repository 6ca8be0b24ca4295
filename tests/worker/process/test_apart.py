"""An engine and a publisher apart: whichever dies, requests get what is true of them, or an error that says why."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.metrics.running import scrape
from tests.support.waiting import MOST, until
from tests.worker.process.apart import Apart, Stores, apart
from tokenbus.client import Client, Operator
from tokenbus.delivery import RequestFailedError
from tokenbus.engines.synthetic import SyntheticEngine, true_prompt_scores
from tokenbus.metrics.publisher import PUBLISHER, publisher_collector
from tokenbus.metrics.server import LoopWatch
from tokenbus.testing import true_tokens
from tokenbus.worker import NotRunningError, StepArrays
from tokenbus.worker.engine_publisher import EnginePublisher
from tokenbus.worker.process import shared_memory_publisher
from tokenbus_contracts.generated.request_pb2 import (
    Continuation,
    ErrorCode,
    Generate,
    PromptScoring,
    SamplingParameters,
    TokenPrompt,
)

TOKENS = 40


async def _stores(dies_at: int | None) -> Stores:
    stores = Stores(dies_at)
    async with apart(drafts=True) as worker:
        requests = await asked(worker)
        await worker.lose_publisher()
        worker.loop.turn()
        await worker.start_publisher(stores=stores)
        requests += [Asked(worker.bus.client) for _ in range(2)]
        for _ in range(TOKENS):
            await worker.turn()
            worker.bus.clock.advance(0.1)  # so that what came is acknowledged
            if worker.line.is_dead:
                await worker.lose_publisher()
                await worker.start_publisher()
        assert all_exact(requests), [each.error for each in requests]
        assert stores.has_ended == (dies_at is not None)
        assert not worker.server.publisher.session.requests
    return stores


@pytest.mark.long
@pytest.mark.parametrize("times", [1, pytest.param(80, marks=pytest.mark.nightly)])
async def test_publisher_that_dies_at_any_store_loses_nothing(times: int) -> None:
    """Whichever word of the shared memory it was about to store: the next one goes on, with drafts beside the rows."""
    stores = (await _stores(None)).places
    deaths: dict[str, list[int]] = {}
    for number, place in enumerate(stores):
        deaths.setdefault(place, []).append(number)
    assert len(deaths) >= 11
    for numbers in deaths.values():
        for number in numbers[:: max(1, len(numbers) // times)]:
            await _stores(number)


class Asked:
    def __init__(self, client: Client, tokens: int = TOKENS) -> None:
        self.generation = client.generate(
            [1, 2, 3], max_tokens=tokens, ignore_end_token=True, top_logprobs=2, continuation="off"
        )
        self.key = self.generation.request_id
        self.ids: list[int] = []
        self.error: RequestFailedError | None = None
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for token in self.generation:
                self.ids.append(token.id)
        except RequestFailedError as error:
            self.error = error

    @property
    def is_exact(self) -> bool:
        """Whether what came is what is true of it, up to there."""
        true: list[int] = true_tokens(self.key, 0, len(self.ids)).ids.tolist()
        return self.ids == true


async def asked(of: Apart, count: int = 3, tokens: int = TOKENS) -> list[Asked]:
    made = [Asked(of.bus.client, tokens) for _ in range(count)]
    await of.bus.settle()
    await of.turn(3)
    assert all(each.ids for each in made)
    return made


def all_exact(requests: list[Asked], tokens: int = TOKENS) -> bool:
    return all(each.ids == true_tokens(each.key, 0, tokens).ids.tolist() and each.error is None for each in requests)


async def test_its_metrics_are_those_of_any_worker() -> None:
    async with apart() as worker:
        await asked(worker)
        worker.publisher.counts.failed_steps += 2
        watch = LoopWatch(lambda: None, worker.bus.clock.now)
        worker_id = worker.settings.worker.id
        told = scrape(publisher_collector(worker.server.publisher, watch))
        assert {family.name.removesuffix("_total") for family in PUBLISHER} <= told.families.keys()
        assert told("worker_engine_failures_total", worker=worker_id, of="step") == 2
        assert told("worker_connected_processors", worker=worker_id) == 1


@pytest.mark.parametrize("engine_takes", [False, True])
async def test_new_publisher_takes_over_what_waits_for_the_engine(*, engine_takes: bool) -> None:
    """Requests that the engine had not taken when the publisher died are neither lost nor taken twice.

    Nor are those that it takes while the next publisher starts.
    """
    async with apart() as worker:
        requests = [Asked(worker.bus.client) for _ in range(5)]
        await worker.bus.settle()
        await worker.lose_publisher()
        await worker.start_publisher(worker.loop.turn if engine_takes else lambda: None)
        await worker.turn(TOKENS + 3)
        assert all_exact(requests)


async def test_new_publisher_says_which_turn_was_admitted() -> None:
    async with apart() as worker, worker.bus.client.watch() as watched:
        continuation = Continuation(token_ids=[4, 5], turn=2, reason=ErrorCode.ERROR_CODE_WORKER_LOST)
        sampling = SamplingParameters(max_tokens=9)
        worker.bus.client.generate(
            Generate(
                tokens=TokenPrompt(token_ids=[1]), sampling=sampling, first_request_id=7, continuation=continuation
            )
        )
        await worker.bus.settle()
        await worker.lose_publisher()
        worker.loop.turn()
        await worker.start_publisher()
        item = await anext(watched)
    assert item.event is not None
    admitted = item.event.admitted
    assert (admitted.first_request_id, admitted.turn, admitted.first_position) == (7, 2, 2)
    assert admitted.reason == ErrorCode.ERROR_CODE_WORKER_LOST


async def test_prompts_are_scored_though_publishers_die() -> None:
    prompt = list(range(1, 3001))  # whose scores are several records
    async with apart() as worker:
        scored = worker.bus.client.generate(prompt, max_tokens=3, prompt_logprobs=4)
        await worker.bus.settle()
        worker.loop.turn()
        for _ in range(3):
            await worker.lose_publisher()
            await worker.start_publisher()
        await worker.turn(3)
        assert [token.id async for token in scored] == true_tokens(scored.request_id, 0, 3).ids.tolist()
        true = true_prompt_scores(scored.request_id, prompt, PromptScoring(top_logprobs=4))
        assert scored.prompt_scores is not None
        assert np.array_equal(scored.prompt_scores.alternative_logprobs, true.alternative_logprobs)


async def test_commands_are_done_once_though_publishers_die(tmp_path: Path) -> None:
    async with apart() as worker:
        operator = Operator(worker.bus.client)
        first = asyncio.create_task(operator.load_adapter("first", str(tmp_path)))
        await worker.bus.settle()
        await worker.lose_publisher()
        await worker.start_publisher()  # to which the processor says it again
        worker.loop.turn()
        await worker.lose_publisher()
        second = asyncio.create_task(operator.load_adapter("second", str(tmp_path)))
        await worker.start_publisher()
        await worker.bus.advance(1)  # as often as that a processor says how its workers are
        await worker.turn(3)
        (state,) = (await first).values()
        assert list(state.lora_adapters) == ["first"]
        (state,) = (await second).values()
        assert list(state.lora_adapters) == ["first", "second"]


async def test_new_publisher_says_who_paused_the_engine_until_the_lease_ends() -> None:
    """A processor that comes anew hears it from that publisher alone."""
    async with apart() as worker:
        bus = worker.bus

        async def paused_by() -> set[str]:
            await bus.advance(1)  # until a status is made anew
            return {each.paused_by for each in (await bus.client.status()).workers}

        pausing = asyncio.create_task(Operator(bus.client, on_behalf_of="trainer").pause(lease_seconds=10))
        await bus.settle()
        await worker.turn()
        assert (await pausing)[worker.settings.worker.id].is_paused
        assert await paused_by() == {"client: trainer"}  # by now the answer is acknowledged: it is not sent again
        await worker.lose_publisher()
        await worker.start_publisher()
        await bus.restart_processor()
        await bus.advance(3)
        waiting = Asked(bus.client)
        await worker.turn(TOKENS)
        assert await paused_by() == {"client: trainer"}
        assert not waiting.ids
        bus.clock.advance(10)
        await worker.turn(TOKENS + 3)
        assert all_exact([waiting])
        assert await paused_by() == {""}


async def test_engine_that_makes_no_progress_is_lost_with_its_requests_until_it_does() -> None:
    """The longest step may take its time; what an operator asks, too. One without requests has nothing to do."""
    async with apart(longest_step_ms=5000) as worker:
        (known,) = worker.bus.processors[0].workers.by_id.values()  # type: ignore[union-attr]
        await worker.bus.advance(10)
        assert not known.is_stalled
        requests = await asked(worker)
        worker.publisher.counts.commands = 1
        await worker.bus.advance(10)
        assert not known.is_stalled
        worker.publisher.counts.commands = 0
        await worker.bus.advance(5)
        assert known.is_stalled
        await worker.turn()
        await worker.bus.advance(1)
        assert not known.is_stalled
        await worker.bus.advance(10)
        for each in requests:
            assert each.error is not None
            assert each.error.code == ErrorCode.ERROR_CODE_WORKER_LOST
            assert "its engine made no progress" in each.error.reason
            assert each.is_exact
        await worker.bus.advance(10)
        assert worker.bus.processors[0].workers.by_id == {}  # type: ignore[union-attr]
        await worker.turn()
        await worker.bus.advance(3)
        late = Asked(worker.bus.client)
        await worker.bus.settle()
        await worker.turn(TOKENS + 3)
        assert all_exact([late])


@pytest.mark.parametrize("unread", [False, True])
async def test_requests_end_at_once_when_the_engine_dies(unread: bool) -> None:  # noqa: FBT001 - a parameter
    """What was handed over is delivered first; no time has to pass, and nothing is waited for."""
    async with apart() as worker:
        requests = await asked(worker)
        before = [len(each.ids) for each in requests]
        if unread:
            worker.loop.turn()
        worker.lose_engine()
        await worker.bus.settle()
        for each, count in zip(requests, before, strict=True):
            assert each.error is not None
            assert (each.error.code, each.error.emitted_tokens) == (ErrorCode.ERROR_CODE_ENGINE, len(each.ids))
            assert each.error.reason == "the engine's process died"
            assert each.is_exact
            assert (len(each.ids) > count) == unread
        assert worker.bus.processors[0].workers.by_id == {}  # type: ignore[union-attr]
        assert worker.serving is not None
        await worker.bus.until(worker.serving)


async def test_requests_that_come_when_the_engine_has_died_go_to_another_worker() -> None:
    async with apart() as worker:
        worker.lose_engine()
        waiting = Asked(worker.bus.client)
        await worker.bus.settle()
        await worker.bus.add_worker()
        await worker.bus.until(waiting.task)
        assert all_exact([waiting])


async def test_cached_tokens_are_handed_over() -> None:
    async with apart() as worker:
        first, second = await asked(worker, 2)
        for request, cached in ((first, 32), (second, None)):
            worker.publisher.admitted(request.key, 48, cached)
        await worker.bus.settle()
        assert [request.generation.cached_tokens for request in (first, second)] == [32, None]


async def test_publisher_says_how_full_the_engines_cache_is() -> None:
    async with apart() as worker:
        worker.publisher.counts.kv_cache = 251
        await worker.bus.advance(1)
        (status,) = (await worker.bus.client.status()).workers
        assert status.kv_cache_permille == 250


async def test_worker_leaves_when_all_is_acknowledged() -> None:
    async with apart() as worker:
        requests = await asked(worker)
        worker.publisher.take_no_more()
        await worker.turn(TOKENS)
        worker.publisher.leave(MOST)
        assert worker.serving is not None
        await worker.bus.until(worker.serving)
        assert all_exact(requests)
        assert worker.bus.processors[0].workers.by_id == {}  # type: ignore[union-attr]
        with pytest.raises(NotRunningError):
            worker.publisher.admitted(1, 1)


async def test_new_publisher_leaves_too() -> None:
    async with apart(drain_timeout_ms=10_000) as worker:
        requests = await asked(worker, tokens=10)
        await worker.lose_publisher()
        worker.loop.finish(MOST, worker.bus.clock.now)
        worker.publisher.leave(0)
        await worker.start_publisher()
        assert worker.serving is not None
        await worker.bus.until(worker.serving)
        assert all_exact(requests, 10)


async def test_arrays_that_are_none_end_their_requests() -> None:
    async with apart() as worker:
        (request,) = await asked(worker, 1)
        worker.publisher.emit(
            StepArrays(request_ids=[request.key], positions=[9], token_counts=[1], token_ids=[[1], [2, 3]])
        )
        await worker.bus.settle()
        await worker.bus.settle()
        assert request.error is not None
        assert request.error.code == ErrorCode.ERROR_CODE_ENGINE
        assert "token_ids: an array" in request.error.reason
        worker.publisher.take_requests()
        assert worker.publisher.take_aborts() == [request.key]


async def test_what_finds_no_room_is_named() -> None:
    async with apart(policy="fail", handover_items=16) as worker:
        requests = await asked(worker, tokens=10_000)
        most = worker.settings.worker.handover_items
        await worker.lose_publisher()
        for _ in range(most + 2):
            worker.loop.turn()
        assert worker.loop._client.active.end_all() == []
        await worker.start_publisher()
        await worker.bus.advance(2)
        await worker.turn()
        await worker.bus.advance(5)
        for each in requests:
            assert each.error is not None
            assert each.error.code == ErrorCode.ERROR_CODE_GAP
            assert each.is_exact
        late = await asked(worker, 1)
        await worker.turn(TOKENS)
        assert all_exact(late)


async def test_what_finds_no_room_and_is_too_much_to_name_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory_publisher, "_MAX_LOST", 2)
    async with apart(policy="fail", handover_items=16) as worker:
        requests = await asked(worker, tokens=10_000)
        await worker.lose_publisher()
        for _ in range(worker.settings.worker.handover_items + 2):
            worker.loop.turn()
        await worker.start_publisher()
        await worker.bus.advance(2)
        await worker.turn()
        await worker.bus.advance(5)
        assert [each.error is not None and each.error.code for each in requests] == [ErrorCode.ERROR_CODE_GAP] * 3
        assert all(each.is_exact for each in requests)


async def test_step_that_cannot_be_published_ends_requests_and_not_the_publisher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A defect of ours is no loop of publishers that each die of the same record."""
    async with apart() as worker:
        requests = await asked(worker)
        with monkeypatch.context() as broken:
            broken.setattr(EnginePublisher, "emit", lambda *_: 1 / 0)
            await worker.turn()
        for each in requests:
            assert each.error is not None
            assert each.error.code == ErrorCode.ERROR_CODE_GAP
        (late,) = await asked(worker, 1)
        await worker.turn(TOKENS)
        assert all_exact([late])


async def test_engine_waits_for_room_and_then_for_no_publisher_for_ever() -> None:
    async with apart(block_timeout_ms=10_000_000, handover_items=16) as worker:
        requests = await asked(worker, 1, tokens=100)
        await worker.lose_publisher()
        handed = threading.Event()

        def engine() -> None:
            for _ in range(worker.settings.worker.handover_items + 3):
                worker.loop.compute()
            handed.set()

        thread = threading.Thread(target=engine)
        thread.start()
        await until(lambda: not worker.publisher._steps.has_room(0))
        assert not handed.is_set()
        await worker.start_publisher()
        await asyncio.to_thread(thread.join, MOST)
        assert handed.is_set()
        await worker.bus.settle()
        await worker.turn(100 - len(requests[0].ids))
        assert all_exact(requests, 100)


async def test_admissions_and_errors_wait_for_room_as_steps_do() -> None:
    async with apart(retention_items=8) as worker:
        early = await asked(worker)
        late = [Asked(worker.bus.client) for _ in range(3)]
        await worker.bus.settle()
        worker.line.hold()
        await worker.turn(10)
        worker.publisher.failed(2**40, ErrorCode.ERROR_CODE_ENGINE, "no")
        await worker.turn(10)
        assert worker.publisher._steps.taken < worker.publisher._steps._written
        worker.line.release()
        await worker.bus.advance(5)
        await worker.turn(TOKENS)
        await worker.bus.advance(5)
        assert all_exact([*early, *late])
        assert worker.server.publisher.failed == 0


async def test_engine_that_takes_no_requests_hears_which_ended() -> None:
    async with apart(retention_items=2, policy="fail", max_requests=0) as worker:
        worker.line.hold()
        for key in (1, 2):
            worker.publisher.emit(StepArrays(request_ids=[key], positions=[0], token_counts=[1], token_ids=[5]))
            await worker.bus.settle()
        assert worker.publisher.take_aborts() == [2]
        assert worker.publisher.take_aborts() == []


async def test_requests_end_when_retention_stays_full() -> None:
    async with apart(retention_items=8, block_timeout_ms=500) as worker:
        requests = await asked(worker)
        worker.line.hold()
        await worker.turn(20)
        worker.bus.clock.advance(0.6)
        await worker.bus.settle()
        worker.line.release()
        await worker.turn(4)
        for each in requests:
            assert each.error is not None
            assert each.error.code == ErrorCode.ERROR_CODE_GAP
            assert each.is_exact
        assert worker.loop._client.active.end_all() == []


async def test_prefill_worker_may_publish_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its publisher dies, and the next one sends the state and the last row."""
    states: list[bytes] = []

    class Decode(SyntheticEngine):
        def admit(self, generate: Generate) -> int:
            states.append(generate.continuation.transfer_state)
            return super().admit(generate)

    async with apart(role="prefill") as worker:
        await worker.bus.add_worker(Decode(), role="decode")
        step = worker.engine.step

        def with_state() -> Sequence[StepArrays]:
            found = step()
            found[0].transfer_states = dict.fromkeys(map(int, found[0].request_ids), b"state")
            return found

        monkeypatch.setattr(worker.engine, "step", with_state)
        requests = [Asked(worker.bus.client) for _ in range(3)]
        await worker.bus.settle()
        worker.loop.turn()
        await worker.lose_publisher()
        await worker.start_publisher()
        await worker.turn(TOKENS)
        assert all_exact(requests)
        assert states == [b"state"] * 3
