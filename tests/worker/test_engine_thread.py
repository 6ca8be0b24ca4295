"""An engine is made, stepped and closed on one thread; what its making raises reaches the caller that waits for it."""

import asyncio
import threading
from typing import Any

import pytest

from tests.cli.helpers import generate, memory_settings
from tests.support.serving import serve
from tests.support.waiting import MOST, soon, until
from tokenbus.bus.memory import MemoryTransport
from tokenbus.client import Client
from tokenbus.engines.synthetic import SyntheticEngine
from tokenbus.processor import Processor
from tokenbus.worker import StepArrays
from tokenbus.worker.engine import engine_of
from tokenbus.worker.run import run_engine


class Noting(SyntheticEngine):
    def __init__(self) -> None:
        super().__init__()
        self.threads = [threading.current_thread()]

    def step(self) -> list[StepArrays]:
        self.threads.append(threading.current_thread())
        return list(super().step())

    def close(self) -> None:
        self.threads.append(threading.current_thread())


async def test_engine_is_made_stepped_and_closed_on_one_thread() -> None:
    settings, made = memory_settings(), list[Noting]()
    transport, stop = MemoryTransport(settings.bus), asyncio.Event()

    def make() -> Noting:
        made.append(Noting())
        return made[0]

    async with Processor(settings, transport=transport) as processor, Client(settings, transport=transport) as client:
        working = asyncio.create_task(serve(make, settings, stop, transport=transport))
        await until(lambda: processor.workers.by_id)
        assert len([token async for token in client.generate(generate(9))]) == 9
        stop.set()
        await asyncio.wait_for(working, MOST)
    (engine,) = made
    assert len(engine.threads) >= 5
    assert set(engine.threads) == {engine.threads[0]}
    assert engine.threads[0] is not threading.current_thread()


class Rank(SyntheticEngine):
    dp_rank = 3


async def test_rank_of_the_engine_is_the_workers() -> None:
    settings = memory_settings()
    transport, stop = MemoryTransport(settings.bus), asyncio.Event()
    async with Processor(settings, transport=transport) as processor, Client(settings, transport=transport) as client:
        steps = processor.steps()
        working = asyncio.create_task(serve(Rank(), settings, stop, transport=transport))
        await until(lambda: processor.workers.by_id)
        assert [worker.stream.hello.dp_rank for worker in processor.workers.by_id.values()] == [3]
        tokens = client.generate(generate(9))
        assert (await soon(anext(steps))).target.header.dp_rank == 3
        await steps.aclose()
        assert len([token async for token in tokens]) > 0
        stop.set()
        await asyncio.wait_for(working, MOST)


def refuse() -> SyntheticEngine:
    raise LookupError("no weights")


async def test_what_making_raises_is_raised() -> None:
    settings = memory_settings()
    with pytest.raises(LookupError, match="no weights"):
        await serve(refuse, settings, transport=MemoryTransport(settings.bus))
    with pytest.raises(LookupError, match="no weights"):
        await asyncio.to_thread(run_engine, refuse, settings, stop=threading.Event())


class Calling(Noting):
    def __call__(self) -> None:
        raise AssertionError("it was taken for a function")


def test_engine_or_a_function_that_makes_one() -> None:
    calling = Calling()
    assert engine_of(calling) is calling
    assert isinstance(engine_of(Calling), Calling)
    line = r"^an engine or a function that makes one \(see tokenbus.BaseEngine\), got int, which lacks admit, abort, "
    for wrong in (42, lambda: 42):
        given: Any = wrong
        with pytest.raises(TypeError, match=line):
            run_engine(given, memory_settings(), stop=threading.Event())


async def test_engine_that_nobody_waits_for_is_closed() -> None:
    go, engine = threading.Event(), Noting()

    def make() -> Noting:
        go.wait(MOST)
        return engine

    settings = memory_settings()
    working = asyncio.create_task(serve(make, settings, transport=MemoryTransport(settings.bus)))
    await asyncio.sleep(0)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert len(engine.threads) == 1
    go.set()
    await until(lambda: len(engine.threads) == 2)
