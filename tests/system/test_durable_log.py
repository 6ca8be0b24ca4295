"""The durable log over a whole system: real processes and servers, which are killed while tokens come."""

import http.client
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from http import HTTPStatus

import pytest

from tests.recordings.durable_log.using import read
from tests.support.nats import NatsServer
from tests.support.nats_cluster import cluster, until_ready
from tests.support.ports import free_ports
from tests.support.waiting import until
from tests.system.asking import all_exact, ask, begun
from tests.system.deployment import Deployment
from tokenbus.client import Client
from tokenbus.recordings.items import StreamItem


@pytest.fixture
def nodes(deployment: Deployment) -> Iterator[list[NatsServer]]:
    """Return the three servers of a cluster, in which the deployment's processor keeps a durable log."""
    with ExitStack() as stack:
        made = stack.enter_context(cluster(deployment.folder))
        deployment.overrides |= {
            "durable_log.address": f"nats://{','.join(node.server for node in made)}",
            "durable_log.durable": True,
            "durable_log.replicas": 3,
        }
        yield made


def check_order(items: list[StreamItem]) -> None:
    """Fail unless each stream's items follow each other, each once, and all that is missing is named."""
    expected: Counter[tuple[str, int]] = Counter()
    for item in items:
        stream = item.worker_id, item.epoch
        expected[stream] += 1 + item.missing_items
        assert item.sequence == expected[stream]


def tokens_of(items: list[StreamItem]) -> Counter[int]:
    tokens: Counter[int] = Counter()
    for item in items:
        for row in item.batch.rows() if item.batch is not None else ():
            tokens[row.key] += row.token_ids.size
    return tokens


@pytest.mark.nightly
async def test_durable_log_misses_nothing_whatever_is_killed(deployment: Deployment, nodes: list[NatsServer]) -> None:
    await until_ready(deployment.settings())
    processor = deployment.start_processor()
    deployment.start_worker()
    async with Client(deployment.settings()) as client:
        asked = ask(client, 8, 1500)
        await begun(asked)
        nodes[0].kill()
        await begun(ask(client, 1, 300))
        processor.kill()
        deployment.start_processor()
        nodes[0].start()
        await all_exact(asked, 1500)
        wanted = {each.tokens.request_id: 1500 for each in asked}
    settings = deployment.settings()

    async def has_all() -> bool:
        return wanted.items() <= tokens_of(await read(settings)).items()

    await until(has_all, every=0.2)
    items = await read(settings)
    check_order(items)
    assert sum(item.missing_items for item in items) == 0


def test_durable_processor_waits_for_its_log_and_leaves_when_it_is_asked(deployment: Deployment) -> None:
    """With `durable` a processor does not listen, is not ready and not failing, and a signal ends its wait."""
    deployment.overrides |= {
        "durable_log.address": f"nats://127.0.0.1:{free_ports(1)[0]}",
        "durable_log.durable": True,
        "durable_log.replicas": 3,
        "processor.metrics_address": "127.0.0.1:0",
    }
    processor = deployment.start_processor(is_awaited=False)
    processor.wait_for('"not written to the log yet"')
    found = re.search(r"http://(127\.0\.0\.1:\d+)", processor.wait_for('"serving metrics"'))
    assert found is not None
    for path, status in (("/readyz", HTTPStatus.SERVICE_UNAVAILABLE), ("/healthz", HTTPStatus.OK)):
        with closing(http.client.HTTPConnection(found[1])) as connection:
            connection.request("GET", path)
            assert connection.getresponse().status == status
    assert not processor.lines('"listening"')
    assert processor.terminate() == 0
    assert "Traceback" not in processor.output
