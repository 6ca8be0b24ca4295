"""Serve a gateway over HTTP until told to stop."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import cast

import uvicorn

from tokenbus_services.bus.binding import bind
from tokenbus_services.bus.errors import AddressError
from tokenbus_services.descriptors import room_for
from tokenbus_services.gateway.connection import Connection, bounded
from tokenbus_services.gateway.routes import Routes
from tokenbus_services.gateway.server_log import taken_over
from tokenbus_services.gateway.state import Gateway, gateway_of
from tokenbus_services.logs import logger
from tokenbus_services.metrics import MetricsServer
from tokenbus_services.settings import Settings

_log = logger("gateway")
_SCHEME = "tcp://"
_BACKLOG = 4096
_LARGEST_BUFFER = 2**30
_LAST_SECONDS = 5
"""How long clients may take, after their answers have ended, to read what is left of them."""


class _Server(uvicorn.Server):
    """uvicorn's, which leaves signals to whoever runs it, and says how many are connected."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway) -> None:
        super().__init__(config)
        self._gateway = gateway

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield

    async def on_tick(self, counter: int) -> bool:
        """Look around, ten times a second."""
        self._gateway.connected = len(self.server_state.connections)
        self._gateway.watch.ask()
        self._gateway.feed.look()
        return await super().on_tick(counter)


class Serving:
    """A gateway that is being served."""

    def __init__(self, gateway: Gateway, address: str) -> None:
        """Take the gateway, and where it listens."""
        self.gateway = gateway
        self.address = address

    @property
    def url(self) -> str:
        """Where to ask, without a path."""
        return f"http://{self.address}"


@contextlib.asynccontextmanager
async def serve_gateway(settings: Settings) -> AsyncIterator[Serving]:
    """Connect to the bus and serve HTTP for as long as `async with` lasts; then let open requests end, for a while.

    An AddressError says why an address cannot be used.
    """
    listening, address = await _listen(settings.gateway.address)
    room_for_clients = room_for(settings.gateway.max_connections)
    settings = replace(settings, gateway=replace(settings.gateway, max_connections=room_for_clients))
    # Else the kernel keeps megabytes for who does not read, and nobody here knows of them.
    room = min(settings.gateway.stream_buffer_bytes, _LARGEST_BUFFER)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, room)
    with contextlib.closing(listening), taken_over():
        async with gateway_of(settings) as gateway, _metrics(gateway):
            config = uvicorn.Config(
                Routes(gateway).app(),
                http=bounded(settings.gateway, gateway.counts),
                ws="none",
                lifespan="off",
                loop="none",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=_BACKLOG,
                timeout_keep_alive=max(1, settings.gateway.idle_timeout_ms // 1000),
                timeout_graceful_shutdown=_LAST_SECONDS,
            )
            server = _Server(config, gateway)
            running = asyncio.create_task(server.serve([listening]))
            _log.info("listening", address=f"http://{address}", tokenizer=settings.gateway.tokenizer)
            try:
                yield Serving(gateway, address)
            finally:
                await _drain(gateway, server, settings.gateway.drain_timeout_ms / 1000)
                server.should_exit = True
                await running
    _log.info("gateway stopped")


async def _drain(gateway: Gateway, server: _Server, seconds: float) -> None:
    """Take nothing more, and wait for what is open; what takes too long ends with an error that says so.

    Who does not read that either, or has sent half a request, is cut off.
    """
    gateway.feed.is_draining = True
    await _come_true(lambda: not gateway.counts.open_answers, seconds)
    gateway.feed.give_up()
    connections = cast("set[Connection]", server.server_state.connections)
    await _come_true(lambda: not any(each.is_answering for each in connections), _LAST_SECONDS)
    for connection in [each for each in connections if each.is_answering]:
        gateway.counts.cut_clients += 1
        connection.cut_off()


async def _come_true(condition: Callable[[], bool], seconds: float) -> None:
    """Wait until something holds, for so long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110 - answers end in many ways, and this happens once
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def _metrics(gateway: Gateway) -> AsyncIterator[None]:
    server = MetricsServer(
        "gateway.metrics_address",
        gateway.settings.gateway.metrics_address,
        gateway.collector,
        gateway.health,
        gateway.watch,
    )
    await asyncio.to_thread(server.start)
    try:
        yield
    finally:
        await asyncio.to_thread(server.stop)


async def _listen(address: str) -> tuple[socket.socket, str]:
    try:
        binding = await bind(_SCHEME + address)
    except AddressError as error:
        raise AddressError(f"gateway.address: {address}", error.reason.replace(_SCHEME, "")) from None
    listening = socket.socket(fileno=binding.descriptor)
    binding.hand_over()
    return listening, binding.address.removeprefix(_SCHEME)
