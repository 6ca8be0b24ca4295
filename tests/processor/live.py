"""A Processor that runs in memory, its clock, and a worker that the test plays."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from tests.in_process.builders import encoded, hello_of, item_of, settings
from tests.support.waiting import soon, turns
from tokenbus.bus import Connection
from tokenbus.bus.memory import MemoryTransport
from tokenbus.processor import Processor
from tokenbus.testing import ManualClock, RowShape
from tokenbus_contracts.frames import read_frame, write_frame
from tokenbus_contracts.generated.stream_pb2 import Heartbeat, ProcessorFrame, WorkerFrame

QUICK = {
    "bus.workers_address": "memory://workers",
    "bus.clients_address": "memory://clients",
    "bus.heartbeat_ms": 1000,
    "bus.heartbeat_timeout_ms": 2000,
    "processor.drain_timeout_ms": 0,
}


class Worker:
    def __init__(self, connection: Connection, epoch: int = 7) -> None:
        self.connection = connection
        self.epoch = epoch
        self.sequence = 0

    def say(self, frame: WorkerFrame, *parts: bytes) -> None:
        frame.epoch = self.epoch
        assert self.connection.send([write_frame(frame), *parts])

    async def heard(self, kind: str) -> ProcessorFrame:
        while True:
            (data,) = await soon(self.connection.receive())
            frame = read_frame(ProcessorFrame, data)
            if frame.WhichOneof("body") == kind:
                return frame

    async def publish(self, wanted: Sequence[RowShape]) -> None:
        self.sequence += 1
        payload = encoded(wanted, self.sequence)
        self.say(WorkerFrame(item=item_of(payload, self.sequence)), payload)
        await turns()


class Running:
    """A processor that runs, its clock, and a worker that said hello."""

    def __init__(self, processor: Processor, clock: ManualClock, worker: Worker, transport: MemoryTransport) -> None:
        self.processor = processor
        self.clock = clock
        self.worker = worker
        self.transport = transport

    async def pass_time(self, seconds: float) -> None:
        end = self.clock.now() + seconds
        while self.clock.now() < end - 1e-9:
            self.worker.say(WorkerFrame(heartbeat=Heartbeat(sent_at_ns=1, last_sequence=self.worker.sequence)))
            self.clock.advance(min(0.1, end - self.clock.now()))
            await turns(10)


async def started(**overrides: object) -> Running:
    chosen = settings(QUICK | {f"processor.{name}": value for name, value in overrides.items()})
    transport, clock = MemoryTransport(chosen.bus), ManualClock()
    processor = await Processor(chosen, transport=transport, clock=clock).__aenter__()
    worker = Worker(await transport.connect("memory://workers"))
    worker.say(WorkerFrame(hello=hello_of()))
    await worker.heard("welcome")
    await turns()
    return Running(processor, clock, worker, transport)


@asynccontextmanager
async def running(**overrides: object) -> AsyncIterator[Running]:
    made = await started(**overrides)
    try:
        yield made
    finally:
        await made.processor.__aexit__(None, None, None)
