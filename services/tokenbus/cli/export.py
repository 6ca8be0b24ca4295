"""tokenbus export: writes recordings as Parquet files."""

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
Write a recording as a Parquet file: a row for each token, in the stream's order, or a row for each request, in the
order in which they end, with lists of its tokens. docs/recording.md has the columns. It needs the extra parquet. Files
that exist are not written over.

Of a broken recording, as one whose recorder was killed, it writes the items before the fault, says in a line how many
and where the fault is, and ends with status 1. A folder of `record --format parquet` whose recorder was killed is
completed: the recording of the part that was not finished becomes that part.

examples:
  tokenbus export steps.tokenbus --to steps.parquet
  tokenbus export steps.tokenbus --to requests.parquet --rows requests
  tokenbus export rollouts/worker-0-7                     a folder that a killed recorder left
"""


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = _DESCRIPTION
    parser.add_argument(
        "files", nargs=1, metavar="RECORDING", help="what `tokenbus record` wrote: a recording, or a folder to complete"
    )
    parser.add_argument("--to", metavar="FILE", help="the Parquet file to write")
    parser.add_argument("--rows", choices=("tokens", "requests"), default="tokens", help="what a row is (tokens)")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON document")


def recording_of(part: Path) -> Path:
    """Return the recording of a part of a folder that is not finished; readers of a folder skip such names."""
    return part.with_name(f"_{part.stem}.tokenbus")


def unfinished(path: Path) -> Path:
    """Return where a Parquet file is until it is complete."""
    return path.with_name(f"_{path.name}.unfinished")


def check_folder(path: Path) -> None:
    """Raise a CommandError where no file can be made, before the work for it begins."""
    if not path.is_dir():
        raise CommandError(f"{path}: no directory", WRONG_USE)
    if not os.access(path, os.W_OK | os.X_OK):
        raise CommandError(f"{path}: nothing may be written there", WRONG_USE)


def require_parquet() -> None:
    """Raise a CommandError that says how to install what Parquet needs, if it is missing."""
    try:
        import tokenbus.recordings.parquet  # noqa: F401, PLC0415 - its library is an extra
    except ImportError as error:
        raise lacking(error) from None


def lacking(error: ImportError) -> CommandError:
    """Return the error that says how to install what Parquet needs."""
    return CommandError(f"Parquet needs {str(error.name).partition('.')[0]}: install the extra, tokenbus[parquet]")


def table_file(rows: str, path: Path) -> "TokenFile":
    """Return what writes a Parquet file, in the place of one that an interrupted export left, or of a planted link."""
    from tokenbus.recordings.parquet import RequestFile, TokenFile  # noqa: PLC0415 - its library is an extra

    path.unlink(missing_ok=True)
    path.touch(exist_ok=False)
    return (RequestFile if rows == "requests" else TokenFile)(path)


def run(options: argparse.Namespace) -> int:
    """Write the files; return 1 if a recording is broken, or has items that break the contract."""
    require_parquet()
    source = Path(options.files[0])
    if source.is_dir():
        if options.to is not None or options.rows != "tokens":
            raise CommandError("--to, --rows: with a recording, not with a folder to complete", WRONG_USE)
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
        raise CommandError("--to FILE: where to write", WRONG_USE)
    path = Path(name)
    if path.exists():
        raise CommandError(f"{path}: exists already, and is not written over", WRONG_USE)
    check_folder(path.parent)
    return path


def _completed(recording: Path) -> dict[str, Any]:
    part = _target(str(recording.with_name(f"{recording.stem.removeprefix('_')}.parquet")))
    with recording.open("rb") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CommandError(f"{recording.parent}: a recorder writes it; stop that first", WRONG_USE) from None
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
