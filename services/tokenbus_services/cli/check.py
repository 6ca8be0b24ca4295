"""tokenbus check: whether message files hold, row by row if asked."""

import argparse
import json
import sys
from typing import Any

from tokenbus_contracts import Limits
from tokenbus_services.cli.report import report_of
from tokenbus_services.cli.terminal import styled
from tokenbus_services.printable import printable

_EXAMPLES = """\
A file holds one encoded LogprobBatch. Each gets one line: ok and what is in it, or the field, the limit and
the value that it is refused for. The exit status is 0 if all files hold, else 1.

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
