"""What the gateway knows of workers, and whether requests would find one."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.services.builders import settings
from tokenbus_services.gateway.processor_metrics import ProcessorMetrics, UnknownBusError
from tokenbus_services.gateway.state import _take_requests

PAGE = b"""\
# TYPE tokenbus_worker_assigned_requests gauge
tokenbus_worker_assigned_requests{worker="w",role="mixed",model="m",epoch="1",state="connected"} 3.0
"""


@pytest.mark.parametrize(
    ("workers", "models", "is_ready"),
    [
        ([], ("tokenbus",), False),
        ([("mixed", "m", True)], ("tokenbus",), True),
        ([("mixed", "m", False)], ("tokenbus",), False),
        ([("mixed", "m", True)], ("other",), False),
        ([("mixed", "m", True)], ("other", "m"), True),
        ([("decode", "m", True)], ("tokenbus",), False),
        ([("prefill", "m", True)], ("tokenbus",), False),
        ([("prefill", "m", True), ("decode", "m", False)], ("tokenbus",), False),
        ([("prefill", "m", True), ("decode", "n", True)], ("tokenbus",), False),
        ([("prefill", "m", True), ("decode", "m", True)], ("tokenbus",), True),
    ],
)
def test_it_is_ready_when_a_request_would_come_to_its_end(
    workers: list[tuple[str, str, bool]],
    models: tuple[str, ...],
    is_ready: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    """It takes a connected worker of a model that is offered, and beside one for prompts one that goes on."""
    told = [{"role": role, "model": model, "connected": connected} for role, model, connected in workers]
    assert _take_requests(told, models) is is_ready


class _Page(BaseHTTPRequestHandler):
    """Serves the metrics of a processor with one worker."""

    def do_GET(self) -> None:
        """Answer; at the address nonsense no HTTP at all."""
        if isinstance(self.server, _Nonsense):
            self.wfile.write(b"nonsense\r\n\r\n")
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(PAGE)

    def log_message(self, *_arguments: object) -> None:
        """Say nothing."""


class _Nonsense(HTTPServer):
    """Something that speaks no HTTP."""


@contextmanager
def _metrics_at(kind: type[HTTPServer]) -> Iterator[ProcessorMetrics]:
    with kind(("127.0.0.1", 0), _Page) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield ProcessorMetrics(settings({"metrics.address": f"127.0.0.1:{server.server_port}"}))
        finally:
            server.shutdown()
            thread.join()


async def test_processor_is_asked_past_any_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that the environment names for the world outside does not stand between gateway and processor."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with _metrics_at(HTTPServer) as metrics:
        (worker,) = (await metrics.bus())["workers"]
    assert (worker["id"], worker["open_requests"]) == ("w", 3)


async def test_what_is_no_processor_is_told() -> None:
    """An address where something else listens makes the bus unknown, with the reason, and is no defect."""
    with _metrics_at(_Nonsense) as metrics, pytest.raises(UnknownBusError, match="nonsense"):
        await metrics.bus()
