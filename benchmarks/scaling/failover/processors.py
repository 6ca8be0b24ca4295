"""A processor goes: it is killed, asked to end, or stopped, while another one is there."""

import asyncio
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.programs import PATIENCE
from benchmarks.scaling.failover.system import System, keys_of
from tokenbus_services.client import Client, RequestEnd, StepRows, Stream
from tokenbus_services.client.session import ClientSession
from tokenbus_services.link import SessionState
from tokenbus_services.settings import Settings

SIGNALS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "stop": signal.SIGSTOP}


async def pauses(how: str, rounds: int, workers: int, requests: int) -> list[float]:
    """Return how long the requests of the processor that had most paused, each time that one went."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tb", dir="/tmp")))
        addresses = [
            {kind: f"ipc://{folder}/{number}{kind[0]}" for kind in ("worker", "client")} for number in range(2)
        ]
        system = System(stack, folder, addresses, workers)
        async with Client(Settings.load(overrides=system.all)) as client, client.steps(most=1024) as steps:
            keys = await system.begin(client, requests)
            found = []
            for _ in range(rounds):
                await _all_there(client, steps, keys)
                found.append(await _pause(how, system, client, steps))
            for key in keys:
                client.requests.discard(key)
        return found


async def _all_there(client: Client, steps: Stream[StepRows | RequestEnd], keys: Sequence[int]) -> None:
    """Wait until both processors are there, and every request has had another row."""
    missing = set(keys)
    while missing or not all(each.state is SessionState.OPEN for each in client.sessions):
        missing.difference_update(keys_of(await anext(steps)))


async def _pause(how: str, system: System, client: Client, steps: Stream[StepRows | RequestEnd]) -> float:
    homes: list[ClientSession | None] = [each.home for each in client.requests.requests.values()]
    gone = max(client.sessions, key=homes.count)
    place = client.sessions.index(gone)
    missing = {key for key, request in client.requests.requests.items() if request.home is gone}
    process = system.processors[place]
    began = time.monotonic()
    process.send_signal(SIGNALS[how])
    while missing:
        keys = keys_of(await anext(steps))
        missing.difference_update(key for key in keys if client.requests.requests[key].home is not gone)
    seconds = time.monotonic() - began
    if how == "stop":
        process.kill()
    await asyncio.to_thread(process.wait, PATIENCE)
    system.processors[place] = system.start(place)
    return seconds
