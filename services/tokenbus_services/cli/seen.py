"""What is to be said of one item of a stream, as plain values for machines and as a line for people.

As in `check`, an integer of 64 bits is a string for machines, because many readers of JSON keep 53 of them.
"""

from collections.abc import Callable
from typing import Any

from tokenbus_contracts import BatchKind, ContractError, Limits, LogprobBatch, Row, RowStatus, Scoring, decode
from tokenbus_contracts.frames import read_frame
from tokenbus_contracts.generated.request_pb2 import ErrorCode, RequestEvent
from tokenbus_contracts.generated.stream_pb2 import PayloadKind
from tokenbus_services.cli.terminal import styled
from tokenbus_services.client import WatchedItem
from tokenbus_services.printable import printable

_LIMITS = Limits.schema()
_NS_IN_MS = 1_000_000
_LIKELY, _UNLIKELY = -0.7, -2.3
"""Logprobs from which on, and below which, a token is shown as such: about a half, and a tenth."""

Values = dict[str, Any]


def item_values(stream: tuple[str, int], watched: WatchedItem, now_ns: int, *, rows: bool) -> Values:
    """Return what an item holds; of what cannot be read, why."""
    item = watched.item
    values: Values = {
        "stream": {"worker_id": stream[0], "epoch": str(stream[1])},
        "sequence": str(item.sequence),
        "bytes": len(watched.payload),
    }
    try:
        if item.payload_kind == PayloadKind.PAYLOAD_KIND_LOGPROB_BATCH:
            return values | _batch_values(decode(watched.payload, _LIMITS), now_ns, rows=rows)
        if item.payload_kind == PayloadKind.PAYLOAD_KIND_REQUEST_EVENT:
            return values | _event_values(read_frame(RequestEvent, watched.payload))
    except ContractError as error:
        return values | {"what": "refused", "error": str(error)}
    return values | {"what": "unknown", "payload_kind": item.payload_kind}


def left_out_values(stream: tuple[str, int], first: int, last: int) -> Values:
    """Return that some items were not seen."""
    return {
        "stream": {"worker_id": stream[0], "epoch": str(stream[1])},
        "what": "left_out",
        "items": last - first + 1,
        "first_sequence": str(first),
        "last_sequence": str(last),
    }


def lines_of(values: Values) -> list[str]:
    """Return the line of an item, and one more for each of its rows if it has them."""
    stream = values["stream"]
    name = printable(f"{stream['worker_id']}/{stream['epoch']}")
    if values["what"] == "left_out":
        left_out = styled(f"{values['items']} items left out", "red")
        return [f"{name} {left_out}: {values['first_sequence']} to {values['last_sequence']}"]
    word, style, text = _WORDS[values["what"]](values)
    line = f"{name} #{values['sequence']} {styled(word, style)} {printable(text)}"
    return [line, *(_row_line(row) for row in values.get("rows", ()))]


def _batch_values(batch: LogprobBatch, now_ns: int, *, rows: bool) -> Values:
    header = batch.header
    values: Values = {
        "what": "batch",
        "step": str(header.step),
        "kind": header.kind.name,
        "part": f"{header.part_index + 1}/{header.part_count}",
        "row_count": batch.row_count,
        "tokens": batch.token_ids.size,
        "alternatives": batch.alternative_token_ids.size,
        "statuses": {status.name: count for status in RowStatus if (count := int((batch.statuses == status).sum()))},
        "latency_ms": round((now_ns - header.produced_at_ns) / _NS_IN_MS, 3) if header.produced_at_ns else None,
    }
    if rows:
        values["rows"] = [_row_values(row) for row in batch.rows()]
    return values


def _row_values(row: Row) -> Values:
    scored = row.scoring is not Scoring.NONE
    return {
        "request_key": str(row.key),
        "batch_index": row.batch_index,
        "position": row.position,
        "status": row.status.name,
        "token_ids": row.token_ids.tolist(),
        "logprobs": row.logprobs.tolist() if scored else None,
        "ranks": row.ranks.tolist() if scored else None,
    }


def _event_values(event: RequestEvent) -> Values:
    match event.WhichOneof("event"):
        case "admitted":
            admitted = event.admitted
            return {
                "what": "admitted",
                "request_key": str(admitted.request_key),
                "prompt_tokens": admitted.prompt_tokens,
            }
        case "error":
            error = event.error
            known = error.code in ErrorCode.values()
            return {
                "what": "error",
                "request_key": str(error.request_key),
                "code": ErrorCode.Name(error.code).removeprefix("ERROR_CODE_") if known else str(error.code),
                "message": error.message,
                "emitted_tokens": error.emitted_tokens,
            }
        case _:
            return {"what": "unknown", "payload_kind": PayloadKind.PAYLOAD_KIND_REQUEST_EVENT}


def _batch_words(values: Values) -> tuple[str, str, str]:
    statuses = ", ".join(f"{count} {name}" for name, count in values["statuses"].items()) or "none"
    latency = "" if values["latency_ms"] is None else f", {values['latency_ms']:.3f} ms ago"
    step = f"step {values['step']} part {values['part']}"
    text = f"{step}, {values['row_count']} rows ({statuses}), {values['tokens']} tokens{latency}"
    return values["kind"], "green" if values["kind"] == BatchKind.TARGET.name else "bold", text


def _admitted_words(values: Values) -> tuple[str, str, str]:
    return "ADMITTED", "bold", f"key {values['request_key']}, prompt of {values['prompt_tokens']} tokens"


def _error_words(values: Values) -> tuple[str, str, str]:
    text = f"key {values['request_key']} {values['code']} after {values['emitted_tokens']} tokens: {values['message']}"
    return "ERROR", "red", text


def _refused_words(values: Values) -> tuple[str, str, str]:
    return "REFUSED", "red", values["error"]


def _unknown_words(values: Values) -> tuple[str, str, str]:
    return "UNKNOWN", "bold", f"payload kind {values['payload_kind']}, {values['bytes']} bytes"


_WORDS: dict[str, Callable[[Values], tuple[str, str, str]]] = {
    "batch": _batch_words,
    "admitted": _admitted_words,
    "error": _error_words,
    "refused": _refused_words,
    "unknown": _unknown_words,
}


def _row_line(row: Values) -> str:
    logprobs = row["logprobs"] or [None] * len(row["token_ids"])
    tokens = " ".join(_token(*token) for token in zip(row["token_ids"], logprobs, strict=True))
    where = f"key {row['request_key']} index {row['batch_index']} position {row['position']} {row['status']}"
    return f"  {where}: {tokens or 'no token'}"


def _token(token_id: int, logprob: float | None) -> str:
    if logprob is None:
        return f"{token_id}(-)"
    text = f"{token_id}({logprob:.3f})"
    if logprob >= _LIKELY:
        return styled(text, "green")
    return styled(text, "red") if logprob < _UNLIKELY else text
