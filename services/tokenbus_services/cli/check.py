"""tokenbus check: whether message files hold, row by row if asked."""

import argparse
import json
import math
import stat
import sys
from pathlib import Path
from typing import Any

from tokenbus_contracts import ContractError, Limits, LogprobBatch, RowStatus, Rule
from tokenbus_contracts.codec import parse
from tokenbus_contracts.validate import check_batch
from tokenbus_services.printable import printable
from tokenbus_services.terminal import styled

_EXAMPLES = """\
A file holds one encoded LogprobBatch. Each gets one line: ok and a summary, or the field, the limit and the value that
it is refused for. The exit status is 0 if all files hold, else 1.

examples:
  tokenbus check step-41.binpb                 against what a deployment takes by default
  tokenbus check --limits schema *.binpb       against the schema's own bounds
  tokenbus check --rows refused/*.binpb        a verdict for each row
  tokenbus check --json step-41.binpb | jq .   for machines
"""

_STYLES = {"ok": "green", "refused": "red"}


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = _EXAMPLES
    parser.add_argument("files", nargs="+", metavar="FILE", help="a file with one message; - is standard input")
    parser.add_argument("--rows", action="store_true", help="give a verdict for each row too")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of lines")
    parser.add_argument(
        "--limits",
        choices=("default", "schema"),
        default="default",
        help="which bounds to hold the messages against (default: a deployment's)",
    )


def run(options: argparse.Namespace) -> int:
    """Check every file; return 1 if one of them does not hold."""
    limits = Limits.schema() if options.limits == "schema" else Limits.default()
    reports = (report_of(name, limits, rows=options.rows) for name in options.files)
    if options.json:
        files = list(reports)
        held = all(report["ok"] for report in files)
        print(json.dumps({"ok": held, "limits": options.limits, "files": files}, indent=2, allow_nan=False))
        return 0 if held else 1
    held = True
    for report in reports:
        _show(report)
        held &= report["ok"]
    return 0 if held else 1


def _show(report: dict[str, Any]) -> None:
    """Print a file's lines, at once: the next file may be a pipe that has nothing to say for hours."""
    if report["ok"]:
        holds = report["holds"]
        statuses = ", ".join(f"{count} {name}" for name, count in holds["statuses"].items()) or "none"
        _print_verdict(
            "ok",
            f"{report['file']}: {holds['worker_id']}/{holds['epoch']} "
            f"sequence {holds['sequence']} step {holds['step']} part {holds['part']} {holds['kind']}, "
            f"{holds['rows']} rows ({statuses}), {holds['tokens']} tokens, {holds['alternatives']} alternatives",
        )
    else:
        _print_verdict("refused", f"{report['file']}: {report['error']}")
    for row in report.get("rows", ()):
        _show_row(row)
    sys.stdout.flush()


def _show_row(row: dict[str, Any]) -> None:
    where = f"row {row['row']} key {row['request_key']}"
    if not row["ok"]:
        _print_verdict("refused", f"{where}: {row['error']}", indent="  ")
        return
    logprobs = row["logprobs"] or ["-"] * len(row["token_ids"])
    tokens = " ".join(
        f"{token_id}({logprob if isinstance(logprob, str) else format(logprob, '.3f')})"
        for token_id, logprob in zip(row["token_ids"], logprobs, strict=True)
    )
    _print_verdict(
        "ok",
        f"{where} index {row['batch_index']} position {row['position']} "
        f"{row['status']} top-k {row['top_k']}: {tokens or 'no token'}",
        indent="  ",
    )


def _print_verdict(verdict: str, text: str, indent: str = "") -> None:
    padding = " " * (len("refused  ") - len(verdict))
    print(f"{indent}{styled(verdict, _STYLES[verdict])}{padding}{printable(text)}")


def report_of(name: str, limits: Limits, *, rows: bool) -> dict[str, Any]:
    """Return whether a file is valid, with a summary or its fault, and if asked the same for each row."""
    report: dict[str, Any] = {"file": name.encode(errors="backslashreplace").decode(), "ok": False}
    try:
        batch = parse(_contents(name, limits), limits)
    except ContractError as error:
        return report | _refusal(error)
    except OSError as error:
        return report | {"error": (error.strerror or str(error)).lower()}
    try:
        check_batch(batch, limits)
    except ContractError as error:
        report |= _refusal(error)
    else:
        report |= {"ok": True, "holds": _summary(batch)}
    if rows and batch.has_consistent_lengths():
        report["rows"] = [_row_report(batch, row, limits) for row in range(batch.row_count)]
    return report


def _contents(name: str, limits: Limits) -> bytes:
    """Return a file's contents; of one that is too large to hold, nothing is read."""
    most = limits.max_message_bytes
    if name == "-":
        if sys.stdin is None:  # as after `<&-`
            raise OSError(0, "standard input is closed")
        return sys.stdin.buffer.read(most + 1)
    path = Path(name)
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise OSError(0, "a directory, not a message file")
    if not stat.S_ISREG(status.st_mode):
        raise OSError(0, "no regular file")
    if status.st_size > most:
        raise ContractError("message", most, status.st_size, rule=Rule.BYTES)
    with path.open("rb") as file:
        return file.read(most + 1)


def _row_report(batch: LogprobBatch, row: int, limits: Limits) -> dict[str, Any]:
    report: dict[str, Any] = {"row": row, "request_key": str(batch.request_keys[row]), "ok": False}
    try:
        alone = batch.select([row])
        check_batch(alone, limits)
    except ContractError as error:
        return report | _refusal(error)
    found = alone.row(0)
    return report | {
        "ok": True,
        "batch_index": found.batch_index,
        "position": found.position,
        "status": found.status.name,
        "token_ids": found.token_ids.tolist(),
        "logprobs": [value if math.isfinite(value) else str(value) for value in found.logprobs.tolist()],
        "ranks": found.ranks.tolist(),
        "top_k": int(batch.top_ks[row]),
        "proposal_token_ids": found.proposal_token_ids.tolist(),
        "stop": found.stop,
    }


def _refusal(error: ContractError) -> dict[str, Any]:
    return {
        "error": str(error),
        "field": error.field,
        "rule": str(error.rule),
        "limit": str(error.limit),
        "actual": str(error.actual),
    }


def _summary(batch: LogprobBatch) -> dict[str, Any]:
    header = batch.header
    return {
        "worker_id": header.worker_id,
        "epoch": str(header.epoch),
        "sequence": str(header.sequence),
        "step": str(header.step),
        "part": f"{header.part_index + 1}/{header.part_count}",
        "kind": header.kind.name,
        "rows": batch.row_count,
        "tokens": batch.token_ids.size,
        "alternatives": batch.alternative_token_ids.size,
        "statuses": {status.name: count for status in RowStatus if (count := int((batch.statuses == status).sum()))},
    }
