"""The alerts about the durable log: each fires for a fault of real servers, and for nothing else."""

import asyncio
import operator
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from ruamel.yaml import YAML

from tests.metrics.running import Bus, Scrape
from tests.pages import ROOT
from tests.recordings.durable_log import using as log
from tests.support.nats import NatsServer
from tests.support.nats_cluster import cluster, until_ready
from tests.support.waiting import MOST, until
from tokenbus.recordings.durable_log import writer

RULES = {
    rule["alert"]: rule["expr"]
    for rule in YAML(typ="safe").load((ROOT / "deploy" / "alerts.yml").read_text())["groups"][0]["rules"]
    if rule["alert"].startswith("TokenbusLog")
}
OF_ONE_SERVER = {
    "TokenbusLogFailedMessages",
    "TokenbusLogLagSeconds",
    "TokenbusLogWritableServers",
    "TokenbusLogStorageRatio",
}
OF_A_CLUSTER = {"TokenbusLogWritableServers", "TokenbusLogMissingReplicas"}
AFTERWARDS = {"TokenbusLogFailedMessages", "TokenbusLogItemsMissing"}
_FORM = re.compile(r'(increase\()?(\w+)(?:\{outcome="(\w+)"\})?(?:\[5m\]\))? (>|==) ([\d.]+)')
_COMPARE = {">": operator.gt, "==": operator.eq}


def samples(found: Scrape, name: str, outcome: str | None) -> dict[frozenset[tuple[str, str]], float]:
    family = found.families[name.removesuffix("_total")]
    wanted = (each for each in family.samples if each.name == name and each.labels.get("outcome") == outcome)
    return {frozenset(each.labels.items()): each.value for each in wanted}


def fires(expression: str, before: Scrape, now: Scrape) -> bool:
    """Evaluate an alert's expression: of a counter by how much it moved between two scrapes, of a gauge as it is."""
    parsed = _FORM.fullmatch(expression)
    assert parsed is not None, expression
    increase, name, outcome, comparison, limit = parsed.groups()
    earlier = samples(before, name, outcome) if increase else {}
    values = (value - earlier.get(labels, 0) for labels, value in samples(now, name, outcome).items())
    return any(_COMPARE[comparison](value, float(limit)) for value in values)


def firing(before: Scrape, now: Scrape) -> set[str]:
    return {name for name, expression in RULES.items() if fires(expression, before, now)}


def test_every_alert_about_the_log_fires_here() -> None:
    assert RULES.keys() == OF_ONE_SERVER | OF_A_CLUSTER | AFTERWARDS


async def test_full_server_fires(server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    small = log.JETSTREAM.format(folder=server.folder).replace("}", ", max_file_store: 2MB }")
    log.restarted(server, f"{small}http: '127.0.0.1:-1'")
    chosen = log.logging_to(server, durable_log__monitors=server.monitor, durable_log__max_bytes=500_000, **log.SMALL)
    bus = Bus(chosen)
    async with bus.running():
        await until(lambda: log.told(bus.processor)("log_writable_servers"))
        calm = log.told(bus.processor)
        assert firing(calm, calm) == set()
        async with log.full(chosen):
            await bus.serve(requests=3, tokens=90)
            await until(lambda: log.health(bus.processor).outside)
            await until(lambda: (log.told(bus.processor)("log_storage_ratio", server=server.monitor) or 0) > 0.8)
            with monkeypatch.context() as later:
                later.setattr(writer, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 60))
                assert firing(calm, log.told(bus.processor)) == OF_ONE_SERVER
        await log.logged(bus)
        await bus.serve(requests=1, tokens=3)
        await log.logged(bus)
        await until(lambda: (log.told(bus.processor)("log_storage_ratio", server=server.monitor) or 0) < 0.8)
        assert firing(calm, log.told(bus.processor)) == AFTERWARDS
        assert not log.health(bus.processor).outside


@pytest.mark.nightly
async def test_lost_quorum_fires_stops_workers_and_loses_nothing(tmp_path: Path) -> None:
    """One of three servers goes: a replica is missing; two: nothing is acked; all are back: all is in the log."""
    with cluster(tmp_path) as nodes:
        chosen = log.logging_to(*nodes, durable_log__durable=True)
        await until_ready(chosen)
        bus = Bus(chosen)
        async with asyncio.timeout(2 * MOST), bus.running():
            await bus.serve(requests=2, tokens=6)
            await until(lambda: not bus.publisher.retention and not log.health(bus.processor).outside)
            await until(lambda: log.told(bus.processor)("log_missing_replicas") == 0)
            calm = log.told(bus.processor)
            nodes[2].kill()
            await until(lambda: firing(calm, log.told(bus.processor)) == {"TokenbusLogMissingReplicas"})
            nodes[1].kill()
            await until(lambda: firing(calm, log.told(bus.processor)) >= OF_A_CLUSTER)
            assert log.health(bus.processor).outside
            await bus.serve(requests=2, tokens=6)
            retained = len(bus.publisher.retention)
            assert retained >= 4
            waiting = Bus(chosen).processor  # takes no request until there is a quorum
            starting = asyncio.create_task(waiting.__aenter__())
            await until(lambda: waiting.item_log and "no quorum" in waiting.item_log.problem)
            assert not log.health(waiting).is_ready
            assert log.told(bus.processor)("log_waiting_items") == retained
            for node in nodes[1:]:
                node.start()
            await starting
            await waiting.__aexit__(None, None, None)
            await until(lambda: not bus.publisher.retention)
            assert log.told(bus.processor)("fill_ratio", of="log_buffer") == 0
            await until(lambda: not OF_A_CLUSTER & firing(calm, log.told(bus.processor)))
            assert log.numbered(await log.read(chosen)) == log.whole(bus.publisher.retention.next_sequence - 1)
