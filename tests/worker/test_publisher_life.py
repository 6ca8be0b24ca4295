"""Publisher: how it starts, how it leaves, and the requests that come in while it runs."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.in_process.breaking import BreakingTransport, UselessTransport
from tests.in_process.builders import EPOCH, generate_of, settings
from tests.support.waiting import soon, turns
from tests.worker.peer import welcome_of
from tokenbus.bus import AddressError, Listener
from tokenbus.bus.memory import MemoryTransport
from tokenbus.settings import Settings
from tokenbus.testing import ManualClock, batch, row_shapes
from tokenbus.worker import NotRunningError, Publisher, WouldWaitError
from tokenbus.worker.engine import EngineDescription
from tokenbus_contracts import BatchKind, ContractError, RowStatus
from tokenbus_contracts.frames import read_frame, write_frame
from tokenbus_contracts.generated.request_pb2 import Abort, ErrorCode
from tokenbus_contracts.generated.stream_pb2 import Ack, ProcessorFrame, WorkerFrame

ADDRESS = "memory://workers"


def at_memory(**worker: object) -> Settings:
    return settings({"bus.workers_address": ADDRESS} | {f"worker.{name}": value for name, value in worker.items()})


class Processor:
    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.peer = b""

    async def frame(self) -> WorkerFrame:
        self.peer, parts = await soon(self.listener.receive())
        return read_frame(WorkerFrame, parts[0])

    async def body(self, kind: str) -> WorkerFrame:
        while not (frame := await self.frame()).HasField(kind):
            pass
        return frame

    def say(self, frame: ProcessorFrame) -> None:
        self.listener.send(self.peer, [write_frame(frame)])

    async def welcome(self) -> None:
        await self.body("hello")
        self.say(ProcessorFrame(welcome=welcome_of()))


async def meeting(chosen: Settings) -> tuple[Processor, Publisher, ManualClock]:
    transport, clock = MemoryTransport(chosen.bus), ManualClock()
    processor = Processor(await transport.listen(ADDRESS))
    return processor, Publisher(chosen, epoch=EPOCH, transport=transport, clock=clock), clock


async def test_hello_says_what_the_worker_is() -> None:
    chosen = settings(
        {
            "bus.workers_address": ADDRESS,
            "worker.id": "w9",
            "worker.role": "decode",
            "worker.model": "m",
            "worker.tp_rank": 1,
            "worker.dp_rank": 2,
            "worker.max_requests": 3,
            "limits.max_top_k": 4,
        }
    )
    transport = MemoryTransport(chosen.bus)
    processor = Processor(await transport.listen(ADDRESS))
    described = EngineDescription(9, 8, (7, 2**32 - 1), ("x", "y"))
    given: dict[str, Any] = {"transport": transport, "clock": ManualClock(), "description": described}
    async with Publisher(chosen, vocabulary_size=99, **given):
        hello = (await processor.body("hello")).hello
    assert (hello.worker_id, hello.role, hello.model) == ("w9", 3, "m")
    assert (hello.tp_rank, hello.dp_rank, hello.max_requests, hello.vocabulary_size) == (1, 2, 3, 99)
    assert (hello.max_model_tokens, hello.tokenizer_digest, list(hello.lora_adapters)) == (9, 8, ["x", "y"])
    assert hello.tokenizer_probes == [7, 2**32 - 1]
    assert hello.limits.max_top_k == 4
    assert hello.limits.max_rows == chosen.limits.max_rows


async def test_loop_does_not_wait_for_itself() -> None:
    """On its own event loop's thread, `publish` without room is an error and not a deadlock; nothing is kept of it."""
    processor, publisher, _ = await meeting(at_memory(retention_items=2))
    async with publisher:
        publisher.publish(batch(row_shapes([1])))
        with pytest.raises(WouldWaitError, match=r"await publisher\.published"):
            publisher.publish(batch(row_shapes([2])))
        waiting = asyncio.create_task(publisher.published(batch(row_shapes([3]))))
        await processor.welcome()
        await processor.body("item")
        assert not waiting.done()
        processor.say(ProcessorFrame(ack=Ack(through_sequence=1)))
        assert await soon(waiting) == 2
        await processor.body("item")
        processor.say(ProcessorFrame(ack=Ack(through_sequence=2)))


async def test_nothing_is_taken_before_it_starts_and_after_it_closed() -> None:
    _, publisher, _ = await meeting(at_memory())
    with pytest.raises(NotRunningError):
        publisher.publish(batch(row_shapes([1])))
    async with publisher:
        pass
    publishing: list[Callable[[], int]] = [
        lambda: publisher.publish(batch(row_shapes([1]))),
        lambda: publisher.admitted(1, 1),
        lambda: publisher.failed_request(1, ErrorCode.ERROR_CODE_ENGINE, "no"),
    ]
    for publish in publishing:
        with pytest.raises(NotRunningError):
            publish()
    assert publisher.retention.next_sequence == 1


async def test_leaving_waits_for_acknowledgements() -> None:
    processor, publisher, _ = await meeting(at_memory())
    async with publisher:
        for place in range(3):
            publisher.publish(batch(row_shapes([1], position=place), step=place + 1))
        await processor.welcome()
        await processor.body("item")
        leaving = asyncio.create_task(publisher.__aexit__(None, None, None))
        assert [(await processor.frame()).item.sequence for _ in range(2)] == [2, 3]
        processor.say(ProcessorFrame(ack=Ack(through_sequence=2)))
        await turns()
        assert not leaving.done()
        processor.say(ProcessorFrame(ack=Ack(through_sequence=3)))
        goodbye = (await processor.body("goodbye")).goodbye
        await soon(leaving)
    assert goodbye.last_sequence == 3


async def test_leaving_after_an_error_is_at_once() -> None:
    processor, publisher, _ = await meeting(at_memory())
    await publisher.__aenter__()
    publisher.publish(batch(row_shapes([1])))
    await processor.welcome()
    await soon(publisher.__aexit__(ZeroDivisionError, ZeroDivisionError(), None))
    assert publisher.session.outstanding == 1
    assert (await processor.body("goodbye")).HasField("goodbye")


async def test_requests_reach_the_engine() -> None:
    processor, publisher, _ = await meeting(at_memory())
    async with publisher:
        await processor.welcome()
        taking = asyncio.create_task(asyncio.to_thread(publisher.take_requests, 60))
        for frame in (ProcessorFrame(generate=generate_of(9)), ProcessorFrame(abort=Abort(request_id=9))):
            processor.say(frame)
        taken = await soon(taking)
        while len(taken) < 2:
            taken += await asyncio.to_thread(publisher.take_requests, 60)
    assert taken == [generate_of(9), Abort(request_id=9)]
    assert publisher.take_requests() == []


def test_requests_that_wait_are_bounded() -> None:
    publisher = Publisher(at_memory(max_requests=2))
    for key in range(1, 5):
        publisher.incoming.put(generate_of(key))
    with pytest.raises(ContractError, match="at most 4 requests"):
        publisher.incoming.put(generate_of(5))
    assert [request.request_id for request in publisher.take_requests()] == [1, 2, 3, 4]


def test_aborts_of_what_is_only_shown_are_left() -> None:
    publisher = Publisher(at_memory(max_requests=0))
    publisher.incoming.put(Abort(request_id=1))
    assert publisher.take_requests() == []
    with pytest.raises(ContractError, match="at most 0 requests"):
        publisher.incoming.put(generate_of(1))


def test_thread_of_its_own() -> None:
    chosen = at_memory(drain_timeout_ms=0)
    with Publisher(chosen, epoch=EPOCH, transport=MemoryTransport(chosen.bus)) as publisher:
        names = {thread.name for thread in threading.enumerate()}
        with ThreadPoolExecutor(2) as pool:
            made = [batch(row_shapes([key])) for key in range(1, 11)]
            assert sorted(pool.map(publisher.publish, made)) == list(range(1, 11))
    assert "tokenbus-worker-0" in names
    assert publisher._thread is not None
    assert not publisher._thread.is_alive()
    with pytest.raises(NotRunningError):
        publisher.publish(batch(row_shapes([1])))


async def test_address_that_cannot_be_used_is_told_at_the_start() -> None:
    chosen = at_memory()
    broken = UselessTransport(chosen.bus)
    with pytest.raises(AddressError, match="of no use"), Publisher(chosen, transport=broken):
        pass
    with pytest.raises(AddressError, match="of no use"):
        async with Publisher(chosen, transport=broken):
            pass


def test_request_that_ends_before_its_draft_is_not_known_again() -> None:
    publisher = Publisher(at_memory(), epoch=EPOCH)
    publisher.begin()
    publisher.publish(batch(row_shapes([1], status=RowStatus.FINISHED_STOP), draft_follows=True))
    publisher.publish(batch(row_shapes([1]), kind=BatchKind.DRAFT))
    assert not publisher.session.requests


async def test_nothing_is_taken_once_the_connection_has_failed() -> None:
    """When the connection itself breaks down, publishing fails aloud, and closing raises the error (case 21)."""
    chosen = at_memory()
    publisher = Publisher(chosen, transport=BreakingTransport(chosen.bus), clock=ManualClock())
    await publisher.__aenter__()
    await turns()
    with pytest.raises(NotRunningError):
        publisher.publish(batch(row_shapes([1])))
    with pytest.raises(RuntimeError):
        await soon(publisher.__aexit__(None, None, None))


def test_thread_whose_connection_failed_ends_waiting() -> None:
    chosen = at_memory()
    with Publisher(chosen, transport=BreakingTransport(chosen.bus)) as publisher:
        assert publisher.take_requests(60) == []
        with pytest.raises(NotRunningError):
            publisher.publish(batch(row_shapes([1])))
