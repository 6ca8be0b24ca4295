"""The HTTP server below the gateway: its versions, and how its log lines come out."""

import io
import json
import logging
import tomllib
from contextlib import closing
from pathlib import Path

import uvicorn
from packaging.requirements import Requirement

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


def test_uvicorn_is_pinned_to_versions_that_were_tested() -> None:
    """The gateway's connections override uvicorn's protocol class, which is private API."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    gateway = map(Requirement, project["optional-dependencies"]["gateway"])
    (uvicorns,) = (each for each in gateway if each.name == "uvicorn")
    assert any(each.operator == "<" for each in uvicorns.specifier)
    assert uvicorns.specifier.contains(uvicorn.__version__)
