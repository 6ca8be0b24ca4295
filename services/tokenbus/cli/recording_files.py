"""The files of `tokenbus record`, one for each life of a worker."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import quote

from tokenbus.cli.errors import CommandError
from tokenbus.cli.export import check_folder, recording_of, refuse_existing, table_file, unfinished
from tokenbus.logs import logger
from tokenbus.printable import reason_of
from tokenbus.recordings.items import Recorder, StreamItem

if TYPE_CHECKING:
    from tokenbus.recordings.parquet import TokenFile

_COUNTS = ("items", "payload_bytes", "gaps", "missing_items", "repeated_items")
_log = logger("record")


@dataclass(slots=True)
class _Open:
    path: Path
    file: BinaryIO
    recorder: Recorder
    part: Path | None = None
    """The Parquet file that replaces this recording when it is complete."""
    table: "TokenFile | None" = None

    def write(self, item: StreamItem) -> None:
        with _writing(self.path):
            if not (data := self.recorder.add(item)):
                return
            self.file.write(data)
            self.file.flush()  # the file then has the item, however this process ends
            if self.table is not None:
                table, self.table = self.table, None  # if writing fails, `close` keeps the recording
                table.add(item)
                self.table = table

    def close(self) -> None:
        with _writing(self.path):
            self.file.close()
            if self.table is not None and self.part is not None:
                self.table.close()
                unfinished(self.part).replace(self.part)
                self.path.unlink()


class Files:
    """Writes each life of a worker to its own file; raises CommandError if a file cannot be written."""

    def __init__(self, pattern: str, part_bytes: int = 0) -> None:
        """Check the file name pattern; raises CommandError if the file exists or its directory does not.

        With `part_bytes` each life gets a folder of Parquet files of about that many bytes of items.
        """
        self._pattern = pattern
        self._part_bytes = part_bytes
        self._open: dict[str, tuple[Path, _Open]] = {}
        """By worker: the file or folder of its latest life, and the open file."""
        self._taken: set[Path] = set()
        self.recorders: dict[Path, Recorder] = {}
        if "{worker}" not in pattern and "{epoch}" not in pattern:
            refuse_existing(Path(pattern))
        if "{" not in str(folder := Path(pattern).parent):
            check_folder(folder)

    def total(self, count: str) -> int:
        """Return the sum of one of `_COUNTS` over all files."""
        return sum(int(getattr(each, count)) for each in self.recorders.values())

    def write(self, item: StreamItem) -> None:
        path, file = self._open.get(item.worker_id, (None, None))
        if path is None or file is None or file.recorder.epoch != item.epoch:
            self._close(item.worker_id)
            path = self._path_of(item.worker_id, item.epoch)
            file = self._begun(path, item, 0)
        elif self._part_bytes and file.recorder.payload_bytes >= self._part_bytes:
            self._close(item.worker_id)
            file = self._begun(path, item, file.recorder.last_sequence + 1)
        gaps = file.recorder.gaps
        file.write(item)
        if file.recorder.gaps > gaps:
            _log.warning("items are missing", stream=item.worker_id, epoch=item.epoch, before=item.sequence)

    def close(self) -> None:
        for worker_id in list(self._open):
            self._close(worker_id)

    def summary(self) -> dict[str, Any]:
        """Return the counts as JSON values; 64-bit integers are strings, as in `check`."""
        return {
            **{count: self.total(count) for count in ("items", "payload_bytes", "missing_items")},
            "files": [
                {
                    "file": str(path),
                    "worker_id": each.hello.worker_id,
                    "epoch": str(each.epoch),
                    "first_sequence": str(each.first_sequence),
                    "last_sequence": str(each.last_sequence),
                    **{count: getattr(each, count) for count in _COUNTS},
                }
                for path, each in self.recorders.items()
            ],
        }

    def _close(self, worker_id: str) -> None:
        if worker_id in self._open:
            _, file = self._open.pop(worker_id)
            file.close()

    def _begun(self, path: Path, item: StreamItem, first_sequence: int) -> _Open:
        recorder = Recorder(item.epoch, item.hello, first_sequence)
        part = None
        with _writing(path):
            if self._part_bytes:
                path.mkdir(exist_ok=bool(first_sequence))
                part = path / f"part-{first_sequence or item.sequence:020}.parquet"
            written = path if part is None else recording_of(part)
            table = None if part is None else table_file("tokens", unfinished(part))
            stream = written.open("xb")
            fcntl.flock(stream, fcntl.LOCK_EX)  # `tokenbus export` does not touch a folder that is being written
            file = _Open(written, stream, recorder, part, table)
        self.recorders[part or path] = recorder
        self._open[item.worker_id] = path, file
        return file

    def _path_of(self, worker_id: str, epoch: int) -> Path:
        # A worker's id is not trusted, and may look like a path.
        safe = quote(worker_id, safe="").replace(".", "%2E")
        path = Path(self._pattern.replace("{worker}", safe).replace("{epoch}", str(epoch)))
        if path in self._taken:
            path = path.with_name(f"{path.name}.{safe}.{epoch}")
        refuse_existing(path)
        self._taken.add(path)
        return path


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CommandError(f"{path}: {reason_of(error)}") from None
