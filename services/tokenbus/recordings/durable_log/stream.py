"""LogStream: the limits, state and messages of a log's JetStream stream; docs/log.md describes the format."""

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
"""Time limit for two elections: of the cluster's leader (up to nine seconds) and of the stream's leader."""
_RETRY_SECONDS = 0.2
_NOT_CLUSTERED = 10074
_NOT_READY = {10008, 10009, 10004, 10058}
"""Error codes of a cluster without a leader, and of a stream that another writer has just created."""
_HOUR_SECONDS = 3600
_SILENT_NS = 4_000_000_000
"""Silence after which a replica counts as missing, in nanoseconds; a live replica sends once a second."""
_HEADER_BYTES = 1024
"""Number of bytes of `max_payload` that are reserved for headers."""
_log = logger("log")


class LogError(AddressError):
    """A server does not have the log, or cannot keep it as the settings require."""


class PromiseError(LogError):
    """The servers' configuration cannot keep the guarantees in the settings, so waiting does not help."""


class LogStream:
    """The JetStream stream of one log."""

    def __init__(self, settings: Settings, address: str | None = None) -> None:
        """Parse an address (default: `durable_log.address`); raises AddressError for an invalid address."""
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
        """Return the subject of one worker incarnation, of all incarnations of a worker, or of all workers."""
        token = quote(worker_id, safe="").replace(".", "%2E") if worker_id else "*"
        return f"{self.subjects}.{token}.{'*' if epoch is None else epoch}"

    def life(self, subject: str) -> tuple[str, int] | None:
        """Return the worker id and epoch of a subject, or None if the subject names no worker incarnation."""
        *_, token, epoch = subject.split(".")
        worker_id = unquote(token)
        is_own = epoch.isdecimal() and subject == self.subject(worker_id, int(epoch))
        return (worker_id, int(epoch)) if is_own else None

    async def connect(
        self, seconds: float | None = None, tell: Callable[[AddressError], object] = lambda _: None
    ) -> ServerConnection:
        """Connect to a server; calls `tell` with the reason after every `seconds` without a connection."""
        connecting = asyncio.create_task(self._servers.connect())
        try:  # asyncio.timeout is not used, because nats-py may suppress its cancellation
            while not (await asyncio.wait({connecting}, timeout=seconds))[0]:
                tell(AddressError(self.address, self.reason))
            return connecting.result()
        finally:
            await end_tasks(connecting)

    async def info(
        self, server: ServerConnection, *, make: bool, tell: Callable[[AddressError], object] = lambda _: None
    ) -> StreamInfo:
        """Return the stream's state; with `make`, a missing stream is created. An existing stream is not changed.

        Waits for the election of a leader, and with `make` also for a quorum; calls `tell` with the reason for the
        wait. Raises LogError if the stream cannot be used or, with `make`, retains less than the settings require.
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
        """Raise LogError if the stream lacks a quorum of replicas, because such a stream accepts no messages."""
        missing, replicas = missing_replicas(info), info.config.num_replicas or 1
        if 2 * missing >= replicas:
            raise LogError(self.address, f"no quorum: {missing} of {replicas} replicas are missing")

    async def look(self, server: ServerConnection) -> StreamInfo:
        """Return the stream's state, with one retry after a timeout; raises one of FAILURES."""
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

    # Each message is a recording of consecutive items of one worker incarnation, which has its own subject.

    def items(self, subject: str, data: bytes) -> list[StreamItem]:
        """Return the items of a message, at least one; raises RecordingError for damage or for a wrong subject."""
        items = list(read_items(BytesIO(data)))
        if not items:
            raise RecordingError(0, "expected at least one item, got none")
        own = self.subject(items[0].worker_id, items[0].epoch)
        if subject != own:
            raise RecordingError(0, f"expected a hello for the subject {subject}, got one for {own}")
        return items

    async def last_sequence(self, server: ServerConnection, subject: str, message: RawStreamMsg | None) -> int:
        """Return the last sequence in a message and all earlier messages of an incarnation, or 0 if they have no item.

        The search goes back to a LogWriter's message, because other programs' messages may be damaged or repeat items.
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
        """Bisect for a subject's latest message before message `number`, because the server searches only forwards."""
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
    """Return whether a LogWriter wrote the message; the server checks only such messages for repeated items."""
    return Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value in (headers or {})


def missing_replicas(info: StreamInfo) -> int:
    """Return the number of replicas that do not answer the leader, or of all replicas if there is no leader.

    Without a quorum, the leader still answers normally for 20 s before it steps down.
    """
    replicas = info.config.num_replicas or 1
    if info.cluster is None:
        return 0
    if not info.cluster.leader:
        return replicas
    heard = sum(0 < (each.active or 0) < _SILENT_NS for each in info.cluster.replicas or ())
    return max(0, replicas - 1 - heard)


def _is_temporary(error: Exception) -> bool:
    """Return whether the error ends once the cluster has a leader and a quorum."""
    if isinstance(error, APIError):
        return error.err_code in _NOT_READY
    return not isinstance(error, PromiseError)


def _limit(value: float | None) -> float:
    """Return a limit of a stream as a number; None, 0 and -1 mean no limit."""
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
