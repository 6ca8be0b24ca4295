"""ItemLog: writes the items of a processor to the durable log."""

import asyncio
import http.client
import json
import re
from contextlib import closing
from functools import partial
from typing import Any, Self

from tokenbus.delivery import PendingAck
from tokenbus.recordings.durable_log.server import ASK_SECONDS
from tokenbus.recordings.durable_log.stream import LogError, LogStream, PromiseError
from tokenbus.recordings.durable_log.writer import LogWriter
from tokenbus.recordings.items import StreamItem
from tokenbus.settings import Settings, SettingsError

_MOST_ANSWER_BYTES = 2**20
_ADDRESS = re.compile(r"([\w.-]+|\[[0-9a-fA-F:]+\]):\d{1,5}")


class ItemLog:
    """Writes each item of a processor to the durable log.

    With `durable_log.durable`, the processor acknowledges an item only after the log has stored it. Until the log has
    stored the item, the worker retains it and gets no more credit. Without `durable`, the processor starts and runs
    without waiting for the log's servers. If the writer's buffer is full, an item is omitted, and the log records it as
    missing.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._is_durable = settings.durable_log.durable
        self._stream = LogStream(settings)
        self._drain_seconds = settings.processor.drain_timeout_ms / 1000
        # Time to wait for items that the worker's previous processor may still write.
        # With `durable`, no waiting is needed, because the worker sends unacknowledged items again.
        wait_seconds = 0 if self._is_durable else settings.bus.heartbeat_interval_ms / 1000
        self.monitors = Monitors(settings.durable_log.monitors)
        self.writer = LogWriter(self._stream, settings, wait_seconds=wait_seconds, check=self._check)
        self.left_out = 0
        """Number of items that were omitted because the buffer was full."""

    async def open(self) -> Self:
        """Begin to connect; with `durable`, wait until the log can be written.

        Raises PromiseError if the configuration of the servers cannot guarantee what `durable` requires.
        """
        if self._is_durable:
            await self.writer.open(PromiseError)
        else:
            self.writer.start()
        return self

    @property
    def problem(self) -> str:
        """Reason why items are not written to the log, or empty while they are written."""
        return f"the durable log is not written: {self.writer.problem}" if self.writer.problem else ""

    @property
    def is_ready(self) -> bool:
        """Whether the processor may accept new requests; always true without `durable`."""
        return not (self._is_durable and self.writer.problem)

    async def close(self) -> None:
        """Write the waiting items within the processor's drain timeout, and disconnect."""
        await self.writer.close(self._drain_seconds)

    def take(self, item: StreamItem, pending_ack: PendingAck) -> None:
        """Queue an item for the log; with `durable`, the item's ack waits until the log has stored the item."""
        if self._is_durable:
            pending_ack.keep()
            pending_ack.unlogged += 1
            self.writer.enqueue(item, partial(_logged, pending_ack))
        elif self.writer.has_room:
            self.writer.enqueue(item)
        else:
            self.left_out += 1
            self.writer.skip(item)

    async def _check(self) -> None:
        """Raise LogError if the servers could lose an acknowledged item, or would refuse the largest item."""
        await self.monitors.ask()
        if not self._is_durable:
            return
        most, largest = self.writer.largest_message, self._settings.limits.max_message_bytes
        if most < largest:
            raise PromiseError(
                self._stream.address,
                f"durable_log.durable: the largest message, {largest} bytes, needs a larger max_payload: "
                f"this server's leaves {most}",
            )
        self._check_syncs()

    def _check_syncs(self) -> None:
        """Raise LogError if a server does not sync every write, or if at least half of the servers gave no answer."""
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


class Monitors:
    """The latest HTTP answers of the servers at `durable_log.monitors`; HTTP shows more settings than NATS."""

    def __init__(self, addresses: str) -> None:
        self._addresses = [each.strip() for each in addresses.split(",") if each.strip()]
        if not all(_ADDRESS.fullmatch(each) for each in self._addresses):
            raise SettingsError("durable_log.monitors", "HOST:PORT, separated by commas", addresses)
        self.syncs: dict[str, str] = {}
        """By server address, the server's `sync_interval` or the reason why it is unknown."""
        self.storage_ratios: dict[str, float] = {}
        """By server address, the used fraction of JetStream's storage, from 0 to 1."""

    async def ask(self) -> None:
        await asyncio.gather(*(asyncio.to_thread(self._ask, each) for each in self._addresses))

    def _ask(self, address: str) -> None:
        try:
            found = _answer(address)
            config = found["config"]
            self.syncs[address] = "always" if config.get("sync_always") else f"{config['sync_interval'] / 1e9:g} s"
            self.storage_ratios[address] = found["storage"] / config["max_storage"] if config["max_storage"] else 0.0
        except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException) as error:
            self.syncs[address] = f"unknown ({type(error).__name__}: {error})"
            self.storage_ratios.pop(address, None)


def _answer(address: str) -> Any:  # noqa: ANN401 - JSON
    host, _, port = address.rpartition(":")
    with closing(http.client.HTTPConnection(host, int(port), timeout=ASK_SECONDS)) as connection:
        connection.request("GET", "/jsz")
        return json.loads(connection.getresponse().read(_MOST_ANSWER_BYTES))
