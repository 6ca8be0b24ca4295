"""ServerConnection: one connection to a NATS server, and the servers that are tried in turn for one.

nats-py's own reconnecting is off. It would send after a break what was published before it, into conversations that
have ended; here a broken connection ends all of them, and another one is made.
"""

import asyncio
import contextlib
import os
import random
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import inf
from typing import Any
from urllib.parse import ParseResult

import nats.errors
from nats.aio.client import Client
from nats.aio.transport import TcpTransport
from nats.protocol.command import pub_cmd, sub_cmd, unsub_cmd
from nats.protocol.parser import PERMISSIONS_ERR

from tokenbus_services.bus.addresses import NatsEndpoint, TcpEndpoint
from tokenbus_services.bus.nats_conversation import LEAST_PAYLOAD
from tokenbus_services.bus.nats_login import Login
from tokenbus_services.logs import DeduplicatedLog, logger
from tokenbus_services.settings import BusSettings

_CLOSE_SECONDS = 0.2
"""How long a closing connection may take that sends nothing any more."""
_CANCEL_SECONDS = 0.1
_LONG_SECONDS = 86_400
_READ_BYTES = 1_048_576
"""How much is read at a time. nats-py reads 32 KiB, and stops the socket at twice that: several turns a step."""
_NO_RESPONDERS = b"NATS/1.0 503"
_FIRST_INLET = 1 << 32
"""The number of the first inlet: nats-py's own subscriptions count from one."""
_log = logger("bus")

Receive = Callable[[str, bytes, bool], None]
"""Takes a message: its subject, its payload, and whether it says that the subject it answers has no subscriber."""


class ServerError(Exception):
    """A server cannot be used: one line with the reason."""


_FAILURES = (nats.errors.Error, OSError, asyncio.TimeoutError, ServerError)


class Servers:
    """The servers of an address: one that failed is tried again after those that have not failed since."""

    def __init__(
        self,
        endpoint: NatsEndpoint,
        settings: BusSettings,
        login: Login | None = None,
        failed: dict[TcpEndpoint, float] | None = None,
    ) -> None:
        """Take what this process proves to them, by default read now; raises SettingsError.

        Files that have changed are read again before each try. `failed` says when each failed last, to this process:
        its connections have one.
        """
        self.endpoint = endpoint
        self.reason = "no server was tried yet"
        """Why the last try failed, or the last connection was lost."""
        self._login = login or Login(endpoint, settings)
        self._settings = settings
        self._order = random.sample(endpoint.servers, len(endpoint.servers))
        self._failed = {} if failed is None else failed
        self._repeated_log = DeduplicatedLog()
        self._connections_log = DeduplicatedLog()
        """What goes wrong with connections once they are made: the next may have the same."""
        self._last: ServerConnection | None = None
        self._last_server = self._order[0]
        self._last_began = -inf
        self._seconds = 0.0

    @property
    def user(self) -> str:
        """The user that this process is to the servers; empty: it proves itself otherwise, or not at all."""
        return self._login.user

    def again(self) -> "Servers":
        """Return the same for another connection, best to the same server, with one log for all of them."""
        made = Servers(self.endpoint, self._settings, self._login, self._failed)
        made._order.sort(key=lambda each: each != self._last_server)
        made._repeated_log, made._connections_log = self._repeated_log, self._connections_log
        return made

    async def connect(self) -> "ServerConnection":
        """Return a connection to the first that can be used; waits for as long as there is none.

        After a connection that was lost soon it waits, too: a server may accept each one only to close it.
        """
        loop = asyncio.get_running_loop()
        self._connections_log.expire()
        if self._last is not None:
            self.reason = self._last.reason or self.reason
            self._failed[self._last_server] = loop.time()
        if loop.time() - self._last_began < self._settings.reconnect_max_ms / 1000:
            await self._pause()
        else:
            self._seconds = self._settings.reconnect_ms / 1000
        while True:
            server = self._last_server = min(self._order, key=lambda each: self._failed.get(each, -inf))
            connection = ServerConnection(self._settings, self._connections_log)
            self._login.refresh()
            try:
                await connection.open(server, self._login)
            except ServerError as error:
                self._failed[server] = loop.time()
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


@dataclass(slots=True, eq=False)
class Inlet:
    """A subscription: what is published to its subject is received as soon as it was read from the socket."""

    number: int
    receive: Receive
    most: int
    """How many messages the server delivers before it ends the subscription; 0: it does not."""
    received: int = 0


class _Client(Client):
    """nats-py's own, but what comes for an inlet goes there at once, and not through a queue and a task of its own.

    Another client's message with broken headers does not end it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inlets: dict[int, Inlet] = {}

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        inlet = self.inlets.get(sid)
        if inlet is None:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        inlet.received += 1
        try:
            inlet.receive(subject.decode(), data, bool(headers) and headers.startswith(_NO_RESPONDERS))
        except Exception as error:  # noqa: BLE001 - the reader must go on until the connection is given up
            await self._error_cb(error)

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
    """nats-py's own, with larger reads, and with writes that do not wait."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __bool__(self) -> bool:
        """Whether it is there: nats-py would take another in the place of one that says no before it is connected."""
        return True

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        """Connect to a server."""
        await super().connect(uri, max(buffer_size, _READ_BYTES), connect_timeout)

    async def connect_tls(
        self, uri: str | ParseResult, ssl_context: ssl.SSLContext, buffer_size: int, connect_timeout: int
    ) -> None:
        """Go on over TLS."""
        await super().connect_tls(uri, ssl_context, max(buffer_size, _READ_BYTES), connect_timeout)
        if self._io_writer is not None:  # else asyncio warns at the end of each connection
            self._io_writer.transport.get_protocol()._over_ssl = True  # type: ignore[attr-defined]  # noqa: SLF001

    async def read(self, buffer_size: int) -> bytes:
        """Return what has come, at least a byte, unless the server has closed."""
        return bytes(await super().read(max(buffer_size, _READ_BYTES)))

    @property
    def pending_bytes(self) -> int:
        """How many written bytes the socket has not taken yet."""
        return 0 if self._io_writer is None else self._io_writer.transport.get_write_buffer_size()

    @property
    def is_closing(self) -> bool:
        """Whether it takes nothing any more: it broke, which nats-py may learn a little later."""
        return self._io_writer is None or self._io_writer.is_closing()

    def abort(self) -> None:
        """Close at once."""
        if self._io_writer is not None:
            self._io_writer.transport.abort()


class ServerConnection:
    """One connection to a server, from its handshake to its end."""

    def __init__(self, settings: BusSettings, repeated_log: DeduplicatedLog) -> None:
        self.lost = asyncio.Event()
        self.max_payload = 0
        self.denied = ""
        """What the server did not permit last."""
        self.reason = ""
        """Why it was lost."""
        self._client = _Client()
        self._numbers = count(_FIRST_INLET)
        self._transport = _Transport()
        self._client._transport = self._transport  # noqa: SLF001 - it takes one that is there, and has no option for it
        self._settings = settings
        self._is_open = self._is_closed = False
        self._repeated_log = repeated_log

    @property
    def client(self) -> Client:
        """nats-py's own connection, for what NATS offers besides core messages."""
        return self._client

    async def open(self, server: TcpEndpoint, login: Login) -> None:
        """Connect to a server; raises ServerError."""
        interval, timeout = self._settings.heartbeat_interval_ms / 1000, self._settings.heartbeat_timeout_ms / 1000
        options = dict(login.options)
        for secret in {"password", "token"} & options.keys():
            options[secret] = partial(self._if_private, options[secret], is_tls=login.is_tls)
        self._client._public_nkey = login.public_nkey  # noqa: SLF001 - it makes it itself only with another package
        try:
            await self._client.connect(
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
                no_echo=True,
                name="tokenbus",
                **options,
            )
            self._if_private("", is_tls=login.is_tls)
            self.max_payload = self._client.max_payload
            if self.max_payload < LEAST_PAYLOAD:
                raise ServerError(f"its max_payload is {self.max_payload} bytes, at least {LEAST_PAYLOAD} are needed")  # noqa: TRY301
        except Exception as error:  # noqa: BLE001 - nats-py raises any, where it cannot read what came
            is_vague = isinstance(error, nats.errors.NoServersError)
            reason = self.reason if is_vague else _reason(error)
            if not isinstance(error, _FAILURES):
                reason = f"what answers there is no NATS server: {reason}"
            await self.close(0)
            raise ServerError(f"{str(server).removeprefix('tcp://')}: {reason}") from None
        except BaseException:
            await self.close(0)
            raise
        self.lost.clear()
        self._is_open = True

    def _if_private(self, secret: str, *, is_tls: bool) -> str:
        """Return a secret; nats-py would send it in the clear to whatever answers in the place of a server with TLS."""
        if is_tls and not self._client._server_info.get("tls_required"):  # noqa: SLF001 - nothing else tells
            raise ServerError("it offers no TLS, which a tls:// address needs")
        return secret

    def subscribe(self, subject: str, receive: Receive, most: int = 0) -> Inlet:
        """Receive what is published to a subject; the server drops what comes after so many messages, if not 0."""
        inlet = Inlet(next(self._numbers), receive, most)
        self._client.inlets[inlet.number] = inlet
        self._write(sub_cmd(subject, "", inlet.number) + (unsub_cmd(inlet.number, most) if most else b""))
        return inlet

    def extend(self, inlet: Inlet, more: int) -> None:
        """Let the server deliver so many messages more than were received, unless it has ended the subscription."""
        inlet.most = inlet.received + more
        self._write(unsub_cmd(inlet.number, inlet.most))

    def unsubscribe(self, inlet: Inlet) -> None:
        """Receive nothing more of a subscription."""
        if self._client.inlets.pop(inlet.number, None) is not None:
            self._write(unsub_cmd(inlet.number, 0))

    def publish(self, subject: str, reply: str, payload: bytes) -> None:
        """Publish, without waiting; where `subject` has no subscriber, `reply` receives a message that says so."""
        self._write(pub_cmd(subject, reply, payload))

    def _write(self, command: bytes) -> None:
        """Write in this turn of the event loop; nats-py's `publish` and its flusher do so two turns later."""
        if not self.lost.is_set() and not self._transport.is_closing:
            client = self._client
            waiting, client._pending = client._pending, []  # noqa: SLF001
            client._pending_data_size = 0  # noqa: SLF001
            self._transport.write(b"".join((*waiting, command)))  # type: ignore[no-untyped-call]

    @property
    def pending_bytes(self) -> int:
        """How many published bytes the socket has not taken yet; the conversations' windows bound them."""
        return self._transport.pending_bytes

    async def close(self, seconds: float) -> None:
        """Close, once what was published has reached the server, or after so many seconds."""
        if self._is_closed:
            return
        self._is_closed = True
        finishing: asyncio.Task[None] | None = None
        closing: asyncio.Task[None] | None = None
        try:
            if self._is_open and not self.lost.is_set():
                finishing = asyncio.create_task(self._finish())
                await asyncio.wait({finishing}, timeout=seconds)
            self.lost.set()
            closing = asyncio.create_task(self._client.close())
            await asyncio.wait({closing}, timeout=_CLOSE_SECONDS)
        finally:
            self.lost.set()
            self._transport.abort()  # nats-py waits without end for a server that does not read
            await end_tasks(finishing, closing)

    async def _finish(self) -> None:
        for inlet in tuple(self._client.inlets.values()):
            self.unsubscribe(inlet)
        self._write(b"")  # a flush would write its ping before what nats-py has yet to write
        await self._client.flush(_LONG_SECONDS)

    def _lose(self, reason: str) -> None:
        if not self.lost.is_set():
            self.reason = reason = self._said() or reason
            self.lost.set()
            if self._is_open:
                self._repeated_log.begin(reason, _log.warning, "nats server lost", reason=reason)

    def _said(self) -> str:
        """Return why the server closes the connection; empty: it has not said."""
        error = self._client.last_error
        is_ours = isinstance(error, (nats.errors.UnexpectedEOF, nats.errors.StaleConnectionError))
        reason = "" if error is None or is_ours else _reason(error)
        return "" if reason == self.denied else reason

    async def _failed(self, error: Exception) -> None:
        reason = _reason(error)
        if "permissions violation" in reason:
            self.denied = reason
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


def _reason(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError) and error.errno and error.errno > 0:
        text = os.strerror(error.errno)
    return text if isinstance(error, ServerError) else text.removeprefix("nats: ").strip("'").lower()
