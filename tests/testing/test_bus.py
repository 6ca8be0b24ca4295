"""tokenbus.testing.bus: the real protocol in one event loop, and what a test may do to it."""

import asyncio
from collections.abc import AsyncIterator

import pytest

import tokenbus
from tests.support.waiting import soon
from tokenbus import testing
from tokenbus_contracts import RowStatus

FIRST = 7


async def ids_of(tokens: AsyncIterator[tokenbus.Token]) -> list[int]:
    return [token.id async for token in tokens]


def truth(key: int, size: int) -> list[int]:
    found: list[int] = testing.true_tokens(key, 0, size).ids.tolist()
    return found


async def test_code_that_connects_by_itself_finds_it() -> None:
    async with testing.bus(workers=0) as bus:
        publisher = tokenbus.Publisher(bus.settings, vocabulary_size=50_000)
        async with publisher, tokenbus.connect(bus.address) as client:
            await bus.settle()
            generation = client.generate([1], max_tokens=2, request_id=FIRST)
            await bus.settle()
            assert [request.request_id for request in publisher.take_requests()] == [FIRST]
            publisher.admitted(FIRST, 1)
            rows = [testing.RowShape(FIRST, 0, 2, RowStatus.FINISHED_LENGTH)]
            publisher.publish(testing.batch(rows))
            assert await bus.until(ids_of(generation)) == truth(FIRST, 2)
    with pytest.raises(tokenbus.AddressError, match=r"no bus of tokenbus\.testing in this process has it"):
        await tokenbus.connect(bus.address).__aenter__()


async def test_time_passes_when_the_test_says_so() -> None:
    async with testing.bus(step_seconds=1.0) as bus:
        generation = bus.client.generate([1], request_id=FIRST)
        first = asyncio.ensure_future(anext(generation))
        await bus.advance(0.95)
        assert not first.done()
        await bus.advance(0.1)
        assert first.result().id == truth(FIRST, 1)[0]


async def test_what_does_not_come_ends_a_wait() -> None:
    async with testing.bus(workers=0) as bus:
        before, generation = bus.clock.now(), bus.client.generate([1])
        with pytest.raises(TimeoutError, match=r"not done after 2\.5 s of the bus's time"):
            await bus.until(anext(generation), seconds=2.5)
        assert bus.clock.now() - before == pytest.approx(2.5)


async def test_alternatives_are_shed_while_a_client_stands_still() -> None:
    """A worker with the policy shed drops them once its retention is three quarters full, and then computes no more."""
    async with testing.bus(settings={"worker.policy": "shed", "worker.retention_bytes": 4_194_304}) as bus:
        generation = bus.client.generate([1], max_tokens=3000, top_logprobs=2, request_id=FIRST)
        tokens = [await anext(generation)]
        line = bus.line(bus.client)
        line.hold()
        await bus.settle()
        line.release()

        async def read() -> list[tokenbus.Token]:
            return [token async for token in generation]

        tokens += await bus.until(read())
        assert [token.id for token in tokens] == truth(FIRST, 3000)
        assert [len(token.alternatives) for token in tokens] == [0 if token.is_shed else 2 for token in tokens]
        assert {token.is_shed for token in tokens} == {True, False}


async def test_lost_worker_ends_its_requests() -> None:
    """It says nothing, and its connection closes: it has half a second to come back. Its next life takes requests."""
    async with testing.bus(step_seconds=0.1) as bus:
        generation = bus.client.generate([1], max_tokens=1000, request_id=FIRST, continuation="off")
        await bus.until(anext(generation))
        await bus.worker.lose()
        await bus.advance(0.3)
        assert bus.processor.workers.by_id
        await bus.advance(1)
        with pytest.raises(tokenbus.RequestFailedError, match="worker_lost"):
            await ids_of(generation)
        await bus.add_worker(worker_id=bus.worker.id)
        again = bus.client.generate([1], max_tokens=2, request_id=FIRST + 1)
        assert await bus.until(ids_of(again)) == truth(FIRST + 1, 2)


@pytest.mark.parametrize("place", [0, 1])
async def test_requests_go_on_after_a_processor_was_lost(place: int) -> None:
    async with testing.bus(testing.SyntheticEngine, workers=3, processors=2, step_seconds=0.1) as bus:
        asked = [bus.client.generate([1], max_tokens=30, request_id=key) for key in range(1, 9)]
        tokens = asyncio.gather(*map(ids_of, asked))
        await bus.advance(0.35)
        await bus.lose_processor(place)
        await bus.advance(1.0)
        await bus.start_processor(place)
        assert await bus.until(tokens) == [truth(key, 30) for key in range(1, 9)]


async def test_lost_client_is_forgotten() -> None:
    async with testing.bus(step_seconds=0.1) as bus:
        other = await bus.add_client("other")
        generation = other.generate([1], request_id=FIRST)
        await bus.until(anext(generation))
        await bus.lose_client(other)
        await bus.advance(bus.settings.client.resume_timeout_ms / 1000 + 5)
        assert not list(bus.processor.registry.table.open_requests())


async def test_worker_of_a_lost_ones_id_takes_its_place() -> None:
    async with testing.bus(step_seconds=0.5) as bus:
        with pytest.raises(ValueError, match="worker_id: worker-0 is running already"):
            await bus.add_worker(worker_id="worker-0")
        await bus.worker.lose()
        again = await bus.add_worker(worker_id="worker-0")
        other = await bus.add_worker()
        assert (bus.worker, bus.workers, other.id) == (again, [again, other], "worker-1")
        assert again.step_seconds == 0.5
        await other.stop()
        assert await bus.until(ids_of(bus.client.generate([1], max_tokens=9, request_id=FIRST))) == truth(FIRST, 9)


async def test_code_that_still_waits_when_the_bus_ends_goes_on() -> None:
    """A client of the test's own is not the bus's to end; time passes by itself from then on."""
    async with testing.bus(step_seconds=0.1, settings={"bus.heartbeat_timeout_ms": 500}) as bus:
        own = tokenbus.connect(bus.address, settings=bus.settings)
        await own.__aenter__()
        generation = own.generate([1], deadline_ms=300)
        await bus.until(anext(generation))
    with pytest.raises(tokenbus.RequestFailedError, match="deadline"):
        await soon(ids_of(generation))
    await soon(own.__aexit__(None, None, None))


class Stuck(testing.SyntheticEngine):
    def close(self) -> None:
        raise OSError("it cannot be closed")


async def test_bus_ends_whole_where_an_engine_cannot_be_closed() -> None:
    before = asyncio.all_tasks()
    with pytest.raises(OSError, match="it cannot be closed"):
        async with testing.bus(Stuck, workers=2) as bus:
            address = bus.address
    assert asyncio.all_tasks() == before
    with pytest.raises(tokenbus.AddressError):
        await tokenbus.connect(address).__aenter__()


async def test_what_is_not_there_is_told() -> None:
    async with testing.bus(workers=0) as bus:
        with pytest.raises(RuntimeError, match="there is no worker: call add_worker first"):
            bus.worker  # noqa: B018 - it raises
        client = await bus.add_client()
        await bus.lose_client(client)
        with pytest.raises(ValueError, match="client: not a client of this bus, or lost"):
            bus.line(client)


class Defective(testing.SyntheticEngine):
    @property
    def has_work(self) -> bool:
        if self._requests:
            raise TypeError("a defect of the engine's")
        return False


async def test_defect_of_an_engine_is_raised_where_the_test_waits() -> None:
    async with testing.bus(Defective()) as bus:
        generation = bus.client.generate([1])
        with pytest.raises(TypeError, match="a defect of the engine's"):
            await bus.until(anext(generation))
        assert isinstance(bus.worker.failure, TypeError)


async def test_what_makes_no_bus_is_refused() -> None:
    with pytest.raises(ValueError, match="engine: a function that creates engines, for 2 workers, got an engine"):
        await testing.bus(testing.SyntheticEngine(), workers=2).__aenter__()
    with pytest.raises(ValueError, match="processors: at least 1, got 0"):
        await testing.bus(processors=0).__aenter__()


async def test_settings_are_those_given_and_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENBUS_WORKER_MAX_REQUESTS", "7")
    async with testing.bus(settings={"worker.max_requests": 1}) as bus:
        assert bus.settings.worker.max_requests == 1
    async with testing.bus() as bus:
        assert bus.settings.worker.max_requests not in {1, 7}
    with pytest.raises(tokenbus.SettingsError, match=r"worker\.nonsense"):
        await testing.bus(settings={"worker.nonsense": 1}).__aenter__()


async def test_processor_that_is_not_there_is_told() -> None:
    async with testing.bus() as bus:
        with pytest.raises(RuntimeError, match="processor 0 is running already"):
            await bus.start_processor()
        await bus.lose_processor()
        with pytest.raises(RuntimeError, match="processor 0 is not running"):
            await bus.lose_processor()
        with pytest.raises(RuntimeError, match="the processor is not running: call start_processor first"):
            bus.processor  # noqa: B018 - it raises


async def test_bus_ends_with_open_requests_and_leaves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    before = asyncio.all_tasks()
    async with testing.bus(testing.SyntheticEngine, workers=2, step_seconds=0.5) as bus:
        generations = [bus.client.generate([1]) for _ in range(20)]
        await bus.until(anext(generations[0]))
    assert asyncio.all_tasks() == before
    ours = [record for record in caplog.records if record.name.startswith("tokenbus")]
    assert [record.message for record in ours if record.levelname == "ERROR"] == []
