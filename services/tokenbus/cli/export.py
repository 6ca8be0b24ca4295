"""tokenbus export."""

import argparse
import json
import os
from pathlib import Path

from tokenbus.cli.errors import WRONG_USE, CommandError
from tokenbus.cli.terminal import Progress
from tokenbus.printable import printable
from tokenbus.recordings.items import RecordingError, read_recording

_DESCRIPTION = """\
Convert a recording to Parquet, with a row for each token in the stream's order, or a row for each request in the order
of their ends, with lists of its tokens. It needs the extra `parquet`: pip install 'tokenbus[parquet]'. Existing files
are never overwritten.

If a recording is broken, for example because its recorder was killed, the items before the fault are written, a line
says where the fault is, and the status is 1.

examples:
  tokenbus export steps.tokenbus --to steps.parquet
  tokenbus export steps.tokenbus --to requests.parquet --rows requests
"""


def declare(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    parser.add_argument("files", nargs=1, metavar="RECORDING", help="a recording")
    parser.add_argument("--to", required=True, type=Path, metavar="FILE", help="the Parquet file to write")
    parser.add_argument("--rows", choices=("tokens", "requests"), default="tokens", help="one row per token or request")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON document")


def refuse_existing(path: Path) -> None:
    if path.exists():
        raise CommandError(f"{path}: exists already; nothing is overwritten", WRONG_USE)


def check_folder(path: Path) -> None:
    """Raise CommandError if no file can be created in a folder."""
    if not path.is_dir():
        raise CommandError(f"{path}: not a directory", WRONG_USE)
    if not os.access(path, os.W_OK | os.X_OK):
        raise CommandError(f"{path}: not writable", WRONG_USE)


def run(options: argparse.Namespace) -> int:
    try:
        from tokenbus.recordings.parquet import RequestFile, TokenFile  # noqa: PLC0415 - its library is an extra
    except ImportError as error:
        library = str(error.name).partition(".")[0]
        raise CommandError(f"Parquet needs {library}: pip install 'tokenbus[parquet]'") from None
    path, fault, progress = options.to, "", Progress()
    refuse_existing(path)
    check_folder(path.parent)
    unfinished = path.with_name(f"_{path.name}.unfinished")
    unfinished.unlink(missing_ok=True)  # of an interrupted export, or a planted link
    unfinished.touch(exist_ok=False)
    try:
        table = (RequestFile if options.rows == "requests" else TokenFile)(unfinished)
        try:
            for item in read_recording(Path(options.files[0])):
                table.add(item)
                progress.show(f"{table.items} items read")
        except RecordingError as error:
            fault = str(error)
        table.close()
        if fault and not table.items:
            raise CommandError(printable(fault))
        unfinished.replace(path)
    finally:
        progress.clear()
        unfinished.unlink(missing_ok=True)
    counts = {name: getattr(table, name) for name in ("tokens", "items", "missing_items", "refused_items")}
    if options.json:
        print(json.dumps({"files": [{"file": str(path), **counts, "fault": fault or None}]}, indent=2))
    else:
        missing = f", {table.missing_items} MISSING in the recording" if table.missing_items else ""
        refused = f", {table.refused_items} REFUSED by the contract" if table.refused_items else ""
        recovered = f"; RECOVERED up to the fault: {fault}" if fault else ""
        print(printable(f"{path}: {table.tokens} tokens of {table.items} items{missing}{refused}{recovered}"))
    return 1 if fault or table.refused_items else 0
