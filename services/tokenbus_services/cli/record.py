"""tokenbus record: writes workers' streams to files, one for each life of a worker."""

import argparse
import asyncio
import fcntl
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import quote

from tokenbus_services.cli.arguments import whole
from tokenbus_services.cli.configuration import declare_settings, load_settings, reporting_faults
from tokenbus_services.cli.errors import WRONG_USE, CommandError
from tokenbus_services.cli.export import recording_of, require_parquet, table_file, unfinished
from tokenbus_services.cli.watching import watched, widened
from tokenbus_services.items import Recorder, StreamItem
from tokenbus_services.logs import logger
from tokenbus_services.printable import printable, reason_of
from tokenbus_services.settings import Settings
from tokenbus_services.signals import stop_on_signals
from tokenbus_services.terminal import Progress

if TYPE_CHECKING:
    from tokenbus_services.parquet import TokenFile

_DESCRIPTION = """\
Write a worker's stream to a file, as it passes through a processor: the same bytes that the worker published, with its
handshake before them. Each life of a worker is a stream of its own and has a
file of its own: {worker} and {epoch} in FILE stand for both. Where two streams would have one name, the later one's
file has .WORKER.EPOCH behind it. Files that exist are not written over: then it ends with status 2.

Items that it reads too slowly are missing: the file has a gap in their place, a line says how many, and the status is
1. It starts with the first item that it sees; to have all of a stream, start it before the worker. It ends after
--count items, or with a signal. docs/recording.md has the format.

With --format parquet FILE is a folder of Parquet files, with a row for each token. What its next file will have stands
in a recording beside them until then, so that one that is killed loses nothing: `tokenbus export` makes a file of it.

examples:
  tokenbus record steps.tokenbus --worker worker-1            one worker
  tokenbus record 'streams/{worker}-{epoch}.tokenbus'         every worker, a file for each of their lives
  tokenbus record steps.tokenbus --count 1000 --json          a summary for machines
  tokenbus record 'rollouts/{worker}-{epoch}' --format parquet       and then, say,
  duckdb -c "select avg(logprob) from 'rollouts/*/*.parquet'"

settings that matter: bus.clients_address, bus.key_file and bus.server_key.
"""
_PART_BYTES = 1 << 27
_COUNTS = ("items", "payload_bytes", "gaps", "missing_items", "repeated_items")
"""What a recorder counts."""
_log = logger("record")


@dataclass(slots=True)
class _Open:
    """The file of a stream that is being written."""

    path: Path
    file: BinaryIO
    recorder: Recorder
    part: Path | None = None
    """The Parquet file that takes this one's place when it is complete."""
    table: "TokenFile | None" = None

    def write(self, item: StreamItem) -> None:
        with _writing(self.path):
            if not (data := self.recorder.add(item)):
                return
            self.file.write(data)
            self.file.flush()  # so that the file has each item, however this process ends
            if self.table is not None:
                table, self.table = self.table, None  # if it fails, the recording stays
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
    """The files of the streams, one for each life of a worker; raises a CommandError if one cannot be written."""

    def __init__(self, pattern: str, part_bytes: int = 0) -> None:
        """Check the pattern of the files' names; raises a CommandError for a file that exists or has no directory.

        With `part_bytes` each stream has a folder of Parquet files, one for each so many bytes of items.
        """
        self._pattern = pattern
        self._part_bytes = part_bytes
        self._open: dict[str, tuple[Path, _Open]] = {}
        """By worker: the file or folder of its latest life, and the file that is written."""
        self._taken: set[Path] = set()
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
            _, file = self._open.pop(worker_id)
            file.close()

    def _begun(self, path: Path, item: StreamItem, first_sequence: int) -> _Open:
        """Begin a stream's file, or its folder's next one, which continues at a sequence."""
        recorder = Recorder(item.epoch, item.hello, first_sequence)
        part = None
        with _writing(path):
            if self._part_bytes:
                path.mkdir(exist_ok=bool(first_sequence))
                part = path / f"part-{first_sequence or item.sequence:020}.parquet"
            written = path if part is None else recording_of(part)
            table = None if part is None else table_file("tokens", unfinished(part))
            stream = written.open("xb")
            fcntl.flock(stream, fcntl.LOCK_EX)  # `tokenbus export` completes no folder that is still written
            file = _Open(written, stream, recorder, part, table)
        self.recorders[part or path] = recorder
        self._open[item.worker_id] = path, file
        return file

    def _path_of(self, worker_id: str, epoch: int) -> Path:
        # A worker's name comes from outside, and may look like a path.
        safe = quote(worker_id, safe="").replace(".", "%2E")
        path = Path(self._pattern.replace("{worker}", safe).replace("{epoch}", str(epoch)))
        if path in self._taken:
            path = path.with_name(f"{path.name}.{safe}.{epoch}")
        self._refuse_existing(path)
        self._taken.add(path)
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
    parser.add_argument("--format", choices=("tokenbus", "parquet"), default="tokenbus", help="of the files (tokenbus)")
    parser.add_argument(
        "--part-bytes",
        type=whole(),
        default=_PART_BYTES,
        metavar="N",
        help=f"with --format parquet: a file has items of so many bytes ({_PART_BYTES})",
    )
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON document")
    declare_settings(parser, {"--clients-address": "bus.clients_address"})


def run(options: argparse.Namespace) -> int:
    """Record until a signal, or until there was enough; return 1 if something is missing."""
    settings = widened(load_settings(options))
    if options.format == "parquet":
        require_parquet()
    files = Files(options.files[0], options.part_bytes if options.format == "parquet" else 0)
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
        raise CommandError(f"{path}: {reason_of(error)}") from None
