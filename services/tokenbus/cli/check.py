"""tokenbus check."""

import argparse
import contextlib
import json
import os
import stat
import sys
from collections import Counter
from contextlib import AbstractContextManager
from typing import BinaryIO

from tokenbus.cli.terminal import styled
from tokenbus.cli.values import Values, batch_values, rows_text
from tokenbus.printable import printable, reason_of
from tokenbus.recordings.items import RecordingError, StreamItem, read_items
from tokenbus_contracts import ContractError, Limits, Rule, decode
from tokenbus_contracts.generated.stream_pb2 import PayloadKind
from tokenbus_contracts.malformed import place_of

_DESCRIPTION = """\
Validate files that hold one encoded LogprobBatch or a recording. Each file gets one line: `ok` and a summary, or
`refused` and the fault: the byte offset, the field, the limit and the value. The status is 0 if all files are valid,
else 1.

examples:
  tokenbus check step-41.binpb                 with the default limits of a deployment
  tokenbus check --limits schema recorded/*    each item of recordings, with the schema's own bounds
"""

_HEAD = 4
_RECORDING = "RECORDING"
_MORE = 0x80
"""The bit that is set in every byte of a varint except in the last byte."""
_FRAME_BEGINS = b"\x09"
"""The first byte of a worker's frame: the tag of the field `epoch`."""
_STYLES = {"ok": "green", "refused": "red"}


def declare(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="a message or a recording; -: a message from standard input"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of lines")
    parser.add_argument(
        "--limits",
        choices=("default", "schema"),
        default="default",
        help="the limits of a default deployment, or only the schema's bounds",
    )


def run(options: argparse.Namespace) -> int:
    limits = Limits.schema() if options.limits == "schema" else Limits.default()
    files = []
    for name in options.files:
        files.append(report_of(name, limits))
        if not options.json:
            _show(files[-1])
    ok = all(report["ok"] for report in files)
    if options.json:
        print(json.dumps({"ok": ok, "limits": options.limits, "files": files}, indent=2, allow_nan=False))
    return 0 if ok else 1


def _show(report: Values) -> None:
    name = report["file"]
    if not report["ok"]:
        place = f"byte {report['offset']}: " if "offset" in report else ""
        item = f" (item {report['item']})" if "item" in report else ""
        print(_verdict("refused", f"{name}: {place}{report['error']}{item}"))
    elif (holds := report["holds"])["kind"] == _RECORDING:
        life = f"{holds.get('worker_id', '-')}/{holds.get('epoch', '-')}"
        counts = f"{holds['batches']} batches, {holds['rows']} rows, {holds['tokens']} tokens"
        missing = f"{holds['items']} items, {holds['missing_items']} missing"
        print(_verdict("ok", f"{name}: {life} recording, {missing}, {counts}"))
    else:
        step = f"sequence {holds['sequence']} step {holds['step']} part {holds['part']} {holds['kind']}"
        counts = f"{rows_text(holds['rows'], holds)}, {holds['alternatives']} alternatives"
        print(_verdict("ok", f"{name}: {holds['worker_id']}/{holds['epoch']} {step}, {counts}"))
    sys.stdout.flush()  # the next file may be a pipe that stays silent


def _verdict(verdict: str, text: str) -> str:
    padding = " " * (len("refused  ") - len(verdict))
    return f"{styled(verdict, _STYLES[verdict])}{padding}{printable(text)}"


def report_of(name: str, limits: Limits) -> Values:
    """Return the verdict on a file, with a summary of a valid file or the fault of an invalid file."""
    report: Values = {"file": name.encode(errors="backslashreplace").decode(), "ok": False}
    try:
        with _opened(name) as file:
            head = file.read(_HEAD)
            if _begins_recording(head):
                return report | _recording_report(_from_the_start(file), limits)
            return report | _message_report(head + _rest(file, limits), limits)
    except ContractError as error:
        return report | _refusal(error, 0)
    except OSError as error:
        return report | {"error": reason_of(error)}


def _opened(name: str) -> AbstractContextManager[BinaryIO]:
    if name == "-":
        if sys.stdin is None:  # the shell closed standard input with `<&-`
            raise OSError(0, "standard input is closed")
        return contextlib.nullcontext(sys.stdin.buffer)
    mode = os.stat(name).st_mode  # noqa: PTH116 - to open a pipe would block
    if stat.S_ISDIR(mode):
        raise OSError(0, "a directory, not a message file")
    if not stat.S_ISREG(mode):
        raise OSError(0, "no regular file")
    return open(name, "rb")  # noqa: PTH123 - the caller closes it


def _begins_recording(head: bytes) -> bool:
    size = next((index for index, byte in enumerate(head) if byte < _MORE), len(head))
    return head[size + 1 : size + 2] == _FRAME_BEGINS


def _from_the_start(file: BinaryIO) -> BinaryIO:
    if not file.seekable():
        raise OSError(0, "a recording cannot be read from a pipe: name its file")
    file.seek(0)
    return file


def _rest(file: BinaryIO, limits: Limits) -> bytes:
    """Return the rest of a file. Raises ContractError if the file is too large."""
    most = limits.max_message_bytes
    if (size := os.fstat(file.fileno()).st_size) > most:  # the size of a pipe is 0
        raise ContractError("message", most, size, rule=Rule.BYTES)
    return file.read(most + 1 - _HEAD)


def _message_report(data: bytes, limits: Limits) -> Values:
    try:
        batch = decode(data, limits)
    except ContractError as error:
        return _refusal(error, place_of(data, error.field))
    header = batch.header
    stream = {"worker_id": header.worker_id, "epoch": str(header.epoch), "sequence": str(header.sequence)}
    return {"ok": True, "holds": stream | {"rows": batch.row_count} | batch_values(batch)}


def _recording_report(file: BinaryIO, limits: Limits) -> Values:
    holds = Counter[str](items=0, missing_items=0, batches=0, rows=0, tokens=0)
    life: dict[str, str] = {}
    try:
        for item in read_items(file):
            life = {"worker_id": item.worker_id, "epoch": str(item.epoch)}
            holds.update(items=1, missing_items=item.missing_items)
            try:
                holds.update(_counts(item, limits))
            except ContractError as error:
                begin = int(item.position.partition(".")[0]) - len(item.payload)
                refused = _refusal(error, begin + place_of(item.payload, error.field))
                return refused | {"item": str(item.sequence)}
    except RecordingError as error:
        limit, _, actual = error.reason.partition(", got ")
        fields = {"field": "entry", "rule": str(Rule.MALFORMED), "limit": limit, "actual": actual}
        return {"error": error.reason, "offset": error.offset} | fields
    return {"ok": True, "holds": {"kind": _RECORDING} | life | dict(holds)}


def _counts(item: StreamItem, limits: Limits) -> dict[str, int]:
    if item.kind != PayloadKind.PAYLOAD_KIND_LOGPROB_BATCH:
        if item.event is None:
            raise ContractError("item.payload_kind", "a kind that the schema names", int(item.kind), rule=Rule.NAMED)
        return {}
    batch = decode(item.payload, limits)
    return {"batches": 1, "rows": batch.row_count, "tokens": batch.token_ids.size}


def _refusal(error: ContractError, offset: int) -> Values:
    return {
        "offset": offset,
        "error": str(error),
        "field": error.field,
        "rule": str(error.rule),
        "limit": str(error.limit),
        "actual": str(error.actual),
    }
