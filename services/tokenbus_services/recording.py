"""Recordings: one life of a worker in a file; docs/recording.md has the format."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenbus_contracts.generated.stream_pb2 import Hello
from tokenbus_services.items import StreamItem, gap_entry, hello_entry, item_entry, read_items

_POSITION = re.compile(r"([0-9]{1,19})\.([0-9]{1,20})")


def read_recording(path: str | os.PathLike[str], *, after: str | None = None) -> Iterator[StreamItem]:
    """Iterate over the items of a recording that `tokenbus record` wrote. It holds one item at a time.

    Args:
        path: the file.
        after: the `position` of the last item that was taken, to go on behind it; default: the beginning.

    Returns:
        an iterator of each item as a `StreamItem`.

    Raises:
        OSError: the file cannot be read.
        RecordingError: the recording is broken; the items before the fault were given.
        ValueError: `after` is not a position.

    Example:
        def tokens_of(path: str) -> int:
            return sum(item.batch.token_ids.size for item in tokenbus.read_recording(path) if item.batch is not None)
    """
    place = None
    if after is not None:
        if (match := _POSITION.fullmatch(after)) is None:
            raise ValueError(f"after: the position of an item of a recording, got {after[:80]!r}")
        place = int(match[1]), int(match[2])
    return _read(Path(path), place)


def _read(path: Path, place: tuple[int, int] | None) -> Iterator[StreamItem]:
    with path.open("rb") as file:
        yield from read_items(file, name=str(path), after=place)


@dataclass(slots=True)
class Recorder:
    """Encodes the items of one life of a worker as a recording, from the first item on."""

    epoch: int
    hello: Hello
    first_sequence: int = 0
    last_sequence: int = 0
    items: int = 0
    payload_bytes: int = 0
    gaps: int = 0
    repeated_items: int = 0

    @property
    def missing_items(self) -> int:
        """How many items are missing between the first and the last."""
        return self.last_sequence - self.first_sequence + 1 - self.items if self.items else 0

    def add(self, item: StreamItem) -> bytes:
        """Return the bytes to write for an item; none for an item that was added before."""
        if self.items and item.sequence <= self.last_sequence:
            self.repeated_items += 1  # its worker sent it again, to a processor that was started again
            return b""
        before = b""
        if not self.items:
            self.first_sequence = item.sequence
            before = hello_entry(self.epoch, self.hello, item.sequence)
        elif item.sequence > self.last_sequence + 1:
            self.gaps += 1
            before = gap_entry(self.epoch, self.last_sequence + 1, item.sequence - 1)
        self.last_sequence = item.sequence
        self.items += 1
        self.payload_bytes += len(item.payload)
        return before + item_entry(self.epoch, item.sequence, item.kind, item.payload)
