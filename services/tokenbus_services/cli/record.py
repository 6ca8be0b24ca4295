"""tokenbus record: writes workers' streams to files, one for each life of a worker."""

import argparse
import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

from tokenbus_services.cli.arguments import whole
from tokenbus_services.cli.configuration import declare_settings, load_settings, reporting_faults
from tokenbus_services.cli.errors import WRONG_USE, CommandError
from tokenbus_services.cli.watching import watched, widened
from tokenbus_services.items import Recorder, StreamItem
from tokenbus_services.logs import logger
from tokenbus_services.printable import printable
from tokenbus_services.settings import Settings
from tokenbus_services.signals import stop_on_signals
from tokenbus_services.terminal import Progress

_DESCRIPTION = """\
Write a worker's stream to a file, as it passes through a processor: the same bytes that the worker published, with its
handshake before them, for `tokenbus replay` or to look into. Each life of a worker is a stream of its own and has a
file of its own: {worker} and {epoch} in FILE stand for both. Where two streams would have one name, the later one's
file has .WORKER.EPOCH behind it. Files that exist are not written over: then it ends with status 2.

Items that it reads too slowly are missing: the file has a gap in their place, a line says how many, and the status is
1. It starts with the first item that it sees; to have all of a stream, start it before the worker. It ends after
--count items, or with a signal. docs/recording.md has the format.

examples:
  tokenbus record steps.tokenbus --worker worker-1            one worker
  tokenbus record 'streams/{worker}-{epoch}.tokenbus'         every worker, a file for each of their lives
  tokenbus record steps.tokenbus --count 1000 --json          a summary for machines

settings that matter: bus.clients_address, bus.key_file and bus.server_key.
"""
_COUNTS = ("items", "payload_bytes", "gaps", "missing_items", "repeated_items")
"""What a recorder counts."""
_log = logger("record")


class Files:
    """The files of the streams, one for each life of a worker; raises a CommandError if one cannot be written."""

    def __init__(self, pattern: str) -> None:
        """Check the pattern of the files' names; raises a CommandError for a file that exists or has no directory."""
        self._pattern = pattern
        self._open: dict[str, tuple[Path, BinaryIO]] = {}
        """By worker: the file of its latest life."""
        self.recorders: dict[Path, Recorder] = {}
        if "{worker}" not in pattern and "{epoch}" not in pattern:
            self._refuse_existing(Path(pattern))
        if "{" not in str(Path(pattern).parent) and not Path(pattern).parent.is_dir():
            raise CommandError(f"{Path(pattern).parent}: no directory", WRONG_USE)

    def total(self, count: str) -> int:
        """Return one of `_COUNTS` of all streams together."""
        return sum(int(getattr(each, count)) for each in self.recorders.values())

    def write(self, item: StreamItem) -> None:
        """Write an item to its stream's file."""
        path, file = self._open.get(item.worker_id, (None, None))
        if path is None or file is None or self.recorders[path].epoch != item.epoch:
            self._close(item.worker_id)
            path = self._path_of(item.worker_id, item.epoch)
            with _writing(path):
                file = path.open("xb")
            self._open[item.worker_id] = path, file
            self.recorders[path] = Recorder(item.epoch, item.hello)
        recorder = self.recorders[path]
        gaps = recorder.gaps
        data = recorder.add(item)
        if recorder.gaps > gaps:
            _log.warning("items are missing", stream=item.worker_id, epoch=item.epoch, before=item.sequence)
        with _writing(path):
            file.write(data)
            file.flush()  # so that the file has each item, however this process ends

    def close(self) -> None:
        """Close every file."""
        for worker_id in list(self._open):
            self._close(worker_id)

    def summary(self) -> dict[str, Any]:
        """Return what was recorded, as plain values; an integer of 64 bits is a string, as in `check`."""
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
        """Close the file of a worker's latest life, if it has one."""
        if worker_id in self._open:
            path, file = self._open.pop(worker_id)
            with _writing(path):
                file.close()

    def _path_of(self, worker_id: str, epoch: int) -> Path:
        # A worker's name comes from outside, and may look like a path.
        safe = quote(worker_id, safe="").replace(".", "%2E")
        path = Path(self._pattern.replace("{worker}", safe).replace("{epoch}", str(epoch)))
        if path in self.recorders:
            path = path.with_name(f"{path.name}.{safe}.{epoch}")
        self._refuse_existing(path)
        return path

    def _refuse_existing(self, path: Path) -> None:
        if path.exists():
            raise CommandError(f"{path}: exists already, and is not written over", WRONG_USE)


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = _DESCRIPTION
    parser.add_argument("files", nargs=1, metavar="FILE", help="where to write; {worker} and {epoch} are filled in")
    parser.add_argument(
        "--worker", default="", metavar="ID", help="the worker whose streams are recorded (default: every worker)"
    )
    parser.add_argument("--count", type=whole(), default=0, metavar="N", help="end after so many items in all")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON document")
    declare_settings(parser, {"--clients-address": "bus.clients_address"})


def run(options: argparse.Namespace) -> int:
    """Record until a signal, or until there was enough; return 1 if something is missing."""
    settings = widened(load_settings(options))
    files = Files(options.files[0])
    with reporting_faults():
        asyncio.run(_run(settings, options, files))
    if options.json:
        print(json.dumps(files.summary(), indent=2))
    else:
        _tell(files)
    return 1 if files.total("missing_items") else 0


async def _run(settings: Settings, options: argparse.Namespace, files: Files) -> None:
    with stop_on_signals() as stop:
        await record(watched(settings, options.worker, stop), files, options.count)


async def record(items: AsyncGenerator[StreamItem, None], files: Files, count: int = 0) -> None:
    """Write each item to its stream's file, until `count` items were written; 0: until there are no more."""
    progress = Progress()
    try:
        async with aclosing(items):
            async for item in items:
                files.write(item)
                progress.show(lambda: f"{files.total('items')} items, {files.total('payload_bytes')} bytes recorded")
                if files.total("items") == count:
                    return
    finally:
        progress.clear()
        files.close()


def _tell(files: Files) -> None:
    for each in files.summary()["files"]:
        which = f"{each['worker_id']}/{each['epoch']}, {each['first_sequence']} to {each['last_sequence']}"
        missing = f", {each['missing_items']} MISSING in {each['gaps']} gaps" if each["gaps"] else ""
        print(printable(f"{each['file']}: {each['items']} items of {which}, {each['payload_bytes']} bytes{missing}"))
    if not files.recorders:
        print("nothing was seen")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CommandError(f"{path}: {(error.strerror or str(error)).lower()}") from None
