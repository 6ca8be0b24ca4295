"""Processors that start before the servers of their durable log."""

import http.client
import json
import re
from collections.abc import Iterator
from contextlib import closing
from http import HTTPStatus

import pytest

from tests.recordings.durable_log.using import read
from tests.support.nats import NatsServer
from tests.support.waiting import until
from tests.system.asking import all_exact, ask
from tests.system.deployment import Deployment
from tests.system.programs import Program
from tests.system.test_durable_log import check_order, tokens_of
from tokenbus.client import Client


@pytest.fixture
def server(deployment: Deployment) -> Iterator[NatsServer]:
    """Return a server that is not there yet, and keeps its port."""
    made = NatsServer(deployment.folder, f"jetstream {{ store_dir: '{deployment.folder}/js' }}\n")
    made.kill()
    yield made
    made.kill()


def asked_for(program: Program, path: str) -> tuple[int, dict[str, object]]:
    """Return a page of a processor's health: its status, and what it says."""
    found = re.search(r"http://(127\.0\.0\.1:\d+)", program.wait_for('"serving metrics"'))
    assert found is not None
    with closing(http.client.HTTPConnection(found[1])) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


async def test_processor_that_starts_before_its_log_carries_tokens(deployment: Deployment, server: NatsServer) -> None:
    """Without `durable` a processor serves and says that it does not log; once the server is there it logs all."""
    deployment.overrides |= {
        "durable_log.address": f"nats://{server.server}",
        "processor.metrics_address": "127.0.0.1:0",
    }
    processor = deployment.start_processor()
    deployment.start_worker()
    async with Client(deployment.settings()) as client:
        asked = ask(client, 4, 100)
        await all_exact(asked, 100)
        processor.wait_for('"not written to the log yet"')
        status, said = asked_for(processor, "/healthz")
        assert (status, said["status"]) == (HTTPStatus.OK, "degraded")
        assert "the durable log is not written" in str(said["problems"])
        assert asked_for(processor, "/readyz")[0] == HTTPStatus.OK
        server.start()
        processor.wait_for('"writing"')
        asked += ask(client, 1, 100)
        await all_exact(asked, 100)
    wanted = {each.tokens.request_id: 100 for each in asked}
    settings = deployment.settings()

    async def has_all() -> bool:
        return wanted.items() <= tokens_of(await read(settings)).items()

    await until(has_all, every=0.1)
    check_order(await read(settings))
    assert asked_for(processor, "/healthz")[1]["status"] == "ok"


def test_durable_processor_waits_for_its_log_and_leaves_when_it_is_asked(
    deployment: Deployment, server: NatsServer
) -> None:
    """With `durable` a processor does not listen, is not ready and not failing, and a signal ends its wait."""
    deployment.overrides |= {
        "durable_log.address": f"nats://{server.server}",
        "durable_log.durable": True,
        "durable_log.replicas": 3,
        "processor.metrics_address": "127.0.0.1:0",
    }
    processor = deployment.start_processor(is_awaited=False)
    processor.wait_for('"not written to the log yet"')
    assert asked_for(processor, "/readyz")[0] == HTTPStatus.SERVICE_UNAVAILABLE
    assert asked_for(processor, "/healthz")[0] == HTTPStatus.OK
    assert not processor.lines('"listening"')
    assert processor.terminate() == 0
    assert "Traceback" not in processor.output
