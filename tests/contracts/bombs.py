"""Give the decoder messages that are built to cost a reader far more than they cost to send, with little memory.

`python -m tests.contracts.bombs`: each must decode or be refused for its rule, within a limit on the memory of the
process and with warnings as errors. Linux only.
"""

import faulthandler
import resource
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tests.contracts.other_encodings import record, varint
from tests.contracts.valid_messages import uniform_message
from tokenbus_contracts import ContractError, Limits, decode

MEMORY_ALLOWANCE = 6 * Limits.schema().max_message_bytes
"""What the process may take beyond what it has when it begins, in bytes.

The worst that was measured: a message of the largest size, twice while it is made, and two to three times its size
for 4M unpacked counts in the parser, which doubles its array as it grows. One more is slack. A reader that believes
a length, a count or a depth that a message only claims needs hundreds of times as much, and fails here.
"""
_MOST = 8 * 2**20
_HEADER = record(1, 2, uniform_message(0).header.SerializeToString())


class Bomb(NamedTuple):
    """One message, made only when it is needed; verdict is the rule it breaks, or "accepted"."""

    name: str
    verdict: str
    make: Callable[[], bytes]


def _filled(piece: bytes) -> bytes:
    """Return a valid empty message, and then a piece over and over up to the largest message."""
    return _HEADER + piece * ((_MOST - len(_HEADER)) // len(piece))


def _packed(number: int) -> bytes:
    return _HEADER + record(number, 2, b"\1" * (_MOST - len(_HEADER) - len(record(number, 2, b"", 4))), 4)


def _nested() -> bytes:
    depth = (_MOST - len(_HEADER)) // 2
    return _HEADER + varint(3 << 3 | 3) * depth + varint(3 << 3 | 4) * depth


def _lie(number: int, length: int) -> bytes:
    return _HEADER + varint(number << 3 | 2) + varint(length) + b"\1" * 64


def _lies() -> Iterator[Bomb]:
    for number, name in ((1, "header"), (2, "request_ids"), (5, "statuses"), (100, "an unknown field")):
        for length in (2**31 - 1, 2**31, 2**32, 2**63, 2**64 - 1):
            yield Bomb(f"{name} of {length} bytes that are not there", "malformed", partial(_lie, number, length))


BOMBS = (
    Bomb("4M counts, unpacked", "items", lambda: _filled(record(6, 0, b"\1"))),
    Bomb("2.8M packed columns of one count", "items", lambda: _filled(record(6, 2, b"\1"))),
    Bomb("8M statuses, packed", "items", lambda: _packed(5)),
    Bomb("1M keys, packed", "items", lambda: _packed(2)),
    Bomb("0.9M keys, unpacked", "items", lambda: _filled(record(2, 1, bytes(8)))),
    Bomb("two columns of values in one", "items", lambda: _HEADER + record(15, 2, bytes(_MOST // 2 - 64)) * 2),
    Bomb("1.7M values, unpacked", "length", lambda: _filled(record(15, 5, bytes(4)))),
    Bomb("4M columns of nothing", "accepted", lambda: _filled(record(6, 2, b""))),
    Bomb("4M unknown fields", "accepted", lambda: _filled(record(2, 0, b"\0"))),
    Bomb("4M unknown groups", "accepted", lambda: _filled(b"\x1b\x1c")),
    Bomb("4M headers", "accepted", lambda: _filled(record(1, 2, b""))),
    Bomb("4M groups within each other", "malformed", _nested),
    Bomb("8M groups without an end", "malformed", lambda: _filled(b"\x1b")),
    Bomb("a name of 8 MiB", "bytes", lambda: _HEADER + record(1, 2, record(3, 2, b"w" * (_MOST - 200)))),
    Bomb("8 MiB of zeros", "malformed", lambda: bytes(_MOST)),
    Bomb("8 MiB of ones", "malformed", lambda: b"\xff" * _MOST),
    Bomb("one byte more than 8 MiB", "bytes", lambda: bytes(_MOST + 1)),
    *_lies(),
)


def _verdict(data: bytes) -> str:
    try:
        decode(data, Limits.schema())
    except ContractError as error:
        return error.rule.value
    return "accepted"


def main() -> None:
    """Decode each message; raise AssertionError for one that is refused for another rule, or not."""
    faulthandler.enable()
    warnings.simplefilter("error")
    pages = Path("/proc/self/statm").read_text().split(maxsplit=1)[0]
    most = int(pages) * resource.getpagesize() + MEMORY_ALLOWANCE
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))
    for bomb in BOMBS:
        if (found := _verdict(bomb.make())) != bomb.verdict:
            raise AssertionError(f"{bomb.name}: {found} instead of {bomb.verdict}")


if __name__ == "__main__":
    main()
