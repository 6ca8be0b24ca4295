"""The messages of a log: each is a recording of a run of one life's items, under the subject of that life."""

from collections.abc import Mapping
from contextlib import suppress
from io import BytesIO

from nats.js.api import Header, RawStreamMsg

from tokenbus_services.bus.nats_server import ServerConnection
from tokenbus_services.durable_log.stream import ASK_SECONDS, LogStream, unless_lost
from tokenbus_services.items import RecordingError, StreamItem, read_items


def read_message(stream: LogStream, subject: str, data: bytes) -> list[StreamItem]:
    """Return the items of a message, at least one.

    Raises a RecordingError for a message that is damaged, or whose subject is not that of the life in its hello.
    """
    items = list(read_items(BytesIO(data)))
    if not items:
        raise RecordingError(0, "at least one item, got none")
    own = stream.subject(items[0].worker_id, items[0].epoch)
    if subject != own:
        raise RecordingError(0, f"a hello of the life that its subject names, {subject}, got that of {own}")
    return items


def is_writers(headers: Mapping[str, str] | None) -> bool:
    """Return whether a LogWriter wrote a message: the server then checked the one before, so it repeats no item."""
    return Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value in (headers or {})


async def sequence_before(stream: LogStream, server: ServerConnection, subject: str, number: int) -> int:
    """Return the last sequence of a life that the messages before a number have; 0 if none of them can be read.

    Messages that other programs appended may be damaged, or repeat items; so go back to one that a LogWriter wrote.
    """
    farthest = 0
    while (before := await _message_before(stream, server, subject, number)) is not None:
        number = before.seq or 0
        with suppress(RecordingError):
            farthest = max(farthest, read_message(stream, subject, before.data or b"")[-1].sequence)
            if is_writers(before.headers):
                break
    return farthest


async def _message_before(
    stream: LogStream, server: ServerConnection, subject: str, number: int
) -> RawStreamMsg | None:
    """Return the last message of a subject before a number, by bisection: the server only finds the next one."""
    jetstream, found, low, high = server.client.jetstream(timeout=ASK_SECONDS), None, 1, number
    while low < high:
        middle = (low + high) // 2
        message = await unless_lost(server, jetstream.get_msg(stream.name, seq=middle, subject=subject, next=True))
        if message.seq is None or message.seq >= number:
            high = middle
        else:
            found, low = message, message.seq + 1
    return found
