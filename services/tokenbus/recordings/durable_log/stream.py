"""LogStream: the JetStream stream of a log: its limits, state and messages. The format: docs/log.md."""

import asyncio
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from io import BytesIO
from urllib.parse import quote, unquote

import nats.errors
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, Header, RawStreamMsg, StorageType, StreamConfig, StreamInfo
from nats.js.errors import APIError, NotFoundError, ServiceUnavailableError

from tokenbus.bus import AddressError
from tokenbus.logs import logger
from tokenbus.recordings.durable_log.server import ASK_SECONDS, FAILURES, ServerConnection, Servers, end_tasks, parse
from tokenbus.recordings.items import RecordingError, StreamItem, read_items
from tokenbus.settings import Settings

_ELECTION_SECONDS = 30.0
"""The time limit for the election of a cluster's leader (up to nine seconds) and of the stream's leader."""
_RETRY_SECONDS = 0.2
_NOT_CLUSTERED = 10074
_NOT_READY = {10008, 10009, 10004, 10058}
"""Error codes of a cluster without a leader, and of a stream that another writer has just created."""
_HOUR_SECONDS = 3600
_SILENT_NS = 4_000_000_000
"""The silence after which a replica counts as missing; a live one sends every second."""
_HEADER_BYTES = 1024
"""The part of `max_payload` reserved for headers."""
_log = logger("log")


class LogError(AddressError):
    """A server has no such log, or cannot keep it as the settings demand."""


class PromiseError(LogError):
    """The configuration of the servers cannot keep the guarantees of the settings; waiting does not help."""


class LogStream:
    """The stream of one log."""

    def __init__(self, settings: Settings, address: str | None = None) -> None:
        """Parse the address (default: `durable_log.address`); raises AddressError."""
        address = address or settings.durable_log.address
        scheme, _, rest = address.partition("://")
        self.address = address if "/" in rest else f"{scheme}://{rest}/log"
        parsed = parse(self.address, settings)
        self.name = f"tokenbus-{parsed.name}"
        self.subjects = f"tokenbus.{parsed.name}"
        self._settings = settings
        self._servers = Servers(parsed, settings)

    @property
    def reason(self) -> str:
        return self._servers.reason

    def subject(self, worker_id: str, epoch: int | None = None) -> str:
        """Return the subject of one life of a worker, of all its lives, or of all workers."""
        token = quote(worker_id, safe="").replace(".", "%2E") if worker_id else "*"
        return f"{self.subjects}.{token}.{'*' if epoch is None else epoch}"

    def life(self, subject: str) -> tuple[str, int] | None:
        """Return the worker and epoch of a subject; None if it is not the subject of a life."""
        *_, token, epoch = subject.split(".")
        worker_id = unquote(token)
        is_own = epoch.isdecimal() and subject == self.subject(worker_id, int(epoch))
        return (worker_id, int(epoch)) if is_own else None

    async def connect(
        self, seconds: float | None = None, tell: Callable[[AddressError], object] = lambda _: None
    ) -> ServerConnection:
        """Connect to a server; calls `tell` with the reason after each `seconds` without one."""
        connecting = asyncio.create_task(self._servers.connect())
        try:  # not asyncio.timeout: nats-py may swallow its cancellation
            while not (await asyncio.wait({connecting}, timeout=seconds))[0]:
                tell(AddressError(self.address, self.reason))
            return connecting.result()
        finally:
            await end_tasks(connecting)

    async def info(
        self, server: ServerConnection, *, make: bool, tell: Callable[[AddressError], object] = lambda _: None
    ) -> StreamInfo:
        """Return the stream's state; with `make`, create a missing stream. An existing stream is not changed.

        Waits for the election of a leader, and with `make` for a quorum; calls `tell` with the reason of the wait.
        Raises LogError; also if, with `make`, an existing stream keeps less than the durable log's settings demand.
        """
        reason = reason_of(TimeoutError())
        try:
            async with asyncio.timeout(_ELECTION_SECONDS):
                while True:
                    try:
                        info = await server.ask(self._info(server.jetstream, make=make))
                        if make:
                            self.check_quorum(info)
                            self._check(info)
                        return info  # noqa: TRY300 - the loop goes on after the errors of a while
                    except (nats.errors.TimeoutError, APIError, LogError) as error:
                        if not _is_temporary(error):
                            raise
                        reason = reason_of(error)
                    tell(AddressError(self.address, reason))
                    await asyncio.sleep(_RETRY_SECONDS)
        except TimeoutError:
            raise LogError(self.address, reason) from None
        except NotFoundError:
            raise LogError(self.address, f"there is no log: no stream {self.name}") from None
        except FAILURES as found:
            kind = PromiseError if getattr(found, "err_code", 0) == _NOT_CLUSTERED else LogError
            raise kind(self.address, reason_of(found)) from None

    def check_quorum(self, info: StreamInfo) -> None:
        """Raise LogError if the stream has no quorum of replicas, and so accepts no messages."""
        missing, replicas = missing_replicas(info), info.config.num_replicas or 1
        if 2 * missing >= replicas:
            raise LogError(self.address, f"no quorum: {missing} of {replicas} replicas are missing")

    async def look(self, server: ServerConnection) -> StreamInfo:
        """Return the stream's state, after one retry; raises one of FAILURES."""
        try:
            return await server.ask(server.jetstream.stream_info(self.name))
        except nats.errors.TimeoutError:
            return await server.ask(server.jetstream.stream_info(self.name))

    async def _info(self, jetstream: JetStreamContext, *, make: bool) -> StreamInfo:
        log = self._settings.durable_log
        try:
            return await jetstream.stream_info(self.name)
        except NotFoundError:
            if not make:
                raise
        config = StreamConfig(
            name=self.name,
            subjects=[self.subject("")],
            storage=StorageType.FILE,
            discard=DiscardPolicy.OLD,
            max_bytes=log.max_bytes,
            max_age=log.max_age_hours * _HOUR_SECONDS,
            num_replicas=log.replicas,
        )
        return await jetstream.add_stream(config)

    def _check(self, info: StreamInfo) -> None:
        """Log the stream's limits that are below the settings; with `durable`, raise PromiseError instead."""
        log, found = self._settings.durable_log, info.config
        compared = (
            ("replicas", log.replicas, found.num_replicas or 1),
            ("max_bytes", log.max_bytes, _limit(found.max_bytes)),
            ("max_age_hours", log.max_age_hours, _limit(found.max_age) / _HOUR_SECONDS),
        )
        less = "; ".join(
            f"durable_log.{key} is {wanted}, the stream {self.name} has {has:.15g}"
            for key, wanted, has in compared
            if has < wanted
        )
        if less and log.durable:
            raise PromiseError(self.address, less)
        if less:
            _log.warning("log keeps less than the settings say", log=self.address, reason=less)

    def largest_message(self, server: ServerConnection, info: StreamInfo) -> int:
        return int(min(server.client.max_payload, _limit(info.config.max_msg_size))) - _HEADER_BYTES

    # Each message is a recording of consecutive items of one life, under the subject of that life.

    def items(self, subject: str, data: bytes) -> list[StreamItem]:
        """Return the items of a message, at least one; raises RecordingError for damage or a wrong subject."""
        items = list(read_items(BytesIO(data)))
        if not items:
            raise RecordingError(0, "expected at least one item, got none")
        own = self.subject(items[0].worker_id, items[0].epoch)
        if subject != own:
            raise RecordingError(0, f"expected a hello for the subject {subject}, got one for {own}")
        return items

    async def last_sequence(self, server: ServerConnection, subject: str, message: RawStreamMsg | None) -> int:
        """Return the last sequence of a life in the log, up to a message of its subject; 0 if there is none.

        Messages of other programs may be damaged or repeat items, so this goes back to a message of a LogWriter.
        """
        farthest = 0
        while message is not None:
            with suppress(RecordingError):
                farthest = max(farthest, self.items(subject, message.data or b"")[-1].sequence)
                if is_writers(message.headers):
                    break
            message = await self.message_before(server, subject, message.seq or 0)
        return farthest

    async def message_before(self, server: ServerConnection, subject: str, number: int) -> RawStreamMsg | None:
        """Return a subject's last message before a number, by bisection, because the server only searches forwards."""
        found, low, high = None, 1, number
        while low < high:
            middle = (low + high) // 2
            message = await server.ask(server.jetstream.get_msg(self.name, seq=middle, subject=subject, next=True))
            if message.seq is None or message.seq >= number:
                high = middle
            else:
                found, low = message, message.seq + 1
        return found


def is_writers(headers: Mapping[str, str] | None) -> bool:
    """Return whether a LogWriter wrote the message; then the server has checked that it repeats no item."""
    return Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value in (headers or {})


def missing_replicas(info: StreamInfo) -> int:
    """Return the number of replicas that do not answer the leader; all of them if there is no leader.

    Without a quorum the leader steps down only after 20 s, and answers normally until then.
    """
    replicas = info.config.num_replicas or 1
    if info.cluster is None:
        return 0
    if not info.cluster.leader:
        return replicas
    heard = sum(0 < (each.active or 0) < _SILENT_NS for each in info.cluster.replicas or ())
    return max(0, replicas - 1 - heard)


def _is_temporary(error: Exception) -> bool:
    """Return whether the error ends when the cluster has a leader and a quorum."""
    if isinstance(error, APIError):
        return error.err_code in _NOT_READY
    return not isinstance(error, PromiseError)


def _limit(value: float | None) -> float:
    """Return a limit of a stream; None, 0 and -1 mean no limit."""
    return value if value is not None and value > 0 else math.inf


def reason_of(error: BaseException) -> str:
    if isinstance(error, AddressError):
        return error.reason
    if isinstance(error, APIError) and error.description:
        return f"jetstream: {error.description}"
    if isinstance(error, ServiceUnavailableError):
        return "the server has no JetStream, or this user may not use it"
    if isinstance(error, TimeoutError):
        return f"jetstream gave no answer within {ASK_SECONDS:g} s: it may lack a quorum or disk space"
    return str(error).removeprefix("nats: ") or type(error).__name__
