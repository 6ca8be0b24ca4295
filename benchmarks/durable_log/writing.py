"""Items that are written to a log: as fast as they are acknowledged, or at a pace."""

import asyncio
import time
from collections.abc import Sequence

from benchmarks.nats_servers import NatsServer, address_of
from tokenbus_contracts.generated.stream_pb2 import PayloadKind
from tokenbus_services.durable_log.writer import LogWriter
from tokenbus_services.items import StreamItem
from tokenbus_services.settings import Settings
from tokenbus_services.worker.session import HandoffPoint, hello_of

IN_LOG_FLIGHT = 64
"""How many items are written and not acknowledged yet, at most."""
_BATCH = PayloadKind.PAYLOAD_KIND_LOGPROB_BATCH
_MOST_BYTES = 1_000_000_000


def log_settings(servers: Sequence[NatsServer]) -> Settings:
    """Return the settings of a log that all of these servers keep."""
    return Settings.load(
        environment={},
        overrides={
            "durable_log.address": address_of(servers, "log"),
            "durable_log.replicas": len(servers),
            "durable_log.max_bytes": _MOST_BYTES,
        },
    )


class Source:
    """One life of a worker, whose items are written."""

    def __init__(self, writer: LogWriter, settings: Settings, epoch: int, payloads: Sequence[bytes]) -> None:
        """Take the items' payloads, which come again and again."""
        self.items = 0
        self._writer, self._payloads = writer, payloads
        self._epoch, self._hello = epoch, hello_of(settings, 1000, HandoffPoint())
        self._room = asyncio.Semaphore(IN_LOG_FLIGHT)

    async def write(self, seconds: float, pace: float = 0) -> float:
        """Write for a while, at so many items a second if given; return how many a second were in the log."""
        began, before = time.perf_counter(), self.items
        while (now := time.perf_counter()) < began + seconds:
            if pace and (wait := began + (self.items - before) / pace - now) > 0:
                await asyncio.sleep(wait)
            await self.put(self._payloads[self.items % len(self._payloads)])
        await self.written()
        return (self.items - before) / (time.perf_counter() - began)

    async def put(self, payload: bytes) -> None:
        """Write one item once there is room."""
        await self._room.acquire()
        self.items += 1
        item = StreamItem(self._hello, self._epoch, self.items, _BATCH, payload)
        self._writer.take(item, self._room.release)

    async def written(self) -> None:
        """Wait until all items are in the log."""
        for _ in range(IN_LOG_FLIGHT):
            await self._room.acquire()
        for _ in range(IN_LOG_FLIGHT):
            self._room.release()
