"""What the gateway's connections and server take from uvicorn, whose protocol class is private API."""

import inspect
import tomllib
from pathlib import Path

import pytest
import uvicorn
from packaging.requirements import Requirement
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from tokenbus.gateway.connection import Connection

OVERRIDDEN = {
    "_should_upgrade",
    "_start_asgi_task",
    "connection_lost",
    "connection_made",
    "data_received",
    "on_body",
    "on_header",
    "on_headers_complete",
    "on_message_begin",
    "on_message_complete",
    "on_response_complete",
    "on_url",
    "timeout_keep_alive_handler",
}
CALLED = {"_get_upgrade", "_unset_keepalive_if_required"}
ATTRIBUTES = {
    "connections", "cycle", "flow", "headers", "loop", "parser", "pipeline", "scope", "transport", "url"
}  # fmt: skip
CYCLE = {"chunked_encoding", "disconnected", "message_event", "response_complete", "response_started", "scope"}


def test_uvicorn_is_pinned_to_versions_that_were_tested() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    gateway = map(Requirement, project["optional-dependencies"]["gateway"])
    (uvicorns,) = (each for each in gateway if each.name == "uvicorn")
    assert any(each.operator == "<" for each in uvicorns.specifier)
    assert uvicorns.specifier.contains(uvicorn.__version__)


@pytest.mark.parametrize("name", sorted(OVERRIDDEN))
def test_overridden_methods_are_those_of_uvicorn(name: str) -> None:
    ours, theirs = (list(inspect.signature(getattr(kind, name)).parameters) for kind in (Connection, HttpToolsProtocol))
    assert ours == theirs


async def test_attributes_that_are_used_exist() -> None:
    protocol = HttpToolsProtocol(uvicorn.Config(Starlette(), lifespan="off"), ServerState(), {})
    protocol.on_message_begin()
    assert {*dir(protocol)} >= CALLED | ATTRIBUTES
    source = inspect.getsource(RequestResponseCycle.__init__)
    assert {name for name in CYCLE if f"self.{name}" not in source} == set()


@pytest.mark.parametrize("name", ["capture_signals", "on_tick", "serve", "startup"])
def test_methods_of_the_server_exist(name: str) -> None:
    assert callable(getattr(uvicorn.Server, name))
