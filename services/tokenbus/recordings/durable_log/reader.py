"""read_log: iterates over the items of a durable log; the reader stores its position, the server does not."""

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import datetime, timedelta
from typing import NamedTuple

from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, ConsumerInfo, DeliverPolicy, StreamState

from tokenbus.bus import AddressError
from tokenbus.logs import DeduplicatedLog, logger
from tokenbus.recordings.durable_log.server import ASK_SECONDS, FAILURES, ServerConnection, ServerError
from tokenbus.recordings.durable_log.stream import LogError, LogStream, is_writers, reason_of
from tokenbus.recordings.items import RecordingError, SequenceTracker, StreamItem
from tokenbus.settings import Settings

_POSITION = re.compile(r"([0-9]{1,19})\.([0-9]{1,9})\.([0-9]{1,19})")
_MOST_FETCHED = 64
_IDLE_SECONDS = 2.0
"""Seconds without a message after which the reader asks the server again."""
_FORGET_SECONDS = 60.0
"""Seconds without a reader after which the server removes a consumer."""
_RETRY_SECONDS = 0.2
_STORED = "$JS.ACK."
"""Prefix of a stored message's reply subject; status messages of the server do not have this prefix."""
_ROUNDING = timedelta(microseconds=1)
"""Precision of `logged_at`, which is lower than the server's precision of nanoseconds."""
_log = logger("log")


class _Position(NamedTuple):
    """Position of an item: the message's number, the item's number in the message (from 1), and the message's time.

    The time, in microseconds, distinguishes the message from one with the same number in a recreated log.
    """

    message: int
    item: int
    taken_at: int

    @classmethod
    def read(cls, text: str) -> "_Position":
        """Parse a position; raises ValueError for an invalid text."""
        if (match := _POSITION.fullmatch(text)) is None:
            raise ValueError(f"after: expected the position of an item of a log, got {text[:80]!r}")
        return cls(*map(int, match.groups()))

    def __str__(self) -> str:
        return f"{self.message}.{self.item}.{self.taken_at}"


async def read_log(  # noqa: PLR0913 - keyword-only
    address: str | None = None,
    *,
    worker_id: str = "",
    after: str | None = None,
    since: datetime | None = None,
    request_id: int | None = None,
    follow: bool = False,
    settings: Settings | None = None,
) -> AsyncGenerator[StreamItem, None]:
    """Iterate over the items of a durable log, each once; the items of each worker incarnation are in order.

    Any number of readers may read a log at their own positions without delaying writers or other readers. Repeated
    items are skipped. The reader logs and skips a damaged message or a message with a wrong subject. The incarnation's
    next item counts all missing items in `missing_items`. The reader buffers at most 64 MiB, or one larger message.
    After the first connection, the reader waits if no server answers.

    Args:
        address: the log, such as `nats://127.0.0.1:4222/log`; default: `durable_log.address`.
        worker_id: the worker whose items are read, or empty for all workers.
        after: the `position` of an item, after which reading continues; default: the beginning.
        since: reading begins at the first message that the server stored at or after this time.
        request_id: the request whose items are returned; default: all items.
        follow: whether to wait for further items at the end of the log.
        settings: all settings; default: from the environment and the settings file.

    Returns:
        an async generator of `StreamItem`; close it, for example with `contextlib.aclosing`, if you stop early.

    Raises:
        AddressError: the address cannot be used, or no server answers the first connection attempts.
        LogError: the log does not exist, or does not have the item at `after`, for example because the log was deleted
            or restored from a backup.
        ValueError: `after` is not a position.

    Example:
        async def collect(log: str, last: str | None) -> None:
            async for item in tokenbus.read_log(log, after=last, follow=True):
                if item.batch is not None:
                    print(item.worker_id, item.sequence, item.batch.token_ids)
                last = item.position
    """
    settings = settings or Settings.load()
    position = _Position(0, 0, 0) if after is None else _Position.read(after)
    reader = _Reader(LogStream(settings, address), settings, worker_id, position, since)
    end: int | None = None
    while True:
        server = await reader.connect()
        try:
            state = await reader.begin(server)
            if not follow and end is None:
                end = state.last_seq
            async with aclosing(reader.messages(server, end)) as messages:
                async for message in messages:
                    for item in await reader.new_items(server, message, request_id):
                        yield item
        except FAILURES as error:
            reader.failed(error)
            await asyncio.sleep(_RETRY_SECONDS)
        else:
            return
        finally:
            await server.close()


class _Reader:
    """Fetches messages in order through a consumer, which the server keeps in memory."""

    def __init__(
        self, stream: LogStream, settings: Settings, worker_id: str, position: _Position, since: datetime | None
    ) -> None:
        self._stream = stream
        self._settings = settings
        self._subject = stream.subject(worker_id)
        self._position = position
        self._since = since
        self._from_beginning = not position.message and since is None
        self._sequences = SequenceTracker()
        self._has_begun = False
        self._repeated_log = DeduplicatedLog()

    async def connect(self) -> ServerConnection:
        """Connect to a server; on the first call, raises AddressError if no server answers."""
        seconds = 2 * self._settings.bus.heartbeat_timeout_ms / 1000

        def give_up(error: AddressError) -> None:
            raise AddressError(error.address, f"no server answers within {seconds:g} s: {error.reason}")

        return await (self._stream.connect() if self._has_begun else self._stream.connect(seconds, give_up))

    async def begin(self, server: ServerConnection) -> StreamState:
        """Return the stream's state, and log a warning if retention has removed unread messages.

        Raises LogError if the position is beyond the end of the log.
        """
        stream, position = self._stream, self._position
        state = (await (stream.look(server) if self._has_begun else stream.info(server, make=False))).state
        if position.message > state.last_seq:
            raise LogError(stream.address, f"position {position} is beyond the log's end, message {state.last_seq}")
        if position.message and state.first_seq > position.message + 1 and not self._has_begun:
            first = f"{state.first_seq}.1"
            _log.warning("log was not read in time: retention removed items", after=str(position), first=first)
        self._has_begun = True
        return state

    def failed(self, error: BaseException) -> None:
        """Log an error after which the reader reconnects and continues at its position."""
        reason = reason_of(error)
        self._repeated_log.begin(reason, _log.warning, "log is read again", reason=reason, after=str(self._position))

    async def new_items(self, server: ServerConnection, message: Msg, request_id: int | None) -> list[StreamItem]:
        """Return the message's new items after the current position, or only the new items of `request_id`.

        Raises LogError if the log was recreated, or if the message does not have the item at the current position.
        """
        number, logged_at = message.metadata.sequence.stream, message.metadata.timestamp
        taken_at = int(logged_at.timestamp() * 1e6)
        is_current = self._position.message == number
        if is_current and self._position.taken_at != taken_at:
            reason = f"position {self._position}: the log was recreated, and now has another message {number}"
            raise LogError(self._stream.address, reason)
        items = await self._read(server, message)
        if items and is_current and self._position.item > len(items):
            limit = f"position {self._position} is beyond the end of message {number}, which has {len(items)} items"
            raise LogError(self._stream.address, limit)
        given = []
        for index, item in enumerate(items, start=1):
            position = _Position(number, index, taken_at)
            item.position, item.logged_at = str(position), logged_at
            is_new = position[:2] > self._position[:2]
            is_wanted = is_new and (request_id is None or item.has_request(request_id))
            if self._sequences.count(item, is_given=is_wanted or not is_new) and is_wanted:
                given.append(item)
            if is_new:
                self._position = position
        return given

    async def _read(self, server: ServerConnection, message: Msg) -> list[StreamItem]:
        number, subject = message.metadata.sequence.stream, message.subject
        life = self._stream.life(subject)
        if life is not None and life not in self._sequences and not is_writers(message.headers):
            before = await self._stream.message_before(server, subject, number)
            if last := await self._stream.last_sequence(server, subject, before):
                self._sequences.set(life, last)
        try:
            return self._stream.items(subject, message.data)
        except RecordingError as error:
            reason = str(error)
            self._repeated_log.begin(
                number, _log.error, "damaged message", message=number, subject=subject, reason=reason
            )
            if life is not None and life not in self._sequences and self._from_beginning:
                self._sequences.set(life, 0)  # all items of this message count as missing
            return []

    async def messages(self, server: ServerConnection, last: int | None) -> AsyncGenerator[Msg, None]:
        """Yield the messages from the position to message number `last`, or without an end if `last` is None.

        Raises one of FAILURES if the caller must reconnect.
        """
        consumer = await server.ask(server.jetstream.add_consumer(self._stream.name, self._config()))
        if last is not None and not consumer.num_pending:
            return
        most = max(1, min(_MOST_FETCHED, self._settings.durable_log.buffer_bytes // server.client.max_payload))
        inbox = server.client.new_inbox()
        subscription = await server.client.subscribe(inbox, pending_bytes_limit=(most + 1) * server.client.max_payload)
        ask = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream.name}.{consumer.name}"
        wanted = json.dumps({"batch": most, "expires": int(_IDLE_SECONDS * 1e9)}).encode()
        asked, delivered = 0, 0
        while True:
            if not asked:
                await server.client.publish(ask, wanted, reply=inbox)
                asked = most
            message = await server.ask(subscription.next_msg(timeout=_IDLE_SECONDS + ASK_SECONDS))
            if not message.reply.startswith(_STORED):  # this is a status message of the server
                status = (message.headers or {}).get("Status", "")
                if status not in {"404", "408"}:
                    raise ServerError(f"the server ended the reader: status {status}")
                asked = 0
                if last is not None and await self._is_over(server, consumer, delivered):
                    return
                continue
            asked -= 1
            delivered += 1
            found = message.metadata
            if found.sequence.consumer != delivered:
                raise ServerError(f"message {delivered} of the reader is missing")
            yield message
            if last is not None and (found.sequence.stream >= last or not found.num_pending):
                return

    def _config(self) -> ConsumerConfig:
        config = ConsumerConfig(
            deliver_policy=DeliverPolicy.ALL,
            ack_policy=AckPolicy.NONE,
            filter_subject=self._subject,
            inactive_threshold=_FORGET_SECONDS,
            mem_storage=True,
            num_replicas=1,
        )
        if self._position.message:
            config.deliver_policy, config.opt_start_seq = DeliverPolicy.BY_START_SEQUENCE, self._position.message
        elif self._since is not None:
            config.deliver_policy, config.opt_start_time = DeliverPolicy.BY_START_TIME, self._since - _ROUNDING
        return config

    async def _is_over(self, server: ServerConnection, consumer: ConsumerInfo, delivered: int) -> bool:
        """Return whether no message is left, for example because retention has removed the remaining messages."""
        found = await server.ask(server.jetstream.consumer_info(self._stream.name, consumer.name))
        if found.delivered is None or found.delivered.consumer_seq != delivered:
            raise ServerError(f"message {delivered + 1} of the reader is missing")
        return not found.num_pending
