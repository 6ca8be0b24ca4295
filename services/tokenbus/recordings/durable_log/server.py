"""ServerConnection: a connection to one NATS server. Servers: the list of servers, which are tried in turn.

nats-py's own reconnect is off, because it would publish pending messages before the writer has read the log's end.
"""

import asyncio
import contextlib
import os
import random
import re
import ssl
from collections import deque
from collections.abc import Coroutine
from functools import partial
from math import inf
from typing import Any, NamedTuple, TypeVar
from urllib.parse import ParseResult

import nats.errors
from nats.aio.client import Client
from nats.aio.transport import TcpTransport
from nats.js import JetStreamContext
from nats.protocol.parser import PERMISSIONS_ERR

from tokenbus.bus import AddressError
from tokenbus.bus.addresses import TcpEndpoint, parse_remote
from tokenbus.logs import DeduplicatedLog, logger
from tokenbus.recordings.durable_log.login import Login
from tokenbus.settings import BusSettings, Settings

_ADDRESS = re.compile(r"(?P<scheme>nats|tls)://(?P<servers>[^/]+)/(?P<name>[A-Za-z0-9][A-Za-z0-9_-]{0,63})")
_MOST_SERVERS = 16
_CLOSE_SECONDS = 0.2
"""Time limit for closing a connection without a flush."""
_CANCEL_SECONDS = 0.1
T = TypeVar("T")
ASK_SECONDS = 2.0
"""Timeout of a JetStream request, which gets no answer while its stream has no leader."""
_log = logger("log")


class LogAddress(NamedTuple):
    """The servers of a cluster, and the name of a log."""

    servers: tuple[TcpEndpoint, ...]
    name: str
    is_tls: bool


def parse(address: str, settings: Settings) -> LogAddress:
    """Parse the address of a log; raises AddressError if the address is invalid or insecure."""
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise AddressError(address, "expected nats://HOST:PORT/NAME or tls://..., NAME of letters, digits, _ and -")
    listed = match["servers"].split(",")
    if len(listed) > _MOST_SERVERS:
        raise AddressError(address, f"at most {_MOST_SERVERS} servers, got {len(listed)}")
    try:
        endpoints = [parse_remote(f"tcp://{each}") for each in listed]
    except AddressError:
        raise AddressError(address, "each server needs a host and a port") from None
    servers = tuple(each for each in endpoints if isinstance(each, TcpEndpoint))
    is_tls = match["scheme"] == "tls"
    is_near = all(server.is_loopback for server in servers)
    is_safe = is_tls and (settings.durable_log.credentials or settings.durable_log.certificate)
    if not (is_near or is_safe or settings.bus.insecure):
        reason = (
            "beyond loopback it needs tls:// and durable_log.credentials or durable_log.certificate, "
            "unless bus.insecure is true"
        )
        raise AddressError(address, reason)
    return LogAddress(servers, match["name"], is_tls)


class ServerError(Exception):
    """A server cannot be used, for the reason in the message."""


FAILURES = (nats.errors.Error, OSError, asyncio.TimeoutError, ServerError)
"""Errors after which a reader or writer reconnects."""


class Servers:
    """The servers of a log; a failed server moves to the end of the list."""

    def __init__(self, address: LogAddress, settings: Settings) -> None:
        """Read the credentials, which each connection attempt reloads if they have changed; raises SettingsError."""
        self.reason = "no server has been tried yet"
        """Reason of the last failed attempt or lost connection."""
        self._login = Login(settings.durable_log, is_tls=address.is_tls)
        self._settings = settings.bus
        self._order = deque(random.sample(address.servers, len(address.servers)))
        """Servers in the order in which they are tried."""
        self._repeated_log = DeduplicatedLog()
        self._connections_log = DeduplicatedLog()
        """Deduplicates errors of open connections, because the next connection may report the same error."""
        self._last: ServerConnection | None = None
        self._last_began = -inf
        self._seconds = 0.0

    async def connect(self) -> "ServerConnection":
        """Connect to the first usable server.

        Waits until a server is usable, and also waits if the previous connection was lost soon after it began.
        """
        loop = asyncio.get_running_loop()
        self._connections_log.expire()
        if self._last is not None:
            self.reason = self._last.reason or self.reason
            self._order.rotate(-1)
        if loop.time() - self._last_began < self._settings.reconnect_max_ms / 1000:
            await self._pause()
        else:
            self._seconds = self._settings.reconnect_ms / 1000
        while True:
            connection = ServerConnection(self._settings, self._connections_log)
            self._login.refresh()
            try:
                await connection.open(self._order[0], self._login)
            except ServerError as error:
                self._order.rotate(-1)
                self.reason = str(error)
                self._repeated_log.begin(self.reason, _log.warning, "no nats server yet", reason=self.reason)
            else:
                self._repeated_log.close()
                self._last, self._last_began = connection, loop.time()
                return connection
            await self._pause()

    async def _pause(self) -> None:
        await asyncio.sleep(self._seconds)
        self._seconds = min(2 * self._seconds, self._settings.reconnect_max_ms / 1000)


class _Client(Client):
    """A client of nats-py with fixes for errors that would end or delay the connection."""

    async def _process_headers(self, headers: bytes | None) -> dict[str, str] | None:
        try:
            return await super()._process_headers(headers)
        except Exception:  # noqa: BLE001 - another client's broken headers must not end this connection
            return {}

    async def _close(self, status: int, do_cbs: bool = True) -> None:  # noqa: FBT001, FBT002 - as nats-py has it
        with contextlib.suppress(OSError):  # a failed last flush would end a task of nats-py
            await super()._close(status, do_cbs)

    async def _process_op_err(self, e: Exception) -> None:
        """Report the error before closing, because closing may block on a server that does not read."""
        await self._error_cb(e)
        await super()._process_op_err(e)

    async def _process_err(self, err_msg: str) -> None:
        """Report the error at once, because nats-py reports it only after closing."""
        await super()._process_err(err_msg)
        if PERMISSIONS_ERR not in err_msg and not self.is_connecting and self._err is not None:
            await self._error_cb(self._err)


class _Transport(TcpTransport):
    """A transport of nats-py that can be aborted."""

    def __bool__(self) -> bool:
        return True  # nats-py would replace a falsy transport before connecting

    async def connect_tls(
        self, uri: str | ParseResult, ssl_context: ssl.SSLContext, buffer_size: int, connect_timeout: int
    ) -> None:
        await super().connect_tls(uri, ssl_context, buffer_size, connect_timeout)
        if self._io_writer is not None:  # this prevents a warning of asyncio at the end of each connection
            self._io_writer.transport.get_protocol()._over_ssl = True  # type: ignore[attr-defined]  # noqa: SLF001

    def abort(self) -> None:
        if self._io_writer is not None:
            with contextlib.suppress(
                AttributeError
            ):  # Python before 3.11.3 raises AttributeError for an ended TLS connection
                self._io_writer.transport.abort()


class ServerConnection:
    """A connection to one server, from its handshake to its end."""

    def __init__(self, settings: BusSettings, repeated_log: DeduplicatedLog) -> None:
        self.lost = asyncio.Event()
        self.reason = ""
        self.client: Client = _Client()
        self._denied = ""
        """Last error about a missing permission."""
        self._transport = _Transport()  # type: ignore[no-untyped-call]
        self.client._transport = self._transport  # noqa: SLF001 - nats-py has no option for it
        self._settings = settings
        self._is_open = self._is_closed = False
        self._repeated_log = repeated_log

    @property
    def jetstream(self) -> JetStreamContext:
        """The JetStream API, whose calls must be awaited through `ask`."""
        return self.client.jetstream(timeout=ASK_SECONDS)

    async def ask(self, asking: Coroutine[None, None, T]) -> T:
        """Await an answer of the server; raises ServerError if the connection is lost."""
        asked, lost = asyncio.ensure_future(asking), asyncio.ensure_future(self.lost.wait())
        try:
            await asyncio.wait({asked, lost}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise ServerError("the connection to the nats server was lost")
            return asked.result()
        finally:
            asked.add_done_callback(_drop)
            asked.cancel()
            lost.cancel()

    async def open(self, server: TcpEndpoint, login: Login) -> None:
        """Connect to a server; raises ServerError if the server cannot be used."""
        interval, timeout = self._settings.heartbeat_interval_ms / 1000, self._settings.heartbeat_timeout_ms / 1000
        options = dict(login.options)
        for secret in {"password", "token"} & options.keys():
            options[secret] = partial(self._if_private, options[secret], is_tls=login.is_tls)
        self.client._public_nkey = login.public_nkey  # noqa: SLF001 - nats-py needs another package to derive it
        try:
            await self.client.connect(
                f"nats://{str(server).removeprefix('tcp://')}",
                error_cb=self._failed,
                closed_cb=self._closed,
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                connect_timeout=max(1, int(timeout)),
                # At least two pings may be unanswered, because a suspended process reads the answers only later.
                ping_interval=interval,  # type: ignore[arg-type]  # used only for a sleep
                max_outstanding_pings=max(2, int(timeout / interval)),
                name="tokenbus",
                **options,
            )
            self._if_private("", is_tls=login.is_tls)
        except Exception as error:  # noqa: BLE001 - nats-py raises any error if it cannot parse the answer
            is_vague = isinstance(error, nats.errors.NoServersError)
            reason = self.reason if is_vague else _reason(error)
            if not isinstance(error, FAILURES):
                reason = f"not a NATS server: {reason}"
            await self.close()
            raise ServerError(f"{str(server).removeprefix('tcp://')}: {reason}") from None
        except BaseException:
            await self.close()
            raise
        self.lost.clear()
        self._is_open = True

    def _if_private(self, secret: str, *, is_tls: bool) -> str:
        """Return a secret; raises ServerError if nats-py would send it unencrypted to a tls:// address."""
        if is_tls and not self.client._server_info.get("tls_required"):  # noqa: SLF001 - no public attribute
            raise ServerError("it offers no TLS, which a tls:// address needs")
        return secret

    async def close(self) -> None:
        """Close the connection without a flush."""
        if self._is_closed:
            return
        self._is_closed = True
        self.lost.set()
        closing = asyncio.create_task(self.client.close())
        try:
            await asyncio.wait({closing}, timeout=_CLOSE_SECONDS)
        finally:
            self._transport.abort()  # nats-py itself would wait forever for a server that does not read
            await end_tasks(closing)

    def _lose(self, reason: str) -> None:
        if not self.lost.is_set():
            self.reason = reason = self._server_reason() or reason
            self.lost.set()
            if self._is_open:
                self._repeated_log.begin(reason, _log.warning, "nats server lost", reason=reason)

    def _server_reason(self) -> str:
        """Return the reason that the server gave for closing the connection, or an empty text if it gave none."""
        error = self.client.last_error
        is_ours = isinstance(error, (nats.errors.UnexpectedEOF, nats.errors.StaleConnectionError))
        reason = "" if error is None or is_ours else _reason(error)
        return "" if reason == self._denied else reason

    async def _failed(self, error: Exception) -> None:
        reason = _reason(error)
        if "permissions violation" in reason:
            self._denied = reason
            self._repeated_log.begin(reason, _log.warning, "not permitted by the nats server", reason=reason)
        elif isinstance(error, nats.errors.StaleConnectionError):
            self._lose(f"no answer within {self._settings.heartbeat_timeout_ms} ms")
        else:
            self._lose(reason)

    async def _closed(self) -> None:
        self._lose("closed by the server")


async def first_of(*events: asyncio.Event, seconds: float | None = None) -> None:
    """Wait until one of the events is set, for at most `seconds`."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()


async def end_tasks(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel tasks until they have ended, because nats-py sometimes suppresses a cancellation."""
    while left := [task for task in tasks if task is not None and not task.done()]:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=_CANCEL_SECONDS)
    await asyncio.gather(*filter(None, tasks), return_exceptions=True)


def _drop(asked: asyncio.Future[T]) -> None:
    """Retrieve the error of a request that failed after its cancellation, because asyncio logs unretrieved errors."""
    if not asked.cancelled():
        asked.exception()


def _reason(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError) and error.errno and error.errno > 0:
        text = os.strerror(error.errno)
    return text if isinstance(error, ServerError) else text.removeprefix("nats: ").strip("'").lower()
