"""A crowd of real clients and workers in one process: `python -m benchmarks.storm.crowd CLIENTS WORKERS`.

It prints `ready`, connects all of them when it reads `go`, and prints `connected` once all are. When it reads `again`,
it waits until all are connected to another life of the processor, and prints `connected` again.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

from tokenbus_services.bus import ZeroMQTransport
from tokenbus_services.client import Client
from tokenbus_services.link import ReconnectingSession, SessionState
from tokenbus_services.logs.output import configure
from tokenbus_services.settings import LogSettings, Settings
from tokenbus_services.worker import Publisher

_A_CONTEXT = 200
"""How many peers share a ZeroMQ context, which has 1,023 sockets at most."""
_LOOK_SECONDS = 0.05
_REPORT_SECONDS = 1.0


def _peers(settings: Settings, clients: int, workers: int) -> list[Client | Publisher]:
    peers: list[Client | Publisher] = []
    transport = ZeroMQTransport(settings.bus)
    for place in range(clients):
        if place % _A_CONTEXT == 0:
            transport = ZeroMQTransport(settings.bus)
        own = replace(settings, client=replace(settings.client, name=f"crowd-{place}"))
        peers.append(Client(own, transport=transport))
    for place in range(workers):
        if place % _A_CONTEXT == 0:
            transport = ZeroMQTransport(settings.bus)
        # Of a model of their own: the requests of the client that was there before stay with its worker.
        worker = replace(settings.worker, id=f"crowd-{place}", model="crowd", retention_items=16)
        peers.append(Publisher(replace(settings, worker=worker), transport=transport))
    return peers


def _sessions(peers: Sequence[Client | Publisher]) -> list[ReconnectingSession]:
    return [peer.session if isinstance(peer, Publisher) else peer.sessions[0] for peer in peers]


async def _until_connected(sessions: Sequence[ReconnectingSession], but_to: str) -> str:
    """Return the id of the processor that all are connected to, once they are and it is another one."""
    reported = began = time.monotonic()
    while True:
        met = {each.processor_id for each in sessions if each.state is SessionState.OPEN}
        count = sum(each.state is SessionState.OPEN and each.processor_id != but_to for each in sessions)
        if count == len(sessions) and len(met) == 1:
            return met.pop()
        if time.monotonic() - reported >= _REPORT_SECONDS:
            reported = time.monotonic()
            print(f"{reported - began:.0f} s: {count} of {len(sessions)}", file=sys.stderr, flush=True)
        await asyncio.sleep(_LOOK_SECONDS)


async def _run(clients: int, workers: int) -> None:
    peers = _peers(Settings.load(), clients, workers)
    sessions, commands = _sessions(peers), asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    print("ready", flush=True)
    processor = ""
    async with AsyncExitStack() as stack:
        while command := (await commands.readline()).strip():
            if command == b"go":
                for peer in peers:
                    await stack.enter_async_context(peer)
            processor = await _until_connected(sessions, processor)
            print("connected", flush=True)


if __name__ == "__main__":
    configure(LogSettings(level="error"))
    asyncio.run(_run(int(sys.argv[1]), int(sys.argv[2])))
