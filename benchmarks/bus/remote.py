"""The way to a client in a third process: a Client asks for the requests, and takes their tokens."""

import asyncio
import tempfile

from benchmarks.bus.orders import Order, Received, Sent
from benchmarks.bus.pace import Watch, sent
from benchmarks.bus.peers import Tell
from benchmarks.bus.tokenbus import publish_all, settings_of, shares_of, worker_left
from tokenbus_contracts import LogprobBatch
from tokenbus_contracts.generated.request_pb2 import Abort, Generate, SamplingParameters, TokenPrompt
from tokenbus_services.client import Client, Generation, RequestEnd, StepRows
from tokenbus_services.processor import Processor
from tokenbus_services.settings import Settings
from tokenbus_services.worker import Publisher

_WAIT_SECONDS = 0.1
_LOOK_SECONDS = 0.01
_MANY_FRAMES = 1 << 20
_MANY_BYTES = 1 << 29


def relayed_settings(order: Order, folder: str, **more: object) -> Settings:
    """Return the settings of the three: a client that is slower than the worker makes it wait, and ends nothing."""
    send_queue = {"clients.send_queue_frames": _MANY_FRAMES, "clients.send_queue_bytes": _MANY_BYTES}
    return settings_of(order, folder, **send_queue, **{"processor.pending_items": 512, **more})


def prompt(most: int) -> Generate:
    """Return a request for so many tokens."""
    return Generate(tokens=TokenPrompt(token_ids=[1]), sampling=SamplingParameters(max_tokens=most), top_logprobs=0)


def send_asked(order: Order) -> Sent:
    """Wait until as many requests were asked for as a step has rows, and publish the steps for them."""
    with tempfile.TemporaryDirectory() as folder, Publisher(relayed_settings(order, folder)) as publisher:
        keys: list[int] = []
        while len(keys) < order.case.rows:
            keys += [_key(request) for request in publisher.take_requests(_WAIT_SECONDS)]
        for key in keys:
            publisher.admitted(key, 1)
        watch = publish_all(order, publisher, keys)
    return sent(watch)


def relay(order: Order, tell: Tell) -> int:
    """Run a processor until its worker and its client have left; return its processor time in nanoseconds."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_relay(order, tell, relayed_settings(order, folder)))


async def _relay(_order: Order, tell: Tell, settings: Settings) -> int:
    watch = Watch()
    async with Processor(settings) as processor:
        processor.intake.step_observers.append(lambda _step: watch.note())
        tell(f"{processor.workers_address} {processor.clients_address}")
        await both_left(processor)
    return watch.cpu_ns


async def both_left(processor: Processor) -> None:
    """Wait until a worker and a client have been there, and have left."""
    while not processor.intake.steps:  # noqa: ASYNC110 - nothing tells; with the first step, both have been there
        await asyncio.sleep(_LOOK_SECONDS)
    while processor.clients.sessions:  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(_LOOK_SECONDS)
    await worker_left(processor)


def receive_remote(order: Order) -> Received:
    """Ask for the requests, and note when each step is with all of them."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_receive(order, relayed_settings(order, folder)))


async def _receive(order: Order, settings: Settings) -> Received:
    watch = Watch()
    first: list[LogprobBatch] = []
    async with Client(settings) as client:
        requests = [client.generate(prompt(1)) for _ in range(order.case.rows)]

        def came(output: StepRows | RequestEnd) -> None:
            if isinstance(output, StepRows):
                watch.note()
                if not first:
                    first.append(output.target)

        client.requests.open_stream(came)
        await asyncio.gather(*map(_ended, requests))
        cpu_ns = watch.cpu_ns
    return Received(watch.at[:-1], cpu_ns, shares_of(order, first[0]))


async def _ended(tokens: Generation) -> None:
    async for _ in tokens.rows():
        pass


def _key(request: Generate | Abort) -> int:
    return request.request_key
