"""ItemLog: keeps the durable log of a processor's items, and with it their acks."""

import asyncio
import http.client
import json
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Self

from tokenbus_contracts.generated.stream_pb2 import Hello
from tokenbus_services.delivery import PendingAck
from tokenbus_services.durable_log.stream import ASK_SECONDS, LogError, LogStream
from tokenbus_services.durable_log.writer import LogWriter, StreamName
from tokenbus_services.processor.stream import Arrived
from tokenbus_services.settings import Settings

if TYPE_CHECKING:
    from tokenbus_services.processor.intake import Worker

_MOST_ANSWER_BYTES = 2**20


class ItemLog:
    """Writes each item that arrives to the log.

    With `durable_log.durable` an item is acked only once it is there, so a worker retains it until then and, without
    credit, waits. Otherwise what does not fit into the writer is left out, and named in the log.
    """

    def __init__(self, settings: Settings) -> None:
        """Take the settings; raises AddressError."""
        self._settings = settings
        self._is_durable = settings.durable_log.durable
        self._stream = LogStream(settings)
        drain_seconds = settings.processor.drain_timeout_ms / 1000
        # What its last processor holds of a worker that has moved: with `durable` the worker sends it again.
        wait_seconds = 0 if self._is_durable else settings.bus.heartbeat_interval_ms / 1000
        self.writer = LogWriter(self._stream, settings, wait_seconds=wait_seconds, drain_seconds=drain_seconds)
        self._streams: dict[str, StreamName] = {}
        self.left_out = 0
        """Items that found no room, without `durable`."""

    async def open(self) -> Self:
        """Connect; raises AddressError or LogError, as where what `durable` promises cannot be kept."""
        await self.writer.__aenter__()
        try:
            if self._is_durable:
                await self._check_promise()
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        """Write what is left, and disconnect."""
        await self.writer.__aexit__(None, None, None)

    def take(self, worker: "Worker", entry: Arrived, pending_ack: PendingAck) -> None:
        """Take an item."""
        name = self._name(worker)
        write = partial(self.writer.take, name, entry.sequence, entry.kind, entry.payload)
        if self._is_durable:
            pending_ack.keep()
            pending_ack.unlogged += 1
            write(partial(_logged, pending_ack))
        elif self.writer.has_room:
            write()
        else:
            self.left_out += 1
            self.writer.leave_out(name, entry.sequence)

    def _name(self, worker: "Worker") -> StreamName:
        """Return a worker's stream, with a hello that says nothing that is to stay between the two."""
        stream = worker.stream
        known = self._streams.get(stream.worker_id)
        if known is None or known.epoch != stream.epoch:
            if len(self._streams) > self._settings.processor.max_workers:
                self._streams.clear()
            hello = Hello()
            hello.CopyFrom(stream.hello)
            for name in ("proof", "handoff_ticket", "request_keys", "request_owners"):
                hello.ClearField(name)
            known = self._streams[stream.worker_id] = StreamName(stream.epoch, hello)
        return known

    async def _check_promise(self) -> None:
        """Raise a LogError if an item that the log has acknowledged could still be lost, or one not be taken at all."""
        most, largest = self.writer.largest_message, self._settings.limits.max_message_bytes
        if most < largest:
            raise LogError(
                self._stream.address,
                f"durable_log.durable: a message of limits.max_message_bytes, {largest}, needs a larger max_payload: "
                f"what this server takes leaves {most} bytes",
            )
        for monitor in filter(None, self._settings.durable_log.monitors.split(",")):
            syncs = await asyncio.to_thread(_sync_of, monitor.strip())
            if syncs != "always":
                reason = f"durable_log.durable: the server at {monitor} has sync_interval {syncs}, needed: always"
                raise LogError(self._stream.address, reason)


def _logged(pending_ack: PendingAck) -> None:
    pending_ack.unlogged -= 1
    pending_ack.release()


def _sync_of(monitor: str) -> str:
    """Return how often a server writes its streams to disk, as its monitoring says."""
    host, _, port = monitor.rpartition(":")
    try:
        with closing(http.client.HTTPConnection(host, int(port), timeout=ASK_SECONDS)) as connection:
            connection.request("GET", "/jsz")
            config = json.loads(connection.getresponse().read(_MOST_ANSWER_BYTES))["config"]
        return "always" if config.get("sync_always") else f"{config['sync_interval'] / 1e9:g} s"
    except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
        return f"unknown ({type(error).__name__}: {error})"
