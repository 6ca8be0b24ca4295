"""Other encodings of a message: what every protobuf parser must read as the same message."""

from collections.abc import Callable
from random import Random

from google.protobuf.message import Message

_LENGTH = 2
_UNKNOWN = 100


def varint(value: int, size: int = 0) -> bytes:
    digits = bytearray()
    while value > 0x7F or len(digits) + 1 < size:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def record(number: int, wire_type: int, contents: bytes, size: int = 0) -> bytes:
    """Return one field, its key and length padded to a size."""
    length = varint(len(contents), size) if wire_type == _LENGTH else b""
    return varint(number << 3 | wire_type, size) + length + contents


def reencoded(rng: Random, message: Message) -> bytes:
    """Return the message with its fields in another order, beside unknown ones, and some of them in two pieces.

    The golden messages have the rest: numbers that are padded or too wide, columns that are not packed.
    """
    first, second = _halves(rng, message, is_cut=rng.random() < 0.5)
    return first + second


def _halves(rng: Random, message: Message, *, is_cut: bool) -> tuple[bytes, bytes]:
    """Return the message as two of which the second adds to the first; the first is empty if nothing is cut."""
    halves: tuple[list[bytes], list[bytes]] = [], []
    for field, value in message.ListFields():
        if field.message_type is not None:
            parts = [half and record(field.number, _LENGTH, half) for half in _halves(rng, value, is_cut=is_cut)]
        elif field.is_repeated:
            cut = rng.choice((0, rng.randint(0, len(value)), len(value))) if is_cut else 0
            parts = [_alone(message, field.name, values) for values in (value[:cut], value[cut:])]
        else:
            parts = rng.sample([_alone(message, field.name, value), b""], 2)
            parts = parts if is_cut else [b"", b"".join(parts)]
        for half, part in zip(halves, parts, strict=True):
            half.append(part)
    halves[1].extend([record(_UNKNOWN, _LENGTH, b"\xff" * 3)] * rng.choice((0, 0, 0, 1)))
    first, second = (b"".join(rng.sample(half, len(half))) for half in halves)
    return first, second


def _alone(message: Message, name: str, value: object) -> bytes:
    kind: Callable[..., Message] = type(message)
    return kind(**{name: value}).SerializeToString()
