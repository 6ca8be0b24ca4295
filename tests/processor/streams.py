"""A stream on its own: what the tests put in, and what comes out."""

from zlib import crc32

from tests.in_process.builders import EPOCH, encoded, hello_of, item_of, settings
from tokenbus.processor.stream import ItemOutcome, LostItems, ReceivedItem, Stream
from tokenbus.testing import row_shapes


def stream(first: int = 1, **processor: object) -> Stream:
    chosen = settings({f"processor.{name}": value for name, value in processor.items()})
    made = Stream(hello_of(first_sequence=first, next_sequence=first), EPOCH, chosen.limits, chosen.processor)
    made.open_connection()
    return made


def payload(sequence: int, size: int = 1) -> bytes:
    return encoded(row_shapes(range(1, size + 1), position=sequence), sequence)


def take(to: Stream, *sequences: int, checksum: bool = True) -> list[ItemOutcome]:
    made = {sequence: payload(sequence) for sequence in sequences}
    items = [item_of(made[n], n, checksum=crc32(made[n]) if checksum else None) for n in sequences]
    return [to.receive(item, made[item.sequence]) for item in items]


def come(to: Stream) -> list[int | tuple[int, int]]:
    """Return what is in order: sequences, and runs that were lost."""
    return [
        entry.sequence if isinstance(entry, ReceivedItem) else (entry.sequence, entry.last_sequence)
        for entry in order(to)
    ]


def order(to: Stream) -> list[ReceivedItem | LostItems]:
    return list(to.in_order(lambda _: True))
