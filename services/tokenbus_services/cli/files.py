"""The files of `tokenbus record`: which stream is written where, and what is to be said of each."""

from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tokenbus_contracts.generated.client_pb2 import WatchedStream
from tokenbus_services.cli.errors import WRONG_USE, CommandError
from tokenbus_services.client import WatchedItem
from tokenbus_services.logs import logger
from tokenbus_services.recording import Recorder

_log = logger("record")


@dataclass(slots=True)
class _Recording:
    path: Path
    recorder: Recorder
    worker_id: str
    file: RawIOBase | None = None


class Files:
    """Writes each stream to a file of its own; what cannot be written is a CommandError."""

    def __init__(self, pattern: str) -> None:
        """Take how files are named, and refuse at once what could not be written later."""
        self._pattern = pattern
        self._open: dict[str, _Recording] = {}
        """By worker: the recording of its latest life."""
        self.recordings: list[_Recording] = []
        self.items = 0
        self.payload_bytes = 0
        if "{worker}" not in pattern and "{epoch}" not in pattern:
            self._refuse_existing(Path(pattern))
        if "{" not in str(Path(pattern).parent) and not Path(pattern).parent.is_dir():
            raise CommandError(f"{Path(pattern).parent}: no directory", WRONG_USE)

    @property
    def missing_items(self) -> int:
        """How many items of all streams were not seen, after the first of each."""
        return sum(each.recorder.missing_items for each in self.recordings)

    def write(self, stream: WatchedStream, watched: WatchedItem) -> None:
        """Write an item to its stream's file."""
        recording = self._recording_of(stream)
        recorder, item = recording.recorder, watched.item
        gaps, before = recorder.gaps, recorder.items
        data = recorder.add(item.sequence, item.payload_kind, watched.payload)
        if recorder.gaps > gaps:
            _log.warning("items are missing", stream=recording.worker_id, epoch=recorder.epoch, before=item.sequence)
        if recorder.items == before:
            return
        self.items += 1
        self.payload_bytes += len(watched.payload)
        try:
            if recording.file is None:
                # Without a buffer: what was seen is in the file, however this process ends.
                recording.file = recording.path.open("xb", buffering=0)
            _write(recording.file, data)
        except OSError as error:
            raise _unwritable(recording.path, error) from None

    def close(self) -> None:
        """Close every file."""
        for recording in self._open.values():
            _close(recording)
        self._open.clear()

    def summary(self) -> dict[str, Any]:
        """Return what was recorded, as plain values; an integer of 64 bits is a string, as in `check`."""
        return {
            "items": self.items,
            "payload_bytes": self.payload_bytes,
            "missing_items": self.missing_items,
            "files": [
                {
                    "file": str(each.path),
                    "worker_id": each.worker_id,
                    "epoch": str(each.recorder.epoch),
                    "first_sequence": str(each.recorder.first_sequence),
                    "last_sequence": str(each.recorder.last_sequence),
                    "items": each.recorder.items,
                    "payload_bytes": each.recorder.payload_bytes,
                    "gaps": each.recorder.gaps,
                    "missing_items": each.recorder.missing_items,
                    "repeated_items": each.recorder.repeated_items,
                }
                for each in self.recordings
            ],
        }

    def _recording_of(self, stream: WatchedStream) -> _Recording:
        worker_id = stream.hello.worker_id
        known = self._open.get(worker_id)
        if known is not None and known.recorder.epoch == stream.epoch:
            return known
        if known is not None:
            _close(known)
        recording = _Recording(self._path_of(worker_id, stream.epoch), Recorder(stream.epoch, stream.hello), worker_id)
        self._open[worker_id] = recording
        self.recordings.append(recording)
        return recording

    def _path_of(self, worker_id: str, epoch: int) -> Path:
        # A worker's name comes from outside, and may look like a path.
        safe = quote(worker_id, safe="").replace(".", "%2E")
        path = Path(self._pattern.replace("{worker}", safe).replace("{epoch}", str(epoch)))
        if any(each.path == path for each in self.recordings):
            path = path.with_name(f"{path.name}.{safe}.{epoch}")
        self._refuse_existing(path)
        return path

    def _refuse_existing(self, path: Path) -> None:
        if path.exists():
            raise CommandError(f"{path}: exists already, and is not written over", WRONG_USE)


def _write(file: RawIOBase, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) or 0 :]


def _close(recording: _Recording) -> None:
    if recording.file is not None:
        try:
            recording.file.close()
        except OSError as error:
            raise _unwritable(recording.path, error) from None


def _unwritable(path: Path, error: OSError) -> CommandError:
    return CommandError(f"{path}: {(error.strerror or str(error)).lower()}")
