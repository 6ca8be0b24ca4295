"""tokenbus export."""

import argparse
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from tokenbus.cli.errors import WRONG_USE, CommandError
from tokenbus.cli.terminal import Progress
from tokenbus.cli.values import tokenizer_of
from tokenbus.printable import printable
from tokenbus.recordings.durable_log import require_nats
from tokenbus.recordings.items import RecordingError, read_recording
from tokenbus.recordings.session_turns import TurnReader
from tokenbus.recordings.sessions import is_log, items_of, sessions_of

_DESCRIPTION = """\
Convert a recording to Parquet: a row for each token in the stream's order; a row for each request in the order of their
ends, with lists of its tokens; or a row for each branch of a session, from the recordings of all its workers or from a
durable log (nats://HOST:PORT/LOG). Sessions can also be written as Arrow (--to FILE.arrow). It needs the extra
`parquet`: pip install 'tokenbus[parquet]'. Existing files are never overwritten.

If a recording is broken, for example because its recorder was killed, the items before the fault are written, a line
says where the fault is, and the status is 1.

examples:
  tokenbus export steps.tokenbus --to steps.parquet
  tokenbus export steps.tokenbus --to requests.parquet --rows requests
  tokenbus export w0.tokenbus w1.tokenbus --to sessions.parquet --rows sessions
"""


def declare(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    parser.add_argument(
        "files",
        nargs="+",
        metavar="RECORDING",
        help="a recording; for sessions also several, or a durable log's address",
    )
    parser.add_argument("--to", required=True, type=Path, metavar="FILE", help="the Parquet file to write")
    parser.add_argument(
        "--rows",
        choices=("tokens", "requests", "sessions"),
        default="tokens",
        help="one row per token, per request, or per branch of a session",
    )
    parser.add_argument("--session", default="", metavar="LABEL", help="only the sessions with this label (all)")
    parser.add_argument("--tokenizer", metavar="NAME", help="for sessions: also the text where branches diverge")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON document")


def refuse_existing(path: Path) -> None:
    if path.exists():
        raise CommandError(f"{path}: exists already; nothing is overwritten", WRONG_USE)


def check_folder(path: Path) -> None:
    """Raise CommandError if files cannot be created in a folder."""
    if not path.is_dir():
        raise CommandError(f"{path}: not a directory", WRONG_USE)
    if not os.access(path, os.W_OK | os.X_OK):
        raise CommandError(f"{path}: not writable", WRONG_USE)


def run(options: argparse.Namespace) -> int:
    if options.rows != "sessions":
        if options.session or options.tokenizer:
            name = "session" if options.session else "tokenizer"
            raise CommandError(f"--{name}: only with --rows sessions, got --rows {options.rows}", WRONG_USE)
        if len(options.files) > 1:
            message = f"RECORDING: one with --rows {options.rows}, got {len(options.files)}"
            raise CommandError(message, WRONG_USE)
    try:
        import pyarrow  # noqa: F401, ICN001, PLC0415 - it is an extra
    except ImportError as error:
        library = str(error.name).partition(".")[0]
        raise CommandError(f"Parquet needs {library}: pip install 'tokenbus[parquet]'") from None
    path = options.to
    refuse_existing(path)
    check_folder(path.parent)
    unfinished = path.with_name(f"_{path.name}.unfinished")
    unfinished.unlink(missing_ok=True)  # an interrupted export or an attacker may have left a file or a link here
    unfinished.touch(exist_ok=False)
    try:
        status = (_sessions if options.rows == "sessions" else _one_recording)(options, unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return status


def _one_recording(options: argparse.Namespace, unfinished: Path) -> int:
    """Write the tokens or the requests of a recording. Return the exit status."""
    from tokenbus.recordings.parquet import RequestFile, TokenFile  # noqa: PLC0415 - its library is an extra

    path, fault, progress = options.to, "", Progress()
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
    finally:
        progress.clear()
    counts = {name: getattr(table, name) for name in ("tokens", "items", "missing_items", "refused_items")}
    if options.json:
        print(json.dumps({"files": [{"file": str(path), **counts, "fault": fault or None}]}, indent=2))
    else:
        missing = f", {table.missing_items} MISSING in the recording" if table.missing_items else ""
        refused = f", {table.refused_items} REFUSED by the contract" if table.refused_items else ""
        recovered = f"; RECOVERED up to the fault: {fault}" if fault else ""
        print(printable(f"{path}: {table.tokens} tokens of {table.items} items{missing}{refused}{recovered}"))
    return 1 if fault or table.refused_items else 0


def _sessions(options: argparse.Namespace, unfinished: Path) -> int:
    """Write the sessions of recordings or logs. Return the exit status."""
    from tokenbus.recordings.session_table import SessionFile  # noqa: PLC0415 - its library is an extra

    path, progress = options.to, Progress()
    broken: list[RecordingError] = []
    table = SessionFile(unfinished, is_arrow=path.suffix == ".arrow", text_of=_decoder(options.tokenizer))
    for source in filter(is_log, options.files):
        require_nats(source)
    with TurnReader(options.session) as reader:
        try:
            for item in items_of(options.files, broken):
                reader.add(item)
                progress.show(f"{reader.items} items read")
            faults = list(map(str, broken))
            if faults and not reader.items:
                raise CommandError(printable(faults[0]))
            for session in sessions_of(reader, faults):
                table.add(session)
                progress.show(f"{table.sessions} sessions written")
        finally:
            progress.clear()
    table.close()
    counts = {name: getattr(table, name) for name in ("sessions", "incomplete_sessions", "branches", "tokens")}
    counts |= {"items": reader.items, "refused_items": reader.refused_items}
    if options.json:
        print(json.dumps({"files": [{"file": str(path), **counts, "fault": "; ".join(faults) or None}]}, indent=2))
    else:
        incomplete = f", {table.incomplete_sessions} of them INCOMPLETE" if table.incomplete_sessions else ""
        recovered = f"; RECOVERED up to the fault: {'; '.join(faults)}" if faults else ""
        numbers = f"{table.sessions} sessions{incomplete}, {table.branches} branches, {table.tokens} tokens"
        print(printable(f"{path}: {numbers}{recovered}"))
    return 1 if faults or reader.refused_items else 0


def _decoder(tokenizer: str | None) -> Callable[[Sequence[int]], str | None]:
    """Return a function that converts token ids to their text, or to None without a tokenizer."""
    found = None if tokenizer is None else tokenizer_of(tokenizer)
    if found is None:
        return lambda _ids: None
    token_bytes, size = found.token_bytes, found.vocabulary_size
    return lambda ids: b"".join(token_bytes(each) if each < size else str(each).encode() for each in ids).decode(
        errors="replace"
    )
