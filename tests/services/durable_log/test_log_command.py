"""`tokenbus log`: it ends when it is asked to, whatever the log does."""

import asyncio
from io import BytesIO

from tests.services.cli.helpers import EPOCH, WORKER, after_hello, hello, memory_settings, payloads, recording, take_all
from tests.support.nats import NatsServer
from tests.support.waiting import MOST, soon, turns, until
from tokenbus_services.bus.memory import MemoryTransport
from tokenbus_services.cli.log import log
from tokenbus_services.items import hello_entry, read_items
from tokenbus_services.processor import Processor
from tokenbus_services.worker.replay import Replay


async def test_it_ends_while_the_log_is_away_and_its_buffer_is_full(server: NatsServer) -> None:
    settings = memory_settings(
        durable_log__address=f"nats://{server.server}",
        durable_log__buffer_bytes=4096,
        limits__max_message_bytes=4096,
        client__window_frames=512,
        client__drain_timeout_ms=100,
        bus__heartbeat_timeout_ms=10_000,
    )
    transport, stop = MemoryTransport(settings.bus), asyncio.Event()
    async with Processor(settings, transport=transport) as processor:
        steps = asyncio.create_task(take_all(processor))
        writing = asyncio.create_task(log(settings, stop, worker_id=WORKER, transport=transport))
        await until(lambda: len(processor.clients.watchers))
        server.kill()
        small = hello()
        small.limits.max_message_bytes = 4096
        data = hello_entry(EPOCH, small, 1) + after_hello(recording(payloads(requests=4, tokens=3000)))
        replay = Replay(read_items(BytesIO(data)), settings, speed=0, transport=transport)
        await asyncio.wait_for(replay.run(asyncio.Event()), MOST)
        assert replay.done.items > 512
        await turns(1000)  # it reads until its buffer and its queue are full
        assert not writing.done()
        stop.set()
        counts, unwritten = await soon(writing)
        steps.cancel()
    assert counts.items == 0
    assert unwritten > 256
