"""Serves a gateway over HTTP with uvicorn, and drains it at the end."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import uvicorn

from tokenbus.bus.addresses import TcpEndpoint
from tokenbus.gateway.acceptor import Acceptor
from tokenbus.gateway.connection import Connection
from tokenbus.gateway.gateway import Gateway, gateway_of
from tokenbus.gateway.metrics import gateway_collector
from tokenbus.gateway.routes import Routes
from tokenbus.logs import DeduplicatedLog, logger
from tokenbus.metrics.server import MetricsServer, listen
from tokenbus.open_files import room_for
from tokenbus.settings import GatewaySettings, Settings, SettingsError

_log = logger("gateway")
_LARGEST_BUFFER = 2**30
_KERNEL_SHARE = 8
"""Ratio of gateway.stream_buffer_bytes to the requested size of a socket's send buffer, which the kernel doubles."""
LAST_SECONDS = 5
"""Number of seconds at shutdown for clients to read the ends of their answers."""


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, and with `Acceptor` in place of asyncio's server."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway, listening: socket.socket) -> None:
        super().__init__(config)
        self._gateway = gateway
        make = partial(Connection, gateway, config, self.server_state, {})
        self.acceptor = Acceptor(listening, make, self.server_state.connections, gateway)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002 - uvicorn's
        self.acceptor.start()
        self.servers = []
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.acceptor.stop()
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Do the gateway's periodic work. uvicorn calls this ten times a second."""
        try:
            self._gateway.tick()
            self._gateway.connections = len(self.acceptor)
        except Exception:  # noqa: BLE001 - uvicorn would go on to serve without further ticks
            self._gateway.repeated_log.begin("tick", _log.exception, "tick failed")
        return await super().on_tick(counter)


@dataclass(frozen=True, slots=True)
class Serving:
    """A running gateway and the address at which it listens."""

    gateway: Gateway
    address: str

    @property
    def url(self) -> str:
        return f"http{'s' if self.gateway.certificate else ''}://{self.address}"


@contextlib.asynccontextmanager
async def serve_gateway(settings: Settings) -> AsyncIterator[Serving]:
    """Connect to the bus and serve HTTP during the `async with` block. Then drain for gateway.drain_timeout_ms.

    The listening socket closes first, so that the kernel gives new connections to other gateways at the port. Raises an
    AddressError if an address cannot be used, and a SettingsError for unsafe settings.
    """
    listening, address = await _listen(settings.gateway)
    room_for_clients = room_for(settings.gateway.most_connections)
    settings = replace(settings, gateway=replace(settings.gateway, max_connections=room_for_clients))
    with contextlib.closing(listening):
        async with gateway_of(settings) as gateway, _observed(gateway):
            config = uvicorn.Config(
                Routes(gateway).app(),
                http=Connection,
                ws="none",
                lifespan="off",
                loop="none",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=max(1, settings.gateway.idle_timeout_ms // 1000),
                timeout_graceful_shutdown=LAST_SECONDS,
            )
            server = _Server(config, gateway, listening)
            serving = Serving(gateway, address)
            gateway.serving = running = asyncio.create_task(server.serve())
            while not server.started and not running.done():  # noqa: ASYNC110 - uvicorn offers no event
                await asyncio.sleep(0)
            _log.info("listening", address=serving.url, tokenizer=settings.gateway.tokenizer)
            try:
                yield serving
            finally:
                gateway.serving = None
                server.acceptor.stop_listening()
                await _drain(gateway, server, settings.gateway.drain_timeout_ms / 1000)
                server.should_exit = True
                await running
    _log.info("gateway stopped")


async def _listen(settings: GatewaySettings) -> tuple[socket.socket, str]:
    _check_exposure(settings)
    if settings.reuse_port and not hasattr(socket, "SO_REUSEPORT"):
        raise SettingsError("gateway.reuse_port", "false if the system has no SO_REUSEPORT", actual=True)
    listening, address = await listen("gateway.address", settings.address, reuse_port=settings.reuse_port)
    # Limit the kernel's send buffer. By default, the kernel buffers megabytes that the gateway does not count.
    room = min(settings.stream_buffer_bytes // _KERNEL_SHARE, _LARGEST_BUFFER)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, room)
    return listening, address


async def _drain(gateway: Gateway, server: _Server, seconds: float) -> None:
    """Refuse new requests and wait for open requests. After `seconds`, end the open requests with the error `stopping`.

    Clients that have sent only a part of a request, or that do not read the error, are cut off.
    """
    gateway.dispatcher.is_draining = True
    await _wait_until(lambda: not gateway.counts.open_answers, seconds)
    gateway.dispatcher.give_up()
    connections = cast("set[Connection]", server.server_state.connections)
    await _wait_until(lambda: not any(each.is_answering for each in connections), LAST_SECONDS)
    for connection in [each for each in connections if each.is_answering]:
        gateway.counts.cut_clients += 1
        connection.cut_off()


async def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110 - answers end in many ways, and this happens once
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def _observed(gateway: Gateway) -> AsyncIterator[None]:
    address, collector = gateway.settings.gateway.metrics_address, gateway_collector(gateway)
    server = MetricsServer("gateway.metrics_address", address, collector, gateway.health, gateway.watch)
    with uvicorn_log(gateway.repeated_log):
        async with server.running():
            yield


def _check_exposure(settings: GatewaySettings) -> None:
    if TcpEndpoint(settings.address.rpartition(":")[0].strip("[]"), 0).is_loopback:
        return
    if not (settings.keys_file or settings.insecure):
        limit = "a loopback address, or gateway.keys_file for the keys that clients need, or gateway.insecure = true"
        raise SettingsError("gateway.address", limit, settings.address)
    if settings.keys_file and not settings.tls_certificate:
        _log.warning("API keys come over plain HTTP", address=settings.address)


class _Handler(logging.Handler):
    """Passes uvicorn's warnings and errors to the gateway's log, and deduplicates them."""

    def __init__(self, repeated_log: DeduplicatedLog) -> None:
        super().__init__(logging.WARNING)
        self._repeated_log = repeated_log

    def emit(self, record: logging.LogRecord) -> None:
        say = _log.error if record.levelno >= logging.ERROR else _log.warning
        self._repeated_log.begin(record.msg, say, "http server", message=record.getMessage(), exc_info=record.exc_info)


@contextlib.contextmanager
def uvicorn_log(repeated_log: DeduplicatedLog) -> Iterator[None]:
    source, handler = logging.getLogger("uvicorn.error"), _Handler(repeated_log)
    before, source.propagate = source.propagate, False
    source.addHandler(handler)
    try:
        yield
    finally:
        source.removeHandler(handler)
        source.propagate = before
