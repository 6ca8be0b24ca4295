"""ServerConnection: one connection to a NATS server. Servers: the servers that are tried in turn for one.

nats-py's own reconnecting is off: after a break it would publish what was waiting, before the writer has asked how far
the log is.
"""

import asyncio
import contextlib
import os
import random
import re
import ssl
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, TypeVar
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
"""How long a closing connection may take that sends nothing any more."""
_CANCEL_SECONDS = 0.1
T = TypeVar("T")
ASK_SECONDS = 2.0
"""How long to wait for an answer before asking again; for a stream whose leader died no server answers."""
_log = logger("log")


@dataclass(frozen=True, slots=True)
class LogAddress:
    """The servers of a cluster, any of which will do, and the name of a log there."""

    servers: tuple[TcpEndpoint, ...]
    name: str
    is_tls: bool


def parse(address: str, settings: Settings) -> LogAddress:
    """Return the parts of an address; raises AddressError for one that is invalid, or not safe enough to be used."""
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
    """A server cannot be used: one line with the reason."""


FAILURES = (nats.errors.Error, OSError, asyncio.TimeoutError, ServerError)
"""Errors after which a reader or writer connects again."""


class Servers:
    """The servers of a log: one that failed is tried again after those that have not failed since."""

    def __init__(self, address: LogAddress, settings: Settings) -> None:
        """Read the login; raises SettingsError. Its files are read again before each try if they have changed."""
        self.reason = "no server was tried yet"
        """Why the last try failed, or the last connection was lost."""
        self._login = Login(settings.durable_log, is_tls=address.is_tls)
        self._settings = settings.bus
        self._order = deque(random.sample(address.servers, len(address.servers)))
        """The next one first; a server that failed goes to the end."""
        self._repeated_log = DeduplicatedLog()
        self._connections_log = DeduplicatedLog()
        """What goes wrong with connections once they are made: the next may have the same."""
        self._last: ServerConnection | None = None
        self._last_began = -inf
        self._seconds = 0.0

    async def connect(self) -> "ServerConnection":
        """Return a connection to the first that can be used; waits for as long as there is none.

        After a connection that was lost soon it waits, too: a server may accept each one only to close it.
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
    """nats-py's own, but another client's message with broken headers does not end it."""

    async def _process_headers(self, headers: bytes | None) -> dict[str, str] | None:
        try:
            return await super()._process_headers(headers)
        except Exception:  # noqa: BLE001 - whatever they are
            return {}

    async def _close(self, status: int, do_cbs: bool = True) -> None:  # noqa: FBT001, FBT002 - as nats-py has it
        with contextlib.suppress(OSError):  # what is left to write cannot be: nats-py's task would fail for it
            await super()._close(status, do_cbs)

    async def _process_op_err(self, e: Exception) -> None:
        """Report an error before the connection is closed, which may wait for a server that does not read."""
        await self._error_cb(e)
        await super()._process_op_err(e)

    async def _process_err(self, err_msg: str) -> None:
        """Report an error before what came behind it is taken: nats-py does so once it has closed, a while later."""
        await super()._process_err(err_msg)
        if PERMISSIONS_ERR not in err_msg and not self.is_connecting and self._err is not None:
            await self._error_cb(self._err)


class _Transport(TcpTransport):
    """nats-py's own, with an end that waits for nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __bool__(self) -> bool:
        """Whether it is there: nats-py would take another in the place of one that says no before it is connected."""
        return True

    async def connect_tls(
        self, uri: str | ParseResult, ssl_context: ssl.SSLContext, buffer_size: int, connect_timeout: int
    ) -> None:
        """Go on over TLS."""
        await super().connect_tls(uri, ssl_context, buffer_size, connect_timeout)
        if self._io_writer is not None:  # else asyncio warns at the end of each connection
            self._io_writer.transport.get_protocol()._over_ssl = True  # type: ignore[attr-defined]  # noqa: SLF001

    def abort(self) -> None:
        """Close at once."""
        if self._io_writer is not None:
            self._io_writer.transport.abort()


class ServerConnection:
    """One connection to a server, from its handshake to its end."""

    def __init__(self, settings: BusSettings, repeated_log: DeduplicatedLog) -> None:
        self.lost = asyncio.Event()
        self.reason = ""
        """Why it was lost."""
        self.client: Client = _Client()
        """nats-py's own connection."""
        self._denied = ""
        """What the server did not permit last."""
        self._transport = _Transport()
        self.client._transport = self._transport  # noqa: SLF001 - it takes one that is there, and has no option for it
        self._settings = settings
        self._is_open = self._is_closed = False
        self._repeated_log = repeated_log

    @property
    def jetstream(self) -> JetStreamContext:
        """Its JetStream; `ask` it."""
        return self.client.jetstream(timeout=ASK_SECONDS)

    async def ask(self, asking: Coroutine[None, None, T]) -> T:
        """Await the server's answer; raises ServerError once the connection is lost."""
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
        """Connect to a server; raises ServerError."""
        interval, timeout = self._settings.heartbeat_interval_ms / 1000, self._settings.heartbeat_timeout_ms / 1000
        options = dict(login.options)
        for secret in {"password", "token"} & options.keys():
            options[secret] = partial(self._if_private, options[secret], is_tls=login.is_tls)
        self.client._public_nkey = login.public_nkey  # noqa: SLF001 - it makes it itself only with another package
        try:
            await self.client.connect(
                f"nats://{str(server).removeprefix('tcp://')}",
                error_cb=self._failed,
                closed_cb=self._closed,
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                connect_timeout=max(1, int(timeout)),
                # At least two, so that a process which stood still reads the answers that came meanwhile.
                ping_interval=interval,  # type: ignore[arg-type]  # it only sleeps
                max_outstanding_pings=max(2, int(timeout / interval)),
                name="tokenbus",
                **options,
            )
            self._if_private("", is_tls=login.is_tls)
        except Exception as error:  # noqa: BLE001 - nats-py raises any, where it cannot read what came
            is_vague = isinstance(error, nats.errors.NoServersError)
            reason = self.reason if is_vague else _reason(error)
            if not isinstance(error, FAILURES):
                reason = f"what answers there is no NATS server: {reason}"
            await self.close()
            raise ServerError(f"{str(server).removeprefix('tcp://')}: {reason}") from None
        except BaseException:
            await self.close()
            raise
        self.lost.clear()
        self._is_open = True

    def _if_private(self, secret: str, *, is_tls: bool) -> str:
        """Return a secret; nats-py would send it in the clear to whatever answers in the place of a server with TLS."""
        if is_tls and not self.client._server_info.get("tls_required"):  # noqa: SLF001 - nothing else tells
            raise ServerError("it offers no TLS, which a tls:// address needs")
        return secret

    async def close(self) -> None:
        """Close, without waiting for what was published."""
        if self._is_closed:
            return
        self._is_closed = True
        self.lost.set()
        closing = asyncio.create_task(self.client.close())
        try:
            await asyncio.wait({closing}, timeout=_CLOSE_SECONDS)
        finally:
            self._transport.abort()  # nats-py waits without end for a server that does not read
            await end_tasks(closing)

    def _lose(self, reason: str) -> None:
        if not self.lost.is_set():
            self.reason = reason = self._said() or reason
            self.lost.set()
            if self._is_open:
                self._repeated_log.begin(reason, _log.warning, "nats server lost", reason=reason)

    def _said(self) -> str:
        """Return why the server closes the connection; empty: it has not said."""
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
    """Wait until one of some events is set, or for so long."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()


async def end_tasks(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel tasks until they have ended: nats-py swallows a cancellation at some of its waits."""
    while left := [task for task in tasks if task is not None and not task.done()]:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=_CANCEL_SECONDS)
    await asyncio.gather(*filter(None, tasks), return_exceptions=True)  # what they raised was seen


def _drop(asked: asyncio.Future[T]) -> None:
    """Retrieve a question's error: nats-py raises one when it is cancelled, and asyncio would log it."""
    if not asked.cancelled():
        asked.exception()


def _reason(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError) and error.errno and error.errno > 0:
        text = os.strerror(error.errno)
    return text if isinstance(error, ServerError) else text.removeprefix("nats: ").strip("'").lower()
