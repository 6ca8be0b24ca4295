"""The frames of a conversation over NATS, as bytes.

NATS carries payloads of at most the server's `max_payload` bytes, and may drop one. So each payload is a frame with a
number, which shows what is missing, and a message of several parts goes in as many frames as it needs.
"""

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

from tokenbus_services.bus.errors import MessageError
from tokenbus_services.bus.transport import Parts

VERSION = b"tokenbus 1"
"""The payload of OPEN: another version is another protocol."""
_HEAD = struct.Struct("<BQQ")
HEAD_BYTES = _HEAD.size
_COUNT = struct.Struct("<I")
_MOST_PARTS = 1024
ID_LENGTH = 32
"""How many hexadecimal digits the id of a peer has."""
LEAST_PAYLOAD = 1024
"""The least `max_payload` of a server with which a conversation is of use."""
LEAST_PIECE = LEAST_PAYLOAD // 2
"""The least bytes of a frame that is not the last of its message."""


class Kind(IntEnum):
    """What a frame is."""

    OPEN = 1
    """Begins a conversation; it is repeated until a listener answers."""
    WELCOME = 2
    """Answers it."""
    MORE = 3
    """A message's bytes, but for the last of them."""
    LAST = 4
    """A message's last bytes."""
    READ = 5
    """Nothing but how far was read."""
    END = 6
    """The sender has left the conversation, or knows of none."""


class Frame(NamedTuple):
    """One payload."""

    kind: Kind
    number: int
    """Within the conversation, from 1 in each direction; 0: OPEN, WELCOME and END, which may come at any time."""
    read: int
    """The number of the last frame whose message the sender's application has taken."""
    data: bytes = b""

    def packed(self) -> bytes:
        """Return its bytes."""
        return _HEAD.pack(self.kind, self.number, self.read) + self.data


def opening(own: str = "") -> bytes:
    """Return an OPEN; the peer's id is in it where it is not in the subject."""
    return Frame(Kind.OPEN, 0, 0, VERSION + own.encode()).packed()


def unpacked(payload: bytes) -> Frame:
    """Return a payload's frame; raises ValueError if it is none."""
    if len(payload) < _HEAD.size:
        raise ValueError(f"a frame of at least {_HEAD.size} bytes, got {len(payload)}")
    kind, number, read = _HEAD.unpack_from(payload)
    return Frame(Kind(kind), number, read, payload[_HEAD.size :])


def joined(parts: Parts, most: int) -> bytes:
    """Return a message as one text of bytes; raises MessageError if it is larger than `most`, or has too many parts."""
    if len(parts) > _MOST_PARTS:
        raise MessageError(f"at most {_MOST_PARTS} parts", len(parts))
    message = b"".join((struct.pack(f"<{len(parts) + 1}I", len(parts), *map(len, parts)), *parts))
    if len(message) > most:
        raise MessageError(f"at most {most} bytes", len(message))
    return message


def split(message: bytes, max_part_bytes: int) -> list[bytes]:
    """Return the parts of a message; raises ValueError if it is none, or has a part that is too large."""
    count = _COUNT.unpack_from(message)[0] if len(message) >= _COUNT.size else 0
    if not 1 <= count <= _MOST_PARTS or len(message) < (count + 1) * _COUNT.size:
        raise ValueError(f"1 to {_MOST_PARTS} parts, got {count} in {len(message)} bytes")
    sizes = struct.unpack_from(f"<{count}I", message, _COUNT.size)
    start = (count + 1) * _COUNT.size
    if max(sizes) > max_part_bytes or start + sum(sizes) != len(message):
        raise ValueError(f"parts of at most {max_part_bytes} bytes that fill the message, got one of {max(sizes)}")
    parts = []
    for size in sizes:
        parts.append(message[start : start + size])
        start += size
    return parts


def pieces(message: bytes, max_payload: int) -> Iterator[tuple[Kind, bytes]]:
    """Yield a message's bytes as they fit into frames, each with its kind."""
    size = max_payload - _HEAD.size
    if len(message) <= size:
        yield Kind.LAST, message
        return
    for start in range(0, len(message), size):
        yield Kind.LAST if start + size >= len(message) else Kind.MORE, message[start : start + size]
