"""What uvicorn says comes out in the gateway's own form."""

import io
import json
import logging
from contextlib import closing

from tokenbus.gateway.server import uvicorn_log
from tokenbus.logs import DeduplicatedLog
from tokenbus.logs.output import configure, unconfigure
from tokenbus.settings import LogSettings


def test_lines_of_the_http_server_are_lines_of_ours() -> None:
    stream = io.StringIO()
    configure(LogSettings(format="json"), stream)
    try:
        with closing(DeduplicatedLog()) as repeated_log, uvicorn_log(repeated_log):
            said = logging.getLogger("uvicorn.error")
            for _ in range(3):
                said.error("Exception in ASGI application\n", exc_info=ValueError("oh"))
            said.info("nothing of interest")
    finally:
        unconfigure()
    first, last = map(json.loads, stream.getvalue().splitlines())
    assert (first["level"], first["logger"], first["event"]) == ("error", "gateway", "http server")
    assert first["message"].startswith("Exception in ASGI application")
    assert "ValueError: oh" in first["exception"]
    assert last["count"] == 3
