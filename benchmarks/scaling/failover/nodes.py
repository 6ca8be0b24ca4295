"""A server of a NATS cluster goes: the one that carries the whole bus, or the one that leads a durable log."""

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, aclosing
from pathlib import Path

from benchmarks.errors import NotRunError, WrongDeliveryError
from benchmarks.nats_servers import NatsServer, address_of, nats_servers
from benchmarks.programs import PATIENCE, until_workers
from benchmarks.scaling.failover.system import System, keys_of
from tokenbus_services.client import Client, RequestEnd, StepRows, Stream
from tokenbus_services.delivery import RequestFailedError
from tokenbus_services.durable_log.reader import read_log
from tokenbus_services.settings import Settings

BUS, STILL, LEADER = "node", "node-stop", "leader"
CLIENT, NEW, READER, ELECTION = "client", "new requests", "reader of the log", "(a leader again)"
_SERVERS = 3
_LOOK_SECONDS = 0.1
_ASK_SECONDS = 0.2
MESSAGE_BYTES = "500000"
"""The largest of the bus: with `durable` the servers' payload must have room for it."""


class Arrivals:
    """Of each stream, when the newest step that has come was produced."""

    def __init__(self, streams: Iterable[int | str]) -> None:
        """Begin without a step."""
        self._newest: dict[int | str, int] = dict.fromkeys(streams, 0)
        self._came = asyncio.Event()

    def take(self, streams: Iterable[int | str], produced_at_ns: int) -> None:
        """Take a step of some streams."""
        for stream in streams:
            self._newest[stream] = max(self._newest[stream], produced_at_ns)
        self._came.set()

    async def seconds_until_all(self, time_ns: int) -> float:
        """Return after how many seconds each stream had a step that was produced after a time."""
        async with asyncio.timeout(PATIENCE):
            while min(self._newest.values()) < time_ns:
                self._came.clear()
                await self._came.wait()
        return (time.time_ns() - time_ns) / 1e9


async def pauses(how: str, rounds: int, workers: int, requests: int) -> dict[str, list[float]]:
    """Return how long what was produced after a server went took to come, by who waited for it."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tb", dir="/tmp")))
        servers = stack.enter_context(nats_servers(folder, _SERVERS))
        settings = {"limits.max_message_bytes": MESSAGE_BYTES}
        if how == LEADER:
            settings["durable_log.address"] = address_of(servers, "log")
            settings |= {"durable_log.replicas": str(_SERVERS), "durable_log.durable": "true"}
        address = {kind: address_of(servers, f"{kind}s.*") for kind in ("worker", "client")}
        system = System(stack, folder, [address] * 2, workers, settings)
        ours = Settings.load(overrides={**system.all, **settings})
        async with Client(ours) as client, client.steps(most=1024) as steps, Client(ours) as other:
            await until_workers(other, workers)
            keys = await system.begin(client, requests)
            seen = {CLIENT: Arrivals(keys)}
            async with asyncio.TaskGroup() as group:
                reading = [group.create_task(_read(steps, seen[CLIENT]))]
                if how == LEADER:
                    seen[READER] = Arrivals(f"w{number}" for number in range(workers))
                    reading.append(group.create_task(_read_log(ours, seen[READER])))
                found = await _rounds(how, rounds, servers, seen, other)
                for task in reading:
                    task.cancel()
            for key in keys:
                client.requests.discard(key)
        return found


async def _rounds(
    how: str, rounds: int, servers: Sequence[NatsServer], seen: dict[str, Arrivals], other: Client
) -> dict[str, list[float]]:
    names = [*seen, ELECTION if how == LEADER else NEW]
    found: dict[str, list[float]] = {name: [] for name in names}
    all_connections = sum(map(_connections, servers))
    for _ in range(rounds):
        victim = await (_leader(servers) if how == LEADER else _gathered(servers, all_connections))
        now = time.time_ns()
        for arrivals in seen.values():
            await arrivals.seconds_until_all(now)
        gone = time.time_ns()
        (victim.stop if how == STILL else victim.kill)()
        waits = [asyncio.create_task(arrivals.seconds_until_all(gone)) for arrivals in seen.values()]
        if how == LEADER:
            last = _elected([each for each in servers if each is not victim], gone)
        else:
            last = _first_tokens(other, waits[0])
        for name, seconds in zip(names, await asyncio.gather(*waits, last), strict=True):
            found[name].append(seconds)
        (victim.go_on if how == STILL else victim.start)()
    return found


async def _first_tokens(client: Client, streams: "asyncio.Task[float]") -> float:
    """Ask for tokens again and again until all streams go on, and return the longest wait for a first one."""
    asked = [asyncio.create_task(_first_token(client))]
    while not streams.done():
        await asyncio.sleep(_ASK_SECONDS)
        asked.append(asyncio.create_task(_first_token(client)))
    return max(await asyncio.gather(*asked))


async def _first_token(client: Client) -> float:
    began = time.monotonic()
    try:
        async for _ in client.generate([1], max_tokens=1):
            pass
    except RequestFailedError as error:
        raise WrongDeliveryError(f"a new request failed: {error}") from None
    return time.monotonic() - began


async def _read(steps: Stream[StepRows | RequestEnd], arrivals: Arrivals) -> None:
    async for output in steps:
        keys = keys_of(output)
        if isinstance(output, StepRows):
            arrivals.take(keys, output.target.header.produced_at_ns)


async def _read_log(settings: Settings, arrivals: Arrivals) -> None:
    async with aclosing(read_log(follow=True, settings=settings)) as log:
        async for item in log:
            if item.missing_items:
                raise WrongDeliveryError(f"{item.worker_id}: the log lacks {item.missing_items} items")
            if item.batch is not None:
                arrivals.take([item.worker_id], item.batch.header.produced_at_ns)


async def _gathered(servers: Sequence[NatsServer], all_connections: int) -> NatsServer:
    """Let all processes be connected to one server of a whole cluster, and return it."""
    counts = [_connections(each) for each in servers]
    chosen = servers[counts.index(max(counts))]
    others = [each for each in servers if each is not chosen]
    for each in others:
        each.kill()
    await _until(lambda: _connections(chosen) >= all_connections, "all processes are at one server")
    for each in others:
        each.start()
    await _until(lambda: all(_routes(each) == _SERVERS - 1 for each in servers), "the cluster is whole")
    return chosen


def _connections(server: NatsServer) -> int:
    return int(server.monitored("connz")["num_connections"])


def _routes(server: NatsServer) -> int:
    return len({route["remote_id"] for route in server.monitored("routez")["routes"] or ()})


async def _leader(servers: Sequence[NatsServer]) -> NatsServer:
    """Return the server that leads the log's stream, once the others have all that it has."""
    await _until(lambda: any(_leads(each, followers=_SERVERS - 1) for each in servers), "all servers have the log")
    return next(each for each in servers if _leads(each))


async def _elected(servers: Sequence[NatsServer], killed_ns: int) -> float:
    """Return how many seconds after a kill one of the other servers leads the log's stream."""
    await _until(lambda: any(map(_leads, servers)), "the log has a leader again")
    return (time.time_ns() - killed_ns) / 1e9


def _leads(server: NatsServer, followers: int = 0) -> bool:
    """Tell whether a server leads the log's stream, and has so many followers with all of it."""
    accounts = server.monitored("jsz?streams=1").get("account_details") or ()
    clusters = [stream["cluster"] for account in accounts for stream in account.get("stream_detail", ())]
    return any(
        each.get("leader") == server.name
        and sum(replica["current"] for replica in each.get("replicas", ())) >= followers
        for each in clusters
    )


async def _until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not await asyncio.to_thread(condition):
        if time.monotonic() > end:
            raise NotRunError(f"not within {PATIENCE:g} s: {what}")
        await asyncio.sleep(_LOOK_SECONDS)
