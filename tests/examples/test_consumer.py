"""The consumer in Node, on a processor and a worker of the test's own."""

import asyncio
import tempfile
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tests.examples.programs import program
from tests.support.waiting import MOST, soon, until
from tests.system.deployment import Deployment
from tests.system.inprocess import processing, working
from tokenbus.processor import Processor
from tokenbus.testing import SyntheticEngine, true_tokens
from tokenbus.worker.step import StepArrays

_HEARTBEATS = 3


class WaitingEngine(SyntheticEngine):
    """An engine whose first step waits until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go_on = threading.Event()

    def step(self) -> Sequence[StepArrays]:
        assert self.may_go_on.wait(MOST)
        return super().step()


@asynccontextmanager
async def system(engine: SyntheticEngine) -> AsyncIterator[Processor]:
    with tempfile.TemporaryDirectory(prefix="tb") as folder:
        deployment = Deployment(Path(folder))
        async with processing(deployment) as (processor, addresses), working(deployment, engine, **addresses):
            await until(lambda: "worker-0" in processor.workers.by_id)
            yield processor


async def start(address: str, tokens: int) -> asyncio.subprocess.Process:
    command = [*program("consumer"), address, "The old man", str(tokens)]
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)


async def check_end(consumer: asyncio.subprocess.Process, tokens: int) -> None:
    printed, logged = await soon(consumer.communicate())
    assert consumer.returncode == 0, logged
    name, key, *_ = logged.decode().split()
    assert name == "request"
    found = [(int(token), float(logprob)) for token, logprob in map(str.split, printed.decode().splitlines())]
    true = true_tokens(int(key), 0, tokens)
    assert found == list(zip(true.ids.tolist(), true.logprobs.tolist(), strict=True))


async def test_consumer_prints_the_tokens_of_its_request() -> None:
    tokens = 300
    async with system(SyntheticEngine()) as processor:
        await check_end(await start(processor.clients_address, tokens), tokens)


async def test_consumer_is_heard_while_it_waits() -> None:
    tokens = 9
    engine = WaitingEngine()
    async with system(engine) as processor:
        consumer = await start(processor.clients_address, tokens)
        heard: set[int] = set()

        def is_alive() -> bool:
            heard.update(session.echo_ns for session in processor.clients.sessions.values() if session.echo_ns)
            return len(heard) >= _HEARTBEATS

        await until(is_alive)
        engine.may_go_on.set()
        await check_end(consumer, tokens)


async def test_consumer_says_why_its_request_is_refused() -> None:
    async with system(SyntheticEngine()) as processor:
        consumer = await start(processor.clients_address, tokens=0)
        printed, logged = await soon(consumer.communicate())
    assert (consumer.returncode, printed) == (1, b"")
    assert "max_tokens" in logged.decode()
