"""read_log: iterates over a log's items; the reader has its position, and the server does not keep it."""

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import datetime, timedelta
from typing import NamedTuple

from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, ConsumerInfo, DeliverPolicy, StreamState

from tokenbus.logs import DeduplicatedLog, logger
from tokenbus.recordings.durable_log.server import ASK_SECONDS, FAILURES, ServerConnection, ServerError
from tokenbus.recordings.durable_log.stream import LogError, LogStream, is_writers, reason_of
from tokenbus.recordings.items import Lives, RecordingError, StreamItem
from tokenbus.settings import Settings

_POSITION = re.compile(r"([0-9]{1,19})\.([0-9]{1,9})\.([0-9]{1,19})")
_MOST_FETCHED = 64
_IDLE_SECONDS = 2.0
"""After how long without a message to ask the server again."""
_FORGET_SECONDS = 60.0
"""After how long without its reader the server removes a consumer."""
_RETRY_SECONDS = 0.2
_STORED = "$JS.ACK."
"""How the reply subject of a message of the stream begins; the server's own status messages have another one."""
_ROUNDING = timedelta(microseconds=1)
"""How far `logged_at` may be behind the server's own time, which has nanoseconds."""
_log = logger("log")


class _Place(NamedTuple):
    """A message's number, an item's in it, from 1, and when the server took the message, in microseconds.

    The time tells a message from one with its number in a log that was made anew.
    """

    message: int
    item: int
    taken_at: int

    @classmethod
    def read(cls, text: str) -> "_Place":
        """Return the place of a position; raises ValueError."""
        if (match := _POSITION.fullmatch(text)) is None:
            raise ValueError(f"after: the position of an item of a log, got {text[:80]!r}")
        return cls(*map(int, match.groups()))

    def __str__(self) -> str:
        """Return the position."""
        return f"{self.message}.{self.item}.{self.taken_at}"


async def read_log(  # noqa: PLR0913 - each is given by name
    address: str | None = None,
    *,
    worker_id: str = "",
    after: str | None = None,
    since: datetime | None = None,
    request_id: int | None = None,
    follow: bool = False,
    settings: Settings | None = None,
) -> AsyncGenerator[StreamItem, None]:
    """Iterate over the items of a durable log: those of each life of a worker in order, each once.

    Any number of readers may read, each at its own place; none delays a writer or another reader. An item that another
    program appended again is left out. The reader logs and skips a message that is damaged, or under another life's
    subject; the next item of its life says how many are missing. It holds at most 64 MiB that are
    not taken yet, or one message. It waits for a server that goes away.

    Args:
        address: the log, as `nats://127.0.0.1:4222/log`; default: `durable_log.address`.
        worker_id: the worker whose items to read; empty: every worker's.
        after: the `position` of the last item that was taken, to go on behind it; default: the beginning.
        since: the time to begin at, by the server's clock: exact to one message.
        request_id: the request whose items to give; the others are read and left out.
        follow: whether to wait for further items at the log's end, instead of ending there.
        settings: all settings; default: those of the environment and of the file that it names.

    Returns:
        an async generator of each item as a `StreamItem`; close it, as by `contextlib.aclosing`, if it is left early.

    Raises:
        AddressError: the address cannot be used, or no server answers.
        LogError: there is no such log, or it does not have the item at `after`: a position beyond its end, or of a log
            that was deleted, or restored from a backup, and written again.
        ValueError: `after` is not a position.

    Example:
        async def collect(log: str, last: str | None) -> None:
            async for item in tokenbus.read_log(log, after=last, follow=True):
                if item.batch is not None:
                    print(item.worker_id, item.sequence, item.batch.token_ids)
                last = item.position
    """
    settings = settings or Settings.load()
    place = _Place(0, 0, 0) if after is None else _Place.read(after)
    reader = _Reader(LogStream(settings, address), settings, worker_id, place, since)
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
    """Fetches messages in order, through a consumer that the server keeps in memory and removes later."""

    def __init__(
        self, stream: LogStream, settings: Settings, worker_id: str, place: _Place, since: datetime | None
    ) -> None:
        self._stream = stream
        self._settings = settings
        self._subject = stream.subject(worker_id)
        self._place = place
        self._since = since
        self._from_beginning = not place.message and since is None
        self._lives = Lives()
        self._has_begun = False
        self._repeated_log = DeduplicatedLog()

    async def connect(self) -> ServerConnection:
        """Return a connection to a server; raises an AddressError if none answers the first time."""
        return await self._stream.connect(
            None if self._has_begun else 2 * self._settings.bus.heartbeat_timeout_ms / 1000
        )

    async def begin(self, server: ServerConnection) -> StreamState:
        """Return the stream's state, before its messages are asked for.

        Logs if retention removed messages behind the place; raises a LogError for a place beyond the log's end.
        """
        stream, place = self._stream, self._place
        state = (await (stream.look(server) if self._has_begun else stream.info(server, make=False))).state
        if place.message > state.last_seq:
            raise LogError(stream.address, f"position {place} is beyond the log's end, message {state.last_seq}")
        if place.message and state.first_seq > place.message + 1 and not self._has_begun:
            first = f"{state.first_seq}.1"
            _log.warning("log was not read in time: retention removed items", after=str(place), first=first)
        self._has_begun = True
        return state

    def failed(self, error: BaseException) -> None:
        """Log that the reader begins again behind its place."""
        reason = reason_of(error)
        self._repeated_log.begin(reason, _log.warning, "log is read again", reason=reason, after=str(self._place))

    async def new_items(self, server: ServerConnection, message: Msg, request_id: int | None) -> list[StreamItem]:
        """Return the items of a message that are behind the place, new, and of a request if one is given.

        Raises a LogError for a place in another message of this number, or behind the message's last item.
        """
        number, logged_at = message.metadata.sequence.stream, message.metadata.timestamp
        taken_at = int(logged_at.timestamp() * 1e6)
        is_at_place = self._place.message == number
        if is_at_place and self._place.taken_at != taken_at:
            reason = f"position {self._place}: the log was made anew, and its message {number} is another one"
            raise LogError(self._stream.address, reason)
        items = await self._read(server, message)
        if items and is_at_place and self._place.item > len(items):
            limit = f"position {self._place} is beyond the end of message {number}, which has {len(items)} items"
            raise LogError(self._stream.address, limit)
        given = []
        for index, item in enumerate(items, start=1):
            place = _Place(number, index, taken_at)
            item.position, item.logged_at = str(place), logged_at
            is_new = place[:2] > self._place[:2]
            is_wanted = is_new and (request_id is None or item.has_request(request_id))
            if self._lives.count(item, is_given=is_wanted or not is_new) and is_wanted:
                given.append(item)
            if is_new:
                self._place = place
        return given

    async def _read(self, server: ServerConnection, message: Msg) -> list[StreamItem]:
        number, subject = message.metadata.sequence.stream, message.subject
        life = self._stream.life(subject)
        is_unknown = life is not None and life not in self._lives
        if life is not None and is_unknown and not is_writers(message.headers):
            before = await self._stream.message_before(server, subject, number)
            if last := await self._stream.last_sequence(server, subject, before):
                self._lives.set(life, last)
        try:
            return self._stream.items(subject, message.data)
        except RecordingError as error:
            reason = str(error)
            self._repeated_log.begin(
                number, _log.error, "damaged message", message=number, subject=subject, reason=reason
            )
            if life is not None and life not in self._lives and self._from_beginning:
                self._lives.set(life, 0)  # its items count as missing even if they come first
            return []

    async def messages(self, server: ServerConnection, last: int | None) -> AsyncGenerator[Msg, None]:
        """Yield the messages from the place on; end after number `last`, if it is given.

        Raises one of FAILURES if the caller must connect and begin again.
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
            if not message.reply.startswith(_STORED):  # a status of the server's, which no message of the stream can be
                status = (message.headers or {}).get("Status", "")
                if status not in {"404", "408"}:
                    raise ServerError(f"the reader was ended by the server: status {status}")
                asked = 0
                if last is not None and await self._is_over(server, consumer, delivered):
                    return
                continue
            asked -= 1
            delivered += 1
            found = message.metadata
            if found.sequence.consumer != delivered:
                raise ServerError(f"message {delivered} of the reader did not come")
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
        if self._place.message:
            config.deliver_policy, config.opt_start_seq = DeliverPolicy.BY_START_SEQUENCE, self._place.message
        elif self._since is not None:
            config.deliver_policy, config.opt_start_time = DeliverPolicy.BY_START_TIME, self._since - _ROUNDING
        return config

    async def _is_over(self, server: ServerConnection, consumer: ConsumerInfo, delivered: int) -> bool:
        """Return whether no message is left, as after retention or a purge removed the last ones."""
        found = await server.ask(server.jetstream.consumer_info(self._stream.name, consumer.name))
        if found.delivered is None or found.delivered.consumer_seq != delivered:
            raise ServerError(f"message {delivered + 1} of the reader did not come")
        return not found.num_pending
