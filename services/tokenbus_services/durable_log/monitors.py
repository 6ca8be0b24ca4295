"""Monitors: settings of the log's servers that NATS does not show its clients, and their monitoring over HTTP does."""

import asyncio
import http.client
import json
import re
from contextlib import closing
from typing import Any

from tokenbus_services.durable_log.stream import ASK_SECONDS
from tokenbus_services.settings import SettingsError

_MOST_ANSWER_BYTES = 2**20
_ADDRESS = re.compile(r"([\w.-]+|\[[0-9a-fA-F:]+\]):\d{1,5}")


class Monitors:
    """The servers at `durable_log.monitors`, as they last answered."""

    def __init__(self, addresses: str) -> None:
        """Take the setting; raises SettingsError."""
        self._addresses = [each.strip() for each in addresses.split(",") if each.strip()]
        if not all(_ADDRESS.fullmatch(each) for each in self._addresses):
            raise SettingsError("durable_log.monitors", "HOST:PORT, with commas between", addresses)
        self.syncs: dict[str, str] = {}
        """By address: the server's `sync_interval`, or why it is not known."""
        self.storage_ratios: dict[str, float] = {}
        """By address: the used share of JetStream's storage, from 0 to 1."""

    async def ask(self) -> None:
        """Ask all of them at once."""
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
