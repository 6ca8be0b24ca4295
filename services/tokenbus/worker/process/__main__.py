"""Main program of the publisher's process. The arguments are descriptors shared with the engine's process."""

import asyncio
import contextlib
import json
import signal
import socket
import sys

from tokenbus.bus import AddressError, ZeroMQTransport
from tokenbus.logs import configure
from tokenbus.worker.process.memory import SharedMemory
from tokenbus.worker.process.server import Introduction, PublisherServer


def main(file: int, bell: int, keeper: int) -> None:
    """Publish until the engine's process leaves or dies."""
    # Ignore signals, because the engine's process decides when the publisher's process ends.
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    # Read only one line, because a child of the engine's process may hold the pipe open.
    given = Introduction.of(json.loads(sys.stdin.readline()))
    configure(given.settings.log)
    engine = socket.socket(fileno=bell)
    engine.settimeout(0)
    keeping = socket.socket(fileno=keeper)

    def keep(connection: int) -> None:
        with contextlib.suppress(OSError):  # the connection or the engine's process has ended
            socket.send_fds(keeping, [b"k"], [connection])

    async def serve() -> None:
        transport = ZeroMQTransport(given.settings.bus)
        transport.connected = keep
        await PublisherServer(SharedMemory(file, given.settings), engine, given, transport=transport).run()

    try:
        asyncio.run(serve())
    except AddressError as error:
        engine.send(json.dumps(error.args).encode())
        sys.exit(1)


main(*map(int, sys.argv[1:]))
