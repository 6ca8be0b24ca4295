"""ItemLog: keeps the durable log of a processor's items, and with it their acks."""

from functools import partial
from typing import Self

from tokenbus_services.delivery import PendingAck
from tokenbus_services.durable_log.monitors import Monitors
from tokenbus_services.durable_log.stream import LogError, LogStream, PromiseError
from tokenbus_services.durable_log.writer import LogWriter
from tokenbus_services.items import StreamItem
from tokenbus_services.processor.stream import Arrived
from tokenbus_services.processor.workers import Worker
from tokenbus_services.settings import Settings


class ItemLog:
    """Writes each item that arrives at a processor to the log.

    With `durable_log.durable` the processor acks an item only once the log has it: its worker retains the item until
    then and, without credit, waits. Otherwise an item that finds the writer's buffer full is left out, and the log
    names it as missing; then nothing waits for the log's servers, not even the start.
    """

    def __init__(self, settings: Settings) -> None:
        """Take the settings; raises AddressError."""
        self._settings = settings
        self._is_durable = settings.durable_log.durable
        self._stream = LogStream(settings)
        self._drain_seconds = settings.processor.drain_timeout_ms / 1000
        # For items that the last processor of a worker still holds; with `durable` the worker sends them again.
        wait_seconds = 0 if self._is_durable else settings.bus.heartbeat_interval_ms / 1000
        self.monitors = Monitors(settings.durable_log.monitors)
        self.writer = LogWriter(self._stream, settings, wait_seconds=wait_seconds, check=self._check)
        self.left_out = 0
        """Items that found the buffer full, without `durable`."""

    async def open(self) -> Self:
        """Begin to connect; with `durable` wait until the log can be written.

        Raises a PromiseError where the servers answer and cannot keep what `durable` promises.
        """
        if self._is_durable:
            await self.writer.open(PromiseError)
        else:
            self.writer.start()
        return self

    @property
    def problem(self) -> str:
        """Why items are not written to the log; empty while they are."""
        return f"the durable log is not written: {self.writer.problem}" if self.writer.problem else ""

    @property
    def is_ready(self) -> bool:
        """Whether the processor may take new requests: without `durable` always."""
        return not (self._is_durable and self.writer.problem)

    async def close(self) -> None:
        """Write the waiting items, for at most `processor.drain_timeout_ms`, and disconnect."""
        await self.writer.close(self._drain_seconds)

    def take(self, worker: Worker, entry: Arrived, pending_ack: PendingAck) -> None:
        """Have an item written; with `durable` the log's ack is part of the item's."""
        item = StreamItem(worker.stream.hello, worker.stream.epoch, entry.sequence, entry.kind, entry.payload)
        if self._is_durable:
            pending_ack.keep()
            pending_ack.unlogged += 1
            self.writer.take(item, partial(_logged, pending_ack))
        elif self.writer.has_room:
            self.writer.take(item)
        else:
            self.left_out += 1
            self.writer.leave_out(item)

    async def _check(self) -> None:
        """Raise a LogError if the servers could lose an item that they acknowledged, or cannot take the largest one."""
        await self.monitors.ask()
        if not self._is_durable:
            return
        most, largest = self.writer.largest_message, self._settings.limits.max_message_bytes
        if most < largest:
            raise PromiseError(
                self._stream.address,
                f"durable_log.durable: a message of limits.max_message_bytes, {largest}, needs a larger max_payload: "
                f"what this server takes leaves {most} bytes",
            )
        self._check_syncs()

    def _check_syncs(self) -> None:
        """Raise a LogError if a server does not sync always, or if so many did not answer that a quorum may not."""
        syncs = self.monitors.syncs
        others = [monitor for monitor in syncs if syncs[monitor] != "always"]
        answered = [monitor for monitor in others if not syncs[monitor].startswith("unknown")]
        if answered or 2 * len(others) >= len(syncs) > 0:
            monitor, *_ = answered or others
            reason = f"durable_log.durable: the server at {monitor} has sync_interval {syncs[monitor]}, needed: always"
            raise (PromiseError if answered else LogError)(self._stream.address, reason)


def _logged(pending_ack: PendingAck) -> None:
    pending_ack.unlogged -= 1
    pending_ack.release()
