"""One of several processes of a gateway: it accepts connections from the socket that it shares with the others.

`python -m tokenbus_services.gateway.member CHANNEL LISTENING TALLIES`: the descriptors that it has from its supervisor.
"""

import asyncio
import gc
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tokenbus_services.bus import AddressError
from tokenbus_services.gateway.errors import ApiError
from tokenbus_services.gateway.gateway import Gateway
from tokenbus_services.gateway.group import Channel
from tokenbus_services.gateway.metrics import metrics_page
from tokenbus_services.gateway.server import serve_gateway
from tokenbus_services.gateway.tallies import SharedTallies
from tokenbus_services.logs.output import configure
from tokenbus_services.metrics.health import Health
from tokenbus_services.settings import Settings, SettingsError

_ASK_SECONDS = 5.0
"""How long the supervisor may take to answer."""


class Member:
    """What a process shares with the others: the listening socket, the tallies, and the answers about all of them."""

    def __init__(self, address: str, listening: socket.socket, tallies: SharedTallies, channel: Channel) -> None:
        """Share a socket that listens at `address`; `channel` leads to the supervisor."""
        self.address = address
        self.listening = listening
        self.tallies = tallies
        self.gateway: Gateway | None = None
        """This process's own; None until it serves."""
        self._channel = channel
        self._answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Take the supervisor's answers; when it is gone, end this process at once."""
        async for answer in self._channel.messages():
            self._answer.set_result(answer)
            self._answer = asyncio.get_running_loop().create_future()
        os._exit(1)

    def report(self, *, asks: bool = False) -> None:
        """Send the supervisor this process's metrics and health, which is its sign of life too; call it every second.

        With `asks` the supervisor answers with those of all processes.
        """
        if self.gateway is not None:
            health, page = self.gateway.health(), metrics_page(self.gateway)
            self._channel.send(metrics=page, problems=health.problems, facts=health.facts, asks=asks)

    async def metrics(self) -> str:
        """Return the page of metrics of all processes; raises an ApiError if the supervisor does not answer."""
        page: str = (await self._ask())["metrics"]
        return page

    async def health(self) -> Health:
        """Return the health of all processes; raises an ApiError if the supervisor does not answer."""
        answer = await self._ask()
        return Health(tuple(answer["problems"]), answer["facts"])

    async def _ask(self) -> dict[str, Any]:
        answer = self._answer
        self.report(asks=True)
        try:
            async with asyncio.timeout(_ASK_SECONDS):
                return await asyncio.shield(answer)
        except TimeoutError:
            message = f"the supervisor of the gateway's processes has not answered within {_ASK_SECONDS:g} s"
            raise ApiError(503, message, code="stalled") from None


async def _run(end: socket.socket, listening: socket.socket, tallies: int) -> int:
    stop = asyncio.Event()
    # A terminal's Ctrl-C reaches all processes: the supervisor says when to leave.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    listening.setblocking(False)  # noqa: FBT003 - a name of the standard library's
    channel = await Channel.over(end)
    given = await anext(channel.messages())
    settings = Settings.load(environment={}, overrides=given["settings"])
    place, count = given["place"], settings.gateway.processes
    configure(settings.log, process=place)
    gateway = settings.gateway
    own = replace(
        gateway,
        metrics_address="",
        max_connections=-(-gateway.max_connections // count),
        buffer_bytes=max(gateway.buffer_bytes // count, 1),
    )
    member = Member(given["address"], listening, SharedTallies(tallies, place), channel)
    running = asyncio.create_task(member.run())
    try:
        async with serve_gateway(replace(settings, gateway=own), member):
            gc.collect()
            gc.freeze()  # as any other service: what is there from the start stays
            member.report()
            await stop.wait()
    except (SettingsError, AddressError) as error:
        channel.send(fault=error.args)
        return 1
    finally:
        running.cancel()
        await channel.close()
    return 0


def main(arguments: Sequence[str]) -> int:
    """Serve until the supervisor says to leave; return the exit status."""
    channel, listening, tallies = map(int, arguments)
    return asyncio.run(_run(socket.socket(fileno=channel), socket.socket(fileno=listening), tallies))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
