"""tokenbus export."""

import argparse
import fcntl
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenbus.cli.errors import WRONG_USE, CommandError
from tokenbus.cli.terminal import Progress
from tokenbus.printable import printable
from tokenbus.recordings.items import RecordingError, read_recording

if TYPE_CHECKING:
    from tokenbus.recordings.parquet import TokenFile

_DESCRIPTION = """\
Convert a recording to Parquet, with a row for each token in the stream's order, or a row for each request in the order
of their ends, with lists of its tokens. It needs the extra `parquet`: pip install 'tokenbus[parquet]'. Existing files
are never overwritten.

If a recording is broken, for example because its recorder was killed, the items before the fault are written, a line
says where the fault is, and the status is 1. If `record --format parquet` was killed, its folder contains the recording
of the unfinished part: name the folder to convert that part.

examples:
  tokenbus export steps.tokenbus --to steps.parquet
  tokenbus export steps.tokenbus --to requests.parquet --rows requests
  tokenbus export rollouts/worker-0-7                     complete the folder of a killed recorder
"""


def declare(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    parser.add_argument("files", nargs=1, metavar="RECORDING", help="a recording, or a folder to complete")
    parser.add_argument("--to", metavar="FILE", help="the Parquet file to write")
    parser.add_argument("--rows", choices=("tokens", "requests"), default="tokens", help="one row per token or request")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON document")


def recording_of(part: Path) -> Path:
    """Return the path of the recording of an unfinished part; readers of a folder skip names with `_`."""
    return part.with_name(f"_{part.stem}.tokenbus")


def unfinished(path: Path) -> Path:
    """Return the path of a Parquet file until it is complete."""
    return path.with_name(f"_{path.name}.unfinished")


def refuse_existing(path: Path) -> None:
    if path.exists():
        raise CommandError(f"{path}: exists already; nothing is overwritten", WRONG_USE)


def check_folder(path: Path) -> None:
    """Raise CommandError if no file can be created in a folder."""
    if not path.is_dir():
        raise CommandError(f"{path}: not a directory", WRONG_USE)
    if not os.access(path, os.W_OK | os.X_OK):
        raise CommandError(f"{path}: not writable", WRONG_USE)


def require_parquet() -> None:
    """Raise CommandError if the libraries of the extra `parquet` are missing."""
    try:
        import tokenbus.recordings.parquet  # noqa: F401, PLC0415 - its library is an extra
    except ImportError as error:
        library = str(error.name).partition(".")[0]
        raise CommandError(f"Parquet needs {library}: pip install 'tokenbus[parquet]'") from None


def table_file(rows: str, path: Path) -> "TokenFile":
    """Create a Parquet file, after removing what an interrupted export left behind or a planted link."""
    from tokenbus.recordings.parquet import RequestFile, TokenFile  # noqa: PLC0415 - its library is an extra

    path.unlink(missing_ok=True)
    path.touch(exist_ok=False)
    return (RequestFile if rows == "requests" else TokenFile)(path)


def run(options: argparse.Namespace) -> int:
    require_parquet()
    source = Path(options.files[0])
    if source.is_dir():
        if options.to is not None or options.rows != "tokens":
            raise CommandError("--to, --rows: only with a recording, not with a folder to complete", WRONG_USE)
        summaries = [_completed(each) for each in sorted(source.glob("_part-*.tokenbus"))]
    else:
        summaries = [_exported(source, _target(options.to), options.rows)]
        if summaries[0]["fault"] and not summaries[0]["items"]:
            raise CommandError(printable(summaries[0]["fault"]))
    if options.json:
        print(json.dumps({"files": summaries}, indent=2))
    else:
        print("\n".join(printable(_line(each)) for each in summaries) or printable(f"{source}: complete"))
    return 1 if any(each["fault"] or each["refused_items"] for each in summaries) else 0


def _target(name: str | None) -> Path:
    if name is None:
        raise CommandError("--to FILE is missing", WRONG_USE)
    path = Path(name)
    refuse_existing(path)
    check_folder(path.parent)
    return path


def _completed(recording: Path) -> dict[str, Any]:
    part = _target(str(recording.with_name(f"{recording.stem.removeprefix('_')}.parquet")))
    with recording.open("rb") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CommandError(f"{recording.parent}: a recorder is writing it; stop the recorder", WRONG_USE) from None
        summary = _exported(recording, part, "tokens")
    if summary["fault"]:
        name = f"_broken{recording.stem.removeprefix('_part')}"
        others = len(list(recording.parent.glob(f"{name}*")))
        kept = recording.rename(recording.with_name(f"{name}{f'-{others}' if others else ''}{recording.suffix}"))
        summary["fault"] += f"; kept as {kept.name}"
    else:
        recording.unlink()
    return summary


def _exported(source: Path, path: Path, rows: str) -> dict[str, Any]:
    fault: RecordingError | None = None
    progress = Progress()
    table = table_file(rows, unfinished(path))
    try:
        try:
            for item in read_recording(source):
                table.add(item)
                progress.show(lambda: f"{table.items} items read")
        except RecordingError as error:
            fault = error
        table.close()
        if fault is None or table.items:
            unfinished(path).replace(path)
    finally:
        progress.clear()
        unfinished(path).unlink(missing_ok=True)
    return {
        "file": str(path),
        "tokens": table.tokens,
        "items": table.items,
        "missing_items": table.missing_items,
        "refused_items": table.refused_items,
        "fault": None if fault is None else str(fault),
    }


def _line(summary: dict[str, Any]) -> str:
    missing = f", {summary['missing_items']} MISSING in the recording" if summary["missing_items"] else ""
    refused = f", {summary['refused_items']} REFUSED by the contract" if summary["refused_items"] else ""
    recovered = f"; RECOVERED up to the fault: {summary['fault']}" if summary["fault"] else ""
    return f"{summary['file']}: {summary['tokens']} tokens of {summary['items']} items{missing}{refused}{recovered}"
