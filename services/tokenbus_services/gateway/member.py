"""One of several processes of a gateway: it serves the connections that its supervisor passes to it.

`python -m tokenbus_services.gateway.member CHANNEL CONNECTIONS TALLIES`: the descriptors that the supervisor gives it.
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
from tokenbus_services.gateway.acceptor import Beginnings
from tokenbus_services.gateway.channel import Channel, FailedAnswerError
from tokenbus_services.gateway.errors import ApiError
from tokenbus_services.gateway.group import Alone
from tokenbus_services.gateway.server import serve_gateway
from tokenbus_services.gateway.tallies import SharedTallies
from tokenbus_services.logs.output import configure
from tokenbus_services.settings import GatewaySettings, Settings, SettingsError

_ASK_SECONDS = 5.0
"""With gateway.bus_timeout_ms more than the supervisor gives each process to answer."""
_AT_ONCE = 64
"""Connections that are taken before other work goes on."""


class Member:
    """What a process has from its supervisor: connections, the tallies of all processes, and answers about them."""

    def __init__(
        self,
        settings: GatewaySettings,
        address: str,
        connections: socket.socket,
        tallies: SharedTallies,
        channel: Channel,
    ) -> None:
        """Take its settings, the address of all processes, what the supervisor passed, and the channel to it."""
        self._settings = settings
        self.address = address
        self.tallies = tallies
        self.alone: Alone | None = None
        """Answers for this process; None until it serves."""
        self._channel = channel
        self._connections = connections
        self._taken = 0
        self._reported = 0

    def accept(self, beginnings: Beginnings) -> None:
        """Begin to serve the connections that come."""
        self._connections.setblocking(False)  # noqa: FBT003 - a name of the standard library's

        def take() -> None:
            """Take what the supervisor has passed."""
            for _ in range(_AT_ONCE):
                try:
                    data, descriptors, _, _ = socket.recv_fds(self._connections, 1, 1)
                except BlockingIOError:
                    return
                if not data:  # the supervisor is gone
                    asyncio.get_running_loop().remove_reader(self._connections)
                    return
                self._taken += 1
                for descriptor in descriptors:
                    beginnings.begin(socket.socket(fileno=descriptor))

        asyncio.get_running_loop().add_reader(self._connections, take)

    def tick(self, connections: int) -> None:
        """Tell the supervisor how many of the connections that it passed are closed: all but these."""
        closed = self._taken - connections
        if closed != self._reported:
            self._reported = closed
            self._channel.tell("closed", closed)

    async def answer(self, what: str) -> Any:  # noqa: ANN401 - JSON
        """Answer the supervisor."""
        return None if self.alone is None else await self.alone.answer(what)

    async def ask(self, what: str) -> Any:  # noqa: ANN401 - JSON
        """Return what the supervisor answers for all processes; an ApiError says that it does not."""
        seconds = self._settings.bus_timeout_ms / 1000 + _ASK_SECONDS
        try:
            return await self._channel.ask(what, seconds)
        except TimeoutError as error:
            message = f"the supervisor of the gateway's processes has not answered within {seconds:g} s"
            raise ApiError(503, message, code="stalled") from error
        except FailedAnswerError as error:
            message = "the supervisor of the gateway's processes failed to answer: its log says why"
            raise ApiError(503, message, code="stalled") from error


async def _run(channel_end: socket.socket, connections: socket.socket, tallies: int) -> int:
    begun: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    member: Member | None = None

    def on_message(what: str, value: Any) -> None:  # noqa: ANN401 - JSON
        """Take what the supervisor says."""
        if what == "begin":
            begun.set_result(value)
        elif what == "drain":
            stop.set()

    async def asked(what: str) -> Any:  # noqa: ANN401 - JSON
        """Answer what the supervisor asks."""
        if what == "alive":
            return True
        return None if member is None else await member.answer(what)

    # A terminal's Ctrl-C reaches all processes: the supervisor says when to leave.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    channel = await Channel.over(channel_end, on_message, asked)

    async def read() -> None:
        """Take what the supervisor says; end with it, at once."""
        await channel.run()
        os._exit(1)

    reading = asyncio.create_task(read())
    given = await begun
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
    member = Member(own, given["address"], connections, SharedTallies(tallies, place), channel)
    try:
        async with serve_gateway(replace(settings, gateway=own), member):
            channel.tell("ready")
            gc.collect()
            gc.freeze()  # as any other service: what is there from the start stays
            await stop.wait()
    except (SettingsError, AddressError) as error:
        if isinstance(error, AddressError):
            fault = [error.address, error.reason]
        else:
            fault = [error.key, error.limit, str(error.actual), error.where]
        channel.tell("failed", fault)
        await channel.flush()
        return 1
    finally:
        reading.cancel()
    return 0


def main(arguments: Sequence[str]) -> int:
    """Serve until the supervisor says to leave; return the exit status."""
    channel, connections, tallies = map(int, arguments)
    return asyncio.run(_run(socket.socket(fileno=channel), socket.socket(fileno=connections), tallies))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
