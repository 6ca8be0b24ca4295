"""What is to be said of one message file, as plain values that JSON can hold for any reader.

An integer of 64 bits is a string, because many readers of JSON keep 53 of them; a number that is not finite is
a string, because JSON has none; and a file name's bytes that are no UTF-8 are escaped.
"""

import math
import stat
import sys
from pathlib import Path
from typing import Any

from tokenbus_contracts import ContractError, Limits, LogprobBatch, RowStatus, Rule
from tokenbus_contracts.codec import parse
from tokenbus_contracts.validate import check_batch


def report_of(name: str, limits: Limits, *, rows: bool) -> dict[str, Any]:
    """Return whether a file holds and what is in it, or what is wrong with it; and if asked, the same of each row."""
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
