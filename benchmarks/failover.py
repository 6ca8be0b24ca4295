"""Measure how long requests pause when their processor or NATS server goes: `python -m benchmarks.failover`.

Two processors, workers and a client that know both, over ZeroMQ: the processor that has requests is killed, asked to
end, or stopped; a pause is from then until every request that it had has its next token at the client. The same over a
cluster of three NATS servers: the one that all of them are connected to is killed (node) or stands still (node-stop),
or the one that leads a durable log with three replicas that the processors keep is killed (leader). A pause is from
then until the client has a token of every request, and a reader of the log an item of every worker, that was produced
after it; of new requests, the longest that one waits for its first token. What went is started again.
"""

import asyncio
import json
import time
import urllib.request
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from statistics import median
from typing import Any

from benchmarks.errors import NotRunError, WrongDeliveryError
from benchmarks.processes import PATIENCE, deployed, until_workers
from benchmarks.report import Report, Row, progress
from tests.integration.deployment import Deployment
from tests.integration.programs import Program
from tests.support.nats import NatsServer
from tests.support.nats_cluster import cluster
from tokenbus_services.client import Client, RequestEnd, StepRows, Stream
from tokenbus_services.client.session import ClientSession
from tokenbus_services.delivery import RequestFailedError
from tokenbus_services.durable_log.reader import read_log
from tokenbus_services.link import SessionState
from tokenbus_services.settings import Settings

_BUS, _STILL, _LEADER = "node", "node-stop", "leader"
_IN_WORDS = {
    "kill": "a processor is killed (SIGKILL)",
    "terminate": "a processor is asked to end (SIGTERM)",
    "stop": "a processor stands still (SIGSTOP)",
    _BUS: "the NATS server that carries all is killed",
    _STILL: "the NATS server that carries all stands still",
    _LEADER: "the NATS server that leads the log is killed",
}
_CLIENT, _NEW, _READER, _ELECTION = "client", "new requests", "reader of the log", "(a leader again)"
_SERVERS = 3
_MOST_TOKENS = 100_000_000
_PACE = ("--steps-per-second", "20")
_LOOK_SECONDS, _ASK_SECONDS = 0.1, 0.2
Pauses = Mapping[str, Sequence[float]]
"""By who waited, the seconds of each round."""


def main(arguments: Sequence[str] | None = None) -> None:
    report = Report("failover", __doc__)
    add = report.parser.add_argument
    add("--how", choices=list(_IN_WORDS), nargs="+", default=list(_IN_WORDS), help="what goes, and how (all)")
    add("--rounds", type=int, default=9, metavar="N", help="how often (9)")
    add("--workers", type=int, default=2, metavar="N", help="how many workers (2)")
    add("--requests", type=int, default=8, metavar="N", help="how many requests (8)")
    options = report.parse(arguments)
    rounds = 1 if options.quick else options.rounds
    rows: list[Row] = []
    try:
        for how in options.how:
            progress(f"{how}: {rounds} rounds")
            pauses = _of_servers if how in {_BUS, _STILL, _LEADER} else _of_processors
            found = asyncio.run(pauses(how, rounds, options.workers, options.requests))
            rows += [
                {"what goes": _IN_WORDS[how], "who waits": who, "median, s": median(each), "worst, s": max(each)}
                for who, each in found.items()
            ]
    except (NotRunError, WrongDeliveryError) as error:
        report.fail(error)
    report.table(rows, f"{rounds} rounds")
    report.write()


async def _begun(client: Client, workers: int, requests: int) -> list[int]:
    await until_workers(client, workers)
    return [client.submit([1], max_tokens=_MOST_TOKENS) for _ in range(requests)]


def _keys_of(output: StepRows | RequestEnd) -> list[int]:
    """Return the requests that have rows in what came; a request that ended ends the measurement."""
    if isinstance(output, RequestEnd):
        raise WrongDeliveryError(f"a request ended: {output.error}")
    keys: list[int] = output.target.request_keys.tolist()
    return keys


async def _of_processors(how: str, rounds: int, workers: int, requests: int) -> Pauses:
    """Let the processor go that has most requests, once in each round."""
    with deployed() as deployment:
        places = [{f"bus.{kind}s_address": f"ipc://{deployment.folder}/{n}{kind[0]}" for kind in ("worker", "client")}
                  for n in range(2)]  # fmt: skip
        deployment.overrides |= {key: ",".join(own[key] for own in places) for key in places[0]}

        def start(place: int) -> Program:
            own: dict[str, Any] = {key.replace(".", "__"): address for key, address in places[place].items()}
            return deployment.start_processor(processor__id=f"p{place}", **own)

        processors = [start(place) for place in range(2)]
        for number in range(workers):
            deployment.start_worker(f"w{number}", *_PACE)
        async with Client(deployment.settings()) as client, client.steps(most=1024) as steps:
            keys = await _begun(client, workers, requests)
            found = []
            for _ in range(rounds):
                missing = set(keys)
                while missing or not all(each.state is SessionState.OPEN for each in client.sessions):
                    missing.difference_update(_keys_of(await anext(steps)))
                homes: list[ClientSession | None] = [each.home for each in client.requests.requests.values()]
                gone = max(client.sessions, key=homes.count)
                place = client.sessions.index(gone)
                waiting = {key for key, request in client.requests.requests.items() if request.home is gone}
                began = time.monotonic()
                ending = asyncio.create_task(asyncio.to_thread(getattr(processors[place], how)))
                while waiting:
                    came = _keys_of(await anext(steps))
                    waiting.difference_update(key for key in came if client.requests.requests[key].home is not gone)
                found.append(time.monotonic() - began)
                await ending
                await asyncio.to_thread(processors[place].kill)
                processors[place] = await asyncio.to_thread(start, place)
            for key in keys:
                client.requests.discard(key)
    return {_CLIENT: found}


async def _of_servers(how: str, rounds: int, workers: int, requests: int) -> Pauses:
    """Let a server of a NATS cluster go, once in each round."""
    with deployed() as deployment, cluster(deployment.folder, _SERVERS) as servers:
        at = f"nats://{','.join(each.server for each in servers)}"
        deployment.overrides |= {f"bus.{kind}_address": f"{at}/{kind}.*" for kind in ("workers", "clients")}
        # With `durable` the servers' payload must have room for the largest message.
        deployment.overrides["limits.max_message_bytes"] = 500_000
        if how == _LEADER:
            log = {"address": f"{at}/log", "replicas": _SERVERS, "durable": True}
            deployment.overrides |= {f"durable_log.{name}": value for name, value in log.items()}
        for place in range(2):
            deployment.start_processor(processor__id=f"p{place}")
        for number in range(workers):
            deployment.start_worker(f"w{number}", *_PACE)
        return await _rounds(how, rounds, servers, deployment, workers, requests)


async def _rounds(  # noqa: PLR0913, PLR0917 - all that takes part
    how: str, rounds: int, servers: Sequence[NatsServer], deployment: Deployment, workers: int, requests: int
) -> Pauses:
    settings = deployment.settings()
    async with Client(settings) as client, client.steps(most=1024) as steps, Client(settings) as other:
        await until_workers(other, workers)
        keys = await _begun(client, workers, requests)
        seen = {_CLIENT: _Arrivals(keys)}
        readers: list[Coroutine[Any, Any, None]] = [_read(steps, seen[_CLIENT])]
        if how == _LEADER:
            seen[_READER] = _Arrivals(f"w{number}" for number in range(workers))
            readers.append(_read_log(settings, seen[_READER]))
        names = [*seen, _ELECTION if how == _LEADER else _NEW]
        found: dict[str, list[float]] = {name: [] for name in names}
        all_connections = sum(map(_connections, servers))
        async with asyncio.TaskGroup() as group:
            reading = [group.create_task(reader) for reader in readers]
            for _ in range(rounds):
                gone = await (_leader(servers) if how == _LEADER else _gathered(servers, all_connections))
                now = time.time_ns()
                for arrivals in seen.values():
                    await arrivals.seconds_until_all(now)
                began = time.time_ns()
                (gone.pause if how == _STILL else gone.kill)()
                waits = [asyncio.create_task(arrivals.seconds_until_all(began)) for arrivals in seen.values()]
                others = [each for each in servers if each is not gone]
                last = _elected(others, began) if how == _LEADER else _first_tokens(other, waits[0])
                for name, seconds in zip(names, await asyncio.gather(*waits, last), strict=True):
                    found[name].append(seconds)
                (gone.resume if how == _STILL else gone.start)()
            for task in reading:
                task.cancel()
        for key in keys:
            client.requests.discard(key)
    return found


class _Arrivals:
    """Of each stream, when the newest step that has come was produced."""

    def __init__(self, streams: Iterable[int | str]) -> None:
        self._newest: dict[int | str, int] = dict.fromkeys(streams, 0)
        self._came = asyncio.Event()

    def take(self, streams: Iterable[int | str], produced_at_ns: int) -> None:
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


async def _first_tokens(client: Client, streams: "asyncio.Task[float]") -> float:
    """Ask for tokens again and again until all streams go on, and return the longest wait for a first one."""

    async def first_token() -> float:
        began = time.monotonic()
        try:
            async for _ in client.generate([1], max_tokens=1):
                pass
        except RequestFailedError as error:
            raise WrongDeliveryError(f"a new request failed: {error}") from None
        return time.monotonic() - began

    asked = [asyncio.create_task(first_token())]
    while not streams.done():
        await asyncio.sleep(_ASK_SECONDS)
        asked.append(asyncio.create_task(first_token()))
    return max(await asyncio.gather(*asked))


async def _read(steps: Stream[StepRows | RequestEnd], arrivals: _Arrivals) -> None:
    async for output in steps:
        keys = _keys_of(output)
        if isinstance(output, StepRows):
            arrivals.take(keys, output.target.header.produced_at_ns)


async def _read_log(settings: Settings, arrivals: _Arrivals) -> None:
    async with aclosing(read_log(follow=True, settings=settings)) as log:
        async for item in log:
            if item.missing_items:
                raise WrongDeliveryError(f"{item.worker_id}: the log lacks {item.missing_items} items")
            if item.batch is not None:
                arrivals.take([item.worker_id], item.batch.header.produced_at_ns)


async def _gathered(servers: Sequence[NatsServer], all_connections: int) -> NatsServer:
    """Let all processes be connected to one server of a whole cluster, and return it."""
    chosen = max(servers, key=_connections)
    others = [each for each in servers if each is not chosen]
    for each in others:
        each.kill()
    await _until(lambda: _connections(chosen) >= all_connections, "all processes are at one server")
    for each in others:
        each.start()
    await _until(lambda: all(_routes(each) == _SERVERS - 1 for each in servers), "the cluster is whole")
    return chosen


async def _leader(servers: Sequence[NatsServer]) -> NatsServer:
    """Return the server that leads the log's stream, once the others have all that it has."""
    whole = partial(_leads, followers=_SERVERS - 1)
    await _until(lambda: any(map(whole, servers)), "all servers have the log")
    return next(each for each in servers if _leads(each))


async def _elected(servers: Sequence[NatsServer], killed_ns: int) -> float:
    """Return how many seconds after a kill one of the other servers leads the log's stream."""
    await _until(lambda: any(map(_leads, servers)), "the log has a leader again")
    return (time.time_ns() - killed_ns) / 1e9


async def _until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not await asyncio.to_thread(condition):
        if time.monotonic() > end:
            raise NotRunError(f"not within {PATIENCE:g} s: {what}")
        await asyncio.sleep(_LOOK_SECONDS)


def _monitored(server: NatsServer, path: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://{server.monitor}/{path}", timeout=PATIENCE) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def _connections(server: NatsServer) -> int:
    return int(_monitored(server, "connz")["num_connections"])


def _routes(server: NatsServer) -> int:
    return len({route["remote_id"] for route in _monitored(server, "routez")["routes"] or ()})


def _leads(server: NatsServer, followers: int = 0) -> bool:
    """Tell whether a server leads the log's stream, and has so many followers with all of it."""
    accounts = _monitored(server, "jsz?streams=1").get("account_details") or ()
    clusters = [stream["cluster"] for account in accounts for stream in account.get("stream_detail", ())]
    return any(
        each.get("leader") == server.folder.name
        and sum(replica["current"] for replica in each.get("replicas", ())) >= followers
        for each in clusters
    )


if __name__ == "__main__":
    main()
