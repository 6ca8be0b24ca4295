"""The files of `tokenbus record`. Each epoch of a worker has a separate file."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

from tokenbus.cli.errors import CommandError
from tokenbus.cli.export import check_folder, refuse_existing
from tokenbus.logs import logger
from tokenbus.printable import reason_of
from tokenbus.recordings.items import Recorder, StreamItem

_COUNTS = ("items", "payload_bytes", "gaps", "missing_items", "repeated_items")
_log = logger("record")


@dataclass(slots=True)
class _Open:
    path: Path
    file: BinaryIO
    recorder: Recorder


class Files:
    """Writes each epoch of a worker to a separate file. Raises CommandError if a file cannot be written."""

    def __init__(self, pattern: str) -> None:
        """Check the pattern of file names. Raises CommandError if the file exists or the folder is missing."""
        self._pattern = pattern
        self._open: dict[str, _Open] = {}
        """The file of the latest epoch of each worker."""
        self.recorders: dict[Path, Recorder] = {}
        if "{worker}" not in pattern and "{epoch}" not in pattern:
            refuse_existing(Path(pattern))
        if "{" not in str(folder := Path(pattern).parent):
            check_folder(folder)

    def total(self, count: str) -> int:
        """Return the sum over all files of one count in `_COUNTS`."""
        return sum(int(getattr(each, count)) for each in self.recorders.values())

    def write(self, item: StreamItem) -> None:
        life = self._open.get(item.worker_id)
        if life is None or life.recorder.epoch != item.epoch:
            self._close(item.worker_id)
            life = self._open[item.worker_id] = self._begun(item)
        gaps = life.recorder.gaps
        with _writing(life.path):
            if data := life.recorder.add(item):
                life.file.write(data)
                life.file.flush()  # keep the item even if this process is killed
        if life.recorder.gaps > gaps:
            _log.warning("items are missing", stream=item.worker_id, epoch=item.epoch, before=item.sequence)

    def close(self) -> None:
        for worker_id in list(self._open):
            self._close(worker_id)

    def summary(self) -> dict[str, Any]:
        """Return the counts as JSON values. As in `check`, 64-bit integers are strings."""
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
        if life := self._open.pop(worker_id, None):
            with _writing(life.path):
                life.file.close()

    def _begun(self, item: StreamItem) -> _Open:
        # The id of a worker is untrusted, and may look like a path.
        safe = quote(item.worker_id, safe="").replace(".", "%2E")
        path = Path(self._pattern.replace("{worker}", safe).replace("{epoch}", str(item.epoch)))
        if path in self.recorders:
            path = path.with_name(f"{path.name}.{safe}.{item.epoch}")
        refuse_existing(path)
        with _writing(path):
            life = _Open(path, path.open("xb"), Recorder(item.epoch, item.hello))
        self.recorders[path] = life.recorder
        return life


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CommandError(f"{path}: {reason_of(error)}") from None
