"""A gateway in the test's own process, and clients that speak to it byte by byte."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.support.waiting import soon
from tests.system.deployment import Deployment
from tests.system.inprocess import met, processing, working
from tokenbus.engines.synthetic import SyntheticEngine
from tokenbus.gateway.server import Serving, serve_gateway
from tokenbus.worker import Engine

GATEWAY = {"gateway__address": "127.0.0.1:0", "gateway__tokenizer": "numbers", "gateway__drain_timeout_ms": 0}
LONG = 1_000_000


@asynccontextmanager
async def serving(
    deployment: Deployment, engine: Engine | None = None, /, **overrides: object
) -> AsyncIterator[Serving]:
    async with (
        processing(deployment, **overrides) as (processor, addresses),
        working(deployment, engine or SyntheticEngine(), **addresses, **overrides),
        serve_gateway(deployment.settings(**addresses, **GATEWAY | overrides, client__drain_timeout_ms=0)) as served,
    ):
        await met(processor)
        yield served


@asynccontextmanager
async def alone(deployment: Deployment, **overrides: object) -> AsyncIterator[Serving]:
    async with serve_gateway(deployment.settings(**GATEWAY | overrides, client__drain_timeout_ms=0)) as served:
        yield served


async def connected(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.rpartition("/")[2].rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def sent(served: Serving, *pieces: bytes) -> bytes:
    reader, writer = await connected(served.address)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        return await soon(reader.read())
    finally:
        writer.close()


def asked(**fields: object) -> bytes:
    body = json.dumps({"model": "tokenbus", "prompt": "a", **fields}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def not_reading(address: str, room: int = 4096, wanted: bytes = b"", ending: bytes = b"") -> socket.socket:
    host, _, port = address.rpartition("/")[2].rpartition(":")
    stalled = socket.socket()
    stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
    stalled.connect((host, int(port)))
    wanted = wanted or asked(max_tokens=LONG, logprobs=20, stream=True)
    stalled.sendall(wanted.replace(b"Host: localhost\r\n", b"Host: localhost\r\n" + ending))
    return stalled
