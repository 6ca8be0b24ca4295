"""Client: requests in, their tokens out, over a connection that a test's processor answers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.in_process.breaking import BreakingTransport
from tests.in_process.builders import generate_of, hello_of, item_of, settings
from tests.support.waiting import soon, turns
from tokenbus.bus import Listener
from tokenbus.bus.memory import MemoryTransport
from tokenbus.client import Client, Generation, RequestEnd, StepRows
from tokenbus.delivery import RequestFailedError, Token
from tokenbus.testing import ManualClock, RowShape, batch
from tokenbus_contracts import RowStatus, encode
from tokenbus_contracts.frames import read_frame, write_frame
from tokenbus_contracts.generated import client_pb2 as pb
from tokenbus_contracts.generated.request_pb2 import ErrorCode, RequestError
from tokenbus_contracts.generated.stream_pb2 import Goodbye, GoodbyeReason

ADDRESS = "memory://clients"
FINISHED = RowStatus.FINISHED_LENGTH


class Processor:
    """A processor that the test plays, for one client."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.peer = b""
        self.number = 0

    async def body(self, kind: str) -> pb.ClientFrame:
        while True:
            self.peer, parts = await soon(self.listener.receive())
            frame = read_frame(pb.ClientFrame, parts[0])
            if frame.WhichOneof("body") == kind:
                return frame

    def say(self, frame: pb.ServerFrame, *parts: bytes) -> None:
        self.listener.send(self.peer, [write_frame(frame), *parts])

    def rows(self, *wanted: RowShape) -> None:
        self.number += 1
        outputs = pb.ServerFrame(number=self.number, outputs=pb.Outputs())
        self.say(outputs, encode(batch(wanted, selection=True)))

    def fails(self, key: int, code: ErrorCode, message: str) -> None:
        self.number += 1
        self.say(pb.ServerFrame(number=self.number, error=RequestError(request_id=key, code=code, message=message)))

    async def welcome(self) -> None:
        await self.body("hello")
        self.number = 0
        welcome = pb.ClientWelcome(processor_id="p", heartbeat_interval_ms=1000, heartbeat_timeout_ms=3000)
        self.say(pb.ServerFrame(welcome=welcome))


async def meeting(overrides: dict[str, object] | None = None) -> tuple[Processor, Client, ManualClock]:
    chosen = settings({"bus.clients_address": ADDRESS} | (overrides or {}))
    transport, clock = MemoryTransport(chosen.bus), ManualClock()
    processor = Processor(await transport.listen(ADDRESS))
    return processor, Client(chosen, transport=transport, clock=clock), clock


@asynccontextmanager
async def met(overrides: dict[str, object] | None = None) -> AsyncIterator[tuple[Processor, Client, ManualClock]]:
    """Return what `meeting` does, once they have found each other; the client is closed in the end."""
    processor, client, clock = await meeting(overrides)
    async with client:
        await processor.welcome()
        yield processor, client, clock


async def taken(tokens: Generation) -> list[Token]:
    return [token async for token in tokens]


async def test_key_is_drawn_where_there_is_none() -> None:
    _, client, _ = await meeting({"client.drain_timeout_ms": 0})
    async with client:
        keys = {client.generate(generate_of(0)).request_id for _ in range(100)}
    assert len(keys) == 100
    assert 0 not in keys
    assert all(sum(key >> bit & 1 for key in keys) not in (0, 100) for bit in range(64))


async def test_open_key_is_refused_here() -> None:
    _, client, _ = await meeting({"client.drain_timeout_ms": 0})
    async with client:
        first = client.generate(generate_of(5))
        with pytest.raises(RequestFailedError) as refused:
            client.generate(generate_of(5))
        assert refused.value.code == ErrorCode.ERROR_CODE_DUPLICATE_REQUEST
        with pytest.raises(RequestFailedError):
            client.resume(5, 0)
        assert not first.has_ended


async def test_open_requests_are_bounded() -> None:
    """As many requests as may be open are, and the next one is refused here (case 20)."""
    _, client, _ = await meeting({"client.drain_timeout_ms": 0, "client.max_requests": 2})
    async with client:
        first = [client.generate(generate_of(key)) for key in (1, 2)]
        with pytest.raises(RequestFailedError, match="at most 2, got 3") as refused:
            client.generate(generate_of(3))
        assert refused.value.code == ErrorCode.ERROR_CODE_OVERLOADED
        assert not any(generation.has_ended for generation in first)


async def test_requests_are_given_up_when_there_is_no_processor_for_too_long() -> None:
    _, client, clock = await meeting({"client.resume_timeout_ms": 5000, "client.drain_timeout_ms": 0})
    async with client:
        tokens = client.generate(generate_of(5))
        for _ in range(5):
            await turns()
            assert not tokens.has_ended
            clock.advance(1.0)
        await turns()
        with pytest.raises(RequestFailedError, match="no processor answered for 5000 ms"):
            await soon(taken(tokens))
        again = client.generate(generate_of(6))
        clock.advance(1.0)
        await turns()
        assert not again.has_ended


async def test_leaving_has_an_end_and_so_has_every_request() -> None:
    processor, client, clock = await meeting({"client.drain_timeout_ms": 2000})
    async with client:
        tokens = client.generate(generate_of(5))
        await processor.welcome()
        leaving = asyncio.create_task(client.__aexit__(None, None, None))
        await turns()
        clock.advance(1.99)
        await turns()
        assert not leaving.done()
        clock.advance(0.01)
        await soon(leaving)
        with pytest.raises(RequestFailedError, match="the client was closed"):
            await soon(taken(tokens))


async def test_requests_end_when_the_connection_fails_for_good() -> None:
    chosen = settings({"bus.clients_address": ADDRESS})
    client = Client(chosen, transport=BreakingTransport(chosen.bus), clock=ManualClock())
    await client.__aenter__()
    tokens = client.generate(generate_of(5))
    with pytest.raises(RequestFailedError):
        await soon(taken(tokens))
    with pytest.raises(RuntimeError):
        await soon(client.__aexit__(None, None, None))


async def test_steps_come_as_columns_and_hold_the_processor_back() -> None:
    """Rows are yielded step by step as they come; while too many wait nothing is acked, and then it is (case 20)."""
    async with met() as (processor, client, clock), client.steps(most=1) as steps:
        for key in range(5, 14):
            client.submit(generate_of(key))
        for place in range(4):
            processor.rows(RowShape(5 + place, 0, 1))
        first = await soon(anext(steps))
        assert isinstance(first, StepRows)
        assert first.target.request_ids.tolist() == [5]
        assert first.draft is None
        await turns()
        assert client.requests.is_paused
        assert [row_ids(await soon(anext(steps))) for _ in range(2)] == [[6], [7]]
        assert not client.requests.is_paused
        await turns()
        clock.advance(0.05)
        assert (await processor.body("confirm")).confirm.through_number == 4


def row_ids(output: StepRows | RequestEnd) -> list[int]:
    assert isinstance(output, StepRows)
    found: list[int] = output.target.request_ids.tolist()
    return found


async def test_watched_items_come_and_what_is_not_taken_is_left_out() -> None:
    async with met() as (processor, client, _):
        watched = client.watch("w", most=2)
        first = asyncio.ensure_future(anext(watched))
        assert (await processor.body("watch")).watch.worker_id == "w"
        processor.say(pb.ServerFrame(watched_stream=pb.WatchedStream(epoch=7, hello=hello_of())))
        processor.say(pb.ServerFrame(watched_item=item_of(b"abc", 1)), b"abc")
        item = await soon(first)
        assert (item.worker_id, item.epoch, item.sequence, item.payload) == ("worker-0", 7, 1, b"abc")
        for sequences in (range(2, 6), range(6, 7)):
            for sequence in sequences:
                processor.say(pb.ServerFrame(watched_item=item_of(b"abc", sequence)), b"abc")
            await turns()
            found = [await soon(anext(watched)) for _ in range(min(2, len(sequences)))]
        assert [(item.sequence, item.missing_items) for item in found] == [(6, 2)]
        await watched.aclose()
        processor.say(pb.ServerFrame(watched_item=item_of(b"abc", 9)), b"abc")
        await turns()


async def test_watch_that_was_closed_is_not_asked_for_again() -> None:
    async with met() as (processor, client, clock):
        watched = client.watch("w")
        await processor.body("watch")
        await watched.aclose()
        processor.say(pb.ServerFrame(goodbye=Goodbye(reason=GoodbyeReason.GOODBYE_REASON_RESTARTING)))
        await turns()
        clock.advance(1)
        await processor.welcome()
        await turns()
        asked = asyncio.ensure_future(client.status(timeout_seconds=60))
        bodies = []
        while "status" not in bodies:
            _, parts = await soon(processor.listener.receive())
            bodies.append(str(read_frame(pb.ClientFrame, parts[0]).WhichOneof("body")))
        assert "watch" not in bodies
        asked.cancel()


async def test_status_is_what_the_processor_answers() -> None:
    """All calls that wait share the next answer; a later call asks anew."""
    async with met() as (processor, client, _):
        calls = [asyncio.ensure_future(client.status(timeout_seconds=60)) for _ in range(3)]
        await processor.body("status")
        processor.say(pb.ServerFrame(status=pb.ProcessorStatus(connected_clients=1, tokens=7)))
        assert [status.tokens for status in await soon(asyncio.gather(*calls))] == [7, 7, 7]
        again = asyncio.ensure_future(client.status(timeout_seconds=60))
        for _ in range(3):  # the two others of the first three, and this one
            await processor.body("status")
        processor.say(pb.ServerFrame(status=pb.ProcessorStatus(connected_clients=1, tokens=8)))
        assert (await soon(again)).tokens == 8


async def test_status_is_asked_again_after_a_reconnect() -> None:
    processor, client, clock = await meeting()
    async with client:
        waiting = asyncio.ensure_future(client.status(timeout_seconds=60))
        await processor.welcome()
        await processor.body("status")
        processor.say(pb.ServerFrame(goodbye=Goodbye(reason=GoodbyeReason.GOODBYE_REASON_RESTARTING)))
        await turns()
        clock.advance(1)
        await processor.welcome()
        await processor.body("status")
        processor.say(pb.ServerFrame(status=pb.ProcessorStatus(connected_clients=1)))
        assert (await soon(waiting)).connected_clients == 1


async def test_status_without_a_processor_is_a_timeout() -> None:
    _, client, _ = await meeting()
    async with client:
        with pytest.raises(TimeoutError):
            await client.status(timeout_seconds=0.01)
