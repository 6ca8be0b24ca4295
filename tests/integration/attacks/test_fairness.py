"""Clients that take without acknowledging, and peers that fill what all share (findings 3, 12 and 13)."""

import asyncio
from contextlib import ExitStack

import httpx
import pytest

from tests.integration.attacks.peers import ClientPeer
from tests.integration.attacks.scene import repeat, scene, variants
from tests.integration.deployment import Deployment, Overrides
from tests.integration.serving import served
from tests.support.waiting import MOST
from tokenbus_contracts.generated.client_pb2 import ServerFrame
from tokenbus_contracts.generated.request_pb2 import ErrorCode

_SLOW = ErrorCode.ERROR_CODE_SLOW_CLIENT
LITTLE_ROOM: Overrides = {"processor__pending_items": 256}
"""What may wait for consumers is full in a second."""


async def test_ten_clients_that_acknowledge_nothing_lose_their_own_requests(deployment: Deployment) -> None:
    """Ten clients that ask on and on lose their own requests as slow clients, while another client gets every token."""
    async with scene(deployment, **LITTLE_ROOM) as at:

        def attack() -> None:
            """Ask from ten sides at once, and look at what was said at the end."""
            with ExitStack() as stack:
                peers = [stack.enter_context(ClientPeer(at.clients, name=f"hoarder-{place}")) for place in range(10)]
                for peer in peers:
                    peer.hello()

                def ask() -> None:
                    for peer in peers:
                        peer.ask(tokens=100_000, top_logprobs=20)
                        peer.beat()

                while not (slow := at.processor.lines('"slow client"')):  # however slow the machine is
                    repeat(ask, 1.0, 0.25)
                evicted = next(peer for place, peer in enumerate(peers) if f'"hoarder-{place}"' in slow[0])
                assert any(frame.error.code == _SLOW for frame, _ in evicted.frames(ServerFrame))

        async with asyncio.timeout(MOST):
            await asyncio.to_thread(attack)
        await at.victim.unharmed()
        slow = at.processor.lines('"slow client"')
    assert [line for line in slow if '"client":"hoarder-' not in line] == []


async def _unread(url: str, count: int, body: bytes) -> list[asyncio.StreamWriter]:
    """Open streams that are not read, each in a connection of its own."""
    address = httpx.URL(url)
    writers = []
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.host}:{address.port}\r\nContent-Type: application/json\r\n"
    for _ in range(count):
        reader, writer = await asyncio.open_connection(address.host, address.port, limit=1024)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        writers.append(writer)
    return writers


@pytest.mark.parametrize("streams", variants(50, long=(20, 200)))
async def test_stream_that_is_not_read_ends_alone(streams: int) -> None:
    """Streams that are not read end, or wait, alone: a client that reads at the same gateway gets every token."""
    body = b'{"model": "tokenbus", "prompt": [1], "max_tokens": 20000, "logprobs": 5, "stream": true}'
    with served() as system:
        system.deployment.start_worker("worker-0", "--steps-per-second", "1000", worker__max_requests=1024)
        writers = await _unread(system.url, streams, body)
        try:
            async with httpx.AsyncClient(base_url=system.url, timeout=60) as reader:
                for _ in range(6):
                    answer = await reader.post(
                        "/v1/completions", json={"model": "tokenbus", "prompt": [1], "max_tokens": 60, "logprobs": 1}
                    )
                    assert answer.status_code == 200, answer.text
                    choice = answer.json()["choices"][0]
                    assert len(choice["logprobs"]["tokens"]) == 60, choice
        finally:
            for writer in writers:
                writer.transport.abort()
