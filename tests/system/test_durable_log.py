"""The durable log over a whole system: real processes and servers, which are killed while tokens come."""

import http.client
import re
from contextlib import closing
from http import HTTPStatus

from tests.support.ports import free_ports
from tests.system.deployment import Deployment


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
