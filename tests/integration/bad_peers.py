"""What unknown peers send to a worker's or a client's address."""

import asyncio
import random
from collections.abc import Iterable
from contextlib import suppress
from typing import Self
from urllib.parse import urlsplit

from tests.support.waiting import soon
from tokenbus_contracts.frames import write_frame
from tokenbus_contracts.generated.client_pb2 import ClientFrame, ClientHello
from tokenbus_contracts.generated.stream_pb2 import Hello, Item, PayloadKind, StreamLimits, WorkerFrame, WorkerRole
from tokenbus_services.bus import Connection, ZeroMQTransport
from tokenbus_services.settings import BusSettings

EPOCH = 7
RANDOM = random.Random(11).randbytes(4096)  # noqa: S311 - noise, the same each time
HTTP = b"GET / HTTP/1.1\r\nHost: tokenbus\r\nAccept: */*\r\n\r\n"
HALF_GREETING = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03"  # ZMTP's signature, and then nothing


async def say_over_tcp(address: str, data: bytes) -> None:
    """Connect to an address, say something that is not this protocol, and wait to be cut off."""
    url = urlsplit(address)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    try:
        with suppress(ConnectionError):
            writer.write(data)
            await writer.drain()
            await soon(reader.read())
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


class Stranger:
    """A ZeroMQ peer that sends any messages, and keeps the answers."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._connection: Connection | None = None

    async def __aenter__(self) -> Self:
        self._connection = await ZeroMQTransport(BusSettings(linger_ms=0)).connect(self._address)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._connection is not None:
            await self._connection.close()

    def say(self, messages: Iterable[list[bytes]]) -> None:
        """Send some messages."""
        for parts in messages:
            assert self._connection is not None
            assert self._connection.send(parts)

    async def heard(self) -> bytes:
        """Return the first part of the next message that it is sent."""
        assert self._connection is not None
        return (await soon(self._connection.receive()))[0]


def worker_hello(worker_id: str = "stranger", epoch: int = EPOCH, major: int = 1) -> list[bytes]:
    """Return a worker's first message."""
    limits = StreamLimits(max_message_bytes=65536, max_rows=8, max_tokens_per_row=4)
    hello = Hello(
        schema_major=1,
        worker_id=worker_id,
        role=WorkerRole.WORKER_ROLE_MIXED,
        limits=limits,
        first_sequence=1,
        next_sequence=1,
    )
    frame = WorkerFrame(epoch=epoch, hello=hello)
    write_frame(frame)
    hello.schema_major = major
    return [WorkerFrame(epoch=epoch, hello=hello).SerializeToString()]


def client_hello(major: int = 1) -> list[bytes]:
    """Return a client's first message."""
    hello = ClientHello(schema_major=major, name="stranger", window_frames=8, window_bytes=65536, session=EPOCH)
    return [ClientFrame(hello=hello).SerializeToString()]


def item(sequence: int, payload: bytes = b"x") -> list[bytes]:
    """Return an item with some payload."""
    body = Item(
        sequence=sequence,
        payload_kind=PayloadKind.PAYLOAD_KIND_LOGPROB_BATCH,
        payload_bytes=len(payload),
    )
    return [write_frame(WorkerFrame(epoch=EPOCH, item=body)), payload]
