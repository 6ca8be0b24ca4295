"""Measure how long a crowd that connects at once takes, and what it costs a client: `python -m benchmarks.storm`.

A processor with keys over tcp, a worker and a client that asks all the while; then the crowd comes, all at once; then
the processor is killed and started again, and the crowd comes back. The crowd is real clients and workers, all in one
process, so on a machine with few cores that process is a good part of what is measured.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection

from benchmarks.processes import Child, deployed, processor_seconds
from benchmarks.report import Report, Row, progress
from tests.integration.asking import wanted
from tests.integration.attacks.scene import free_ports, peak_mib
from tests.integration.deployment import Deployment
from tests.integration.programs import Program
from tests.support.settings import settings_of
from tokenbus_services.bus import Role, ZeroMQTransport
from tokenbus_services.bus.allow_list import new_key, write_keys
from tokenbus_services.bus.keys import create_key, public_key
from tokenbus_services.client import Client
from tokenbus_services.delivery import RequestFailedError
from tokenbus_services.link import SessionState
from tokenbus_services.worker import Publisher

_AT_ONCE, _TOKENS, _STEPS_PER_SECOND = 8, 3000, 40
_SETTLE_SECONDS = 3.0
_SPARE = 16
_A_CONTEXT = 200
"""How many peers share a ZeroMQ context, which has 1,023 sockets at most."""


def main(arguments: Sequence[str] | None = None) -> None:
    report = Report("storm", __doc__)
    report.parser.add_argument("--clients", type=int, default=2000, metavar="N", help="how many clients come (2000)")
    report.parser.add_argument("--workers", type=int, default=200, metavar="N", help="how many workers come (200)")
    options = report.parse(arguments)
    clients, workers = (100, 10) if options.quick else (options.clients, options.workers)
    title = f"{clients} clients and {workers} workers"
    progress(title)
    report.table(asyncio.run(_measured(clients, workers)), title)
    report.write()


async def _measured(clients: int, workers: int) -> list[Row]:
    addresses = {
        f"bus__{kind}_address": f"tcp://127.0.0.1:{port}"
        for kind, port in zip(("workers", "clients"), free_ports(2), strict=True)
    }
    room = {"clients__max_clients": clients + _SPARE, "processor__max_workers": workers + _SPARE}
    with deployed(bus__reconnect_max_ms=500, client__drain_timeout_ms=0, **addresses, **room) as deployment:
        folder = deployment.folder
        for each in ("processor", "peer"):
            create_key(folder, each)
        public = public_key(str(folder / "peer.key")).decode()
        write_keys(folder / "allowed.toml", [new_key("peer", public, Role, ["*"])])
        keys = {"bus.key_file": f"{folder}/peer.key_secret", "bus.server_key": f"{folder}/processor.key"}
        deployment.overrides |= keys
        processor = await asyncio.to_thread(_start_processor, deployment)
        pace = ("--steps-per-second", str(_STEPS_PER_SECOND))
        await asyncio.to_thread(deployment.start_worker, "mine", *pace, worker__model="mine")
        async with Client(deployment.settings()) as client:
            system = _System(client)
            try:
                await system.settle(processor)
                with Child() as crowd:
                    crowd.begin(gather, deployment.overrides, clients, workers)
                    await asyncio.to_thread(crowd.answer)
                    rows = [await system.storm("they come", processor, crowd)]
                    await asyncio.to_thread(processor.kill)
                    processor = await asyncio.to_thread(_start_processor, deployment)
                    return [*rows, await system.storm("the processor was restarted", processor, crowd)]
            finally:
                for task in system.asking:
                    task.cancel()


def _start_processor(deployment: Deployment) -> Program:
    folder = deployment.folder
    return deployment.start_processor(
        bus__key_file=f"{folder}/processor.key_secret", bus__allowed_keys=f"{folder}/allowed.toml"
    )


class _System:
    """The client that was there before, and how it fares."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._tokens = self._failed = 0
        self._rate = self._idle_mib = 0.0
        self.asking = [asyncio.create_task(self._ask()) for _ in range(_AT_ONCE)]

    async def _ask(self) -> None:
        while True:
            try:
                async for row in self._client.generate(wanted(_TOKENS, "mine", top_logprobs=0)).rows():
                    self._tokens += row.token_ids.size
            except RequestFailedError:
                self._failed += 1
                await asyncio.sleep(0.1)

    async def settle(self, processor: Program) -> None:
        while not self._tokens:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.1)
        before, began = self._tokens, time.monotonic()
        await asyncio.sleep(_SETTLE_SECONDS)
        self._rate = (self._tokens - before) / (time.monotonic() - began)
        self._idle_mib = peak_mib(processor.pid)

    async def storm(self, name: str, processor: Program, crowd: Child) -> Row:
        before, began, cpu = self._tokens, time.monotonic(), processor_seconds(processor.pid)
        await asyncio.to_thread(crowd.ask, "connect")
        took = time.monotonic() - began
        share, growth = (self._tokens - before) / took / self._rate, peak_mib(processor.pid) - self._idle_mib
        failed, self._failed = self._failed, 0
        return {
            "when": name,
            "all are connected, s": took,
            "share": share,
            "failed": failed,
            "memory grows by, MiB": growth,
            "CPU, s": processor_seconds(processor.pid) - cpu,
        }


def gather(connection: Connection, overrides: Mapping[str, object], clients: int, workers: int) -> None:
    """Be a crowd; each message is answered once all of it are connected to another processor than before."""
    asyncio.run(_gather(connection, overrides, clients, workers))


async def _gather(connection: Connection, overrides: Mapping[str, object], clients: int, workers: int) -> None:
    peers: list[Client | Publisher] = []
    for place in range(clients + workers):
        # The workers have a model of their own: the requests of the client that was there before stay with its worker.
        own = {"client.name": f"crowd-{place}", "worker.id": f"crowd-{place}", "worker.model": "crowd"}
        settings = settings_of({**overrides, **own, "worker.retention_items": 16})
        if place % _A_CONTEXT == 0:
            transport = ZeroMQTransport(settings.bus)
        peers.append((Client if place < clients else Publisher)(settings, transport=transport))
    sessions = [peer.session if isinstance(peer, Publisher) else peer.sessions[0] for peer in peers]
    connection.send("ready")
    processor = ""
    async with AsyncExitStack() as stack:
        while await asyncio.to_thread(connection.recv):
            if not processor:
                for peer in peers:
                    await stack.enter_async_context(peer)
            while True:
                met = {each.processor_id for each in sessions if each.state is SessionState.OPEN}
                count = sum(each.state is SessionState.OPEN for each in sessions)
                if count == len(sessions) and len(met) == 1 and met != {processor}:
                    break
                await asyncio.sleep(0.05)
            (processor,) = met
            connection.send("connected")


if __name__ == "__main__":
    main()
