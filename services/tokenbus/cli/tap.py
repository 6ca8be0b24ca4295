"""tokenbus tap."""

import argparse
import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from google.protobuf.json_format import MessageToDict

from tokenbus.cli.arguments import request_id
from tokenbus.cli.configuration import load_settings
from tokenbus.cli.errors import WRONG_USE, CommandError
from tokenbus.cli.terminal import styled
from tokenbus.cli.values import Values, batch_values, row_values, rows_text, tokens_text
from tokenbus.cli.watching import declare_watching, watched
from tokenbus.printable import printable
from tokenbus.recordings.durable_log import require_nats
from tokenbus.recordings.items import StreamItem
from tokenbus.settings import Settings
from tokenbus.signals import stop_on_signals
from tokenbus_contracts import BatchKind, ContractError, PromptScores
from tokenbus_contracts.generated.request_pb2 import RequestEvent
from tokenbus_contracts.generated.stream_pb2 import PayloadKind

_DESCRIPTION = """\
Watch the items of the workers' streams as they pass through a processor, one line per item. A batch's line shows its
step, part, rows, tokens and age (which depends on both machines' clocks). Tap never slows requests down: it skips items
when it is too slow, and a line says how many. It stops after --count items or on a signal.

With --from it shows the items of a durable log, in the log's order. A batch's line then shows when the log stored it,
and another line says how many items are missing in the log.

examples:
  tokenbus tap                                  every worker's items
  tokenbus tap --worker worker-1 --rows         with the tokens of each row and their logprobs
  tokenbus tap --from nats://127.0.0.1:4222 --request 17 --rows    the items of one request in the durable log

main settings: bus.clients_address (a comma-separated list for several processors), bus.key_file, bus.server_key.
"""
_NS_IN_MS = 1_000_000
_NS = 1_000_000_000
_WORDS = {
    "admitted": ("ADMITTED", "bold", "request {request_id}, prompt of {prompt_tokens} tokens"),
    "error": ("ERROR", "red", "request {request_id} {code} after {emitted_tokens} tokens: {message}"),
    "session_prompt": ("SESSION", "bold", "request {request_id} of {session}, prompt of {prompt_tokens} tokens"),
    "refused": ("REFUSED", "red", "{error}"),
    "prefilled": ("PREFILLED", "bold", "request {request_id}, {transfer_state} for the decode worker"),
    "unknown": ("UNKNOWN", "bold", "payload kind {payload_kind}, {bytes} bytes"),
}
"""By kind of item: the first word of the item's line, the style of this word, and the rest of the line."""


def declare(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    parser.add_argument("--json", action="store_true", help="print each item as a JSON object")
    parser.add_argument("--rows", action="store_true", help="show the tokens and logprobs of each row")
    parser.add_argument("--from", dest="log", metavar="ADDRESS", help="read a durable log instead of the live streams")
    parser.add_argument("--request", type=request_id, metavar="ID", help="with --from: show only this request")
    declare_watching(parser)


def run(options: argparse.Namespace) -> int:
    settings = load_settings(options)
    if options.request is not None and options.log is None:
        raise CommandError("--request: only with --from ADDRESS", WRONG_USE)
    show = _print_json if options.json else _print_lines
    asyncio.run(_run(settings, options, show))
    return 0


async def _run(settings: Settings, options: argparse.Namespace, show: Callable[[Values], None]) -> None:
    if options.log is not None:
        require_nats(options.log)
        from tokenbus.recordings.durable_log.reader import read_log  # noqa: PLC0415 - needs an extra

        await tap(read_log(options.log, worker_id=options.worker, settings=settings), options, show)
        return
    with stop_on_signals() as stop:
        await tap(watched(settings, options.worker, stop), options, show)


async def tap(
    items: AsyncGenerator[StreamItem, None], options: argparse.Namespace, show: Callable[[Values], None]
) -> None:
    """Show each item and each gap."""
    shown = 0
    async with aclosing(items):
        async for item in items:
            if item.missing_items:
                show(left_out_values(item))
            if options.request is not None and not item.has_request(options.request):
                continue
            show(item_values(item, time.time_ns(), rows=options.rows, request_id=options.request))
            shown += 1
            if shown == options.count:
                return


def _print_json(values: Values) -> None:
    print(json.dumps(values, allow_nan=False), flush=True)


def _print_lines(values: Values) -> None:
    print("\n".join(lines_of(values)), flush=True)


def item_values(item: StreamItem, now_ns: int, *, rows: bool, request_id: int | None = None) -> Values:
    """Return the values of an item, or the error of an invalid item. `request_id` selects the rows of one request."""
    logged_at = item.logged_at
    values: Values = {"stream": _stream(item), "sequence": str(item.sequence), "bytes": len(item.payload)}
    if logged_at is not None:
        values["logged_at"], now_ns = logged_at.isoformat(), int(logged_at.timestamp() * _NS)
    try:
        if item.batch is not None:
            header = item.batch.header
            version = {"weight_version": str(header.weight_version)} if header.weight_version else {}
            age = round((now_ns - header.produced_at_ns) / _NS_IN_MS, 3) if header.produced_at_ns else None
            values |= {
                "what": "batch",
                "row_count": item.batch.row_count,
                "latency_ms": age,
                **batch_values(item.batch),
                **version,
            }
            if rows:
                values["rows"] = [row_values(row) for row in item.batch.rows() if request_id in {None, row.request_id}]
            return values
        if item.event is not None:
            return values | _event_values(item.event)
    except ContractError as error:
        return values | {"what": "refused", "error": str(error)}
    return values | {"what": "unknown", "payload_kind": item.kind}


def left_out_values(item: StreamItem) -> Values:
    """Return the values of the gap before an item."""
    return {
        "stream": _stream(item),
        "what": "left_out",
        "items": item.missing_items,
        "first_sequence": str(item.sequence - item.missing_items),
        "last_sequence": str(item.sequence - 1),
    }


def _stream(item: StreamItem) -> Values:
    return {"worker_id": item.worker_id, "epoch": str(item.epoch)}


def lines_of(values: Values) -> list[str]:
    """Return a line for an item, and a line for each row of the item."""
    stream = values["stream"]
    name = printable(f"{stream['worker_id']}/{stream['epoch']}")
    if values["what"] == "left_out":
        left_out = styled(f"{values['items']} items left out", "red")
        return [f"{name} {left_out}: {values['first_sequence']} to {values['last_sequence']}"]
    word, style, text = _words(values)
    line = f"{name} #{values['sequence']} {styled(word, style)} {printable(text)}"
    return [line, *(_row_line(row) for row in values.get("rows", ()))]


def _event_values(event: RequestEvent) -> Values:
    what = event.WhichOneof("event")
    if what is None:
        return {"what": "unknown", "payload_kind": PayloadKind.PAYLOAD_KIND_REQUEST_EVENT}
    found = getattr(event, what)
    values: Values = MessageToDict(found, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    if what == "prompt_scores":  # the columns of prompt scores are bytes
        scores, names = PromptScores.of(found), ("request_id", "position", "prompt_tokens", "alternatives")
        columns = {name: getattr(scores, name).tolist() for name in ("token_ids", "logprobs", "ranks")}
        values = {name: values[name] for name in names} | columns
    if what == "prefilled":
        values["transfer_state"] = f"{len(found.transfer_state)} bytes"
    if what == "routed_experts":
        values["digest"] = found.digest.hex()
    if "request_id" in values:
        values["request_id"] = f"{int(values['request_id']):016x}"
    if "code" in values:
        values["code"] = str(values["code"]).removeprefix("ERROR_CODE_")  # codes without a name are numbers
    return {"what": what, **values}


def _words(values: Values) -> tuple[str, str, str]:
    match values["what"]:
        case "batch":
            latency = "" if values["latency_ms"] is None else f", {values['latency_ms']:.3f} ms ago"
            if "logged_at" in values:
                latency = f", logged {values['logged_at']}"
            step = f"step {values['step']} part {values['part']}"
            version = f", weights {values['weight_version']}" if "weight_version" in values else ""
            text = f"{step}, {rows_text(values['row_count'], values)}{version}{latency}"
            return values["kind"], "green" if values["kind"] == BatchKind.TARGET.name else "bold", text
        case "control_answer":
            state = values.get("state", {"weight_version": "0", "is_paused": False})
            state = f"weights {state['weight_version']}{', paused' if state['is_paused'] else ''}"
            return "CONTROLLED", "red" if values["error"] else "bold", f"{values['error'] or 'done'}; {state}"
        case "prompt_scores":
            first, count = values["position"], len(values["token_ids"])
            where = f"tokens {first} to {first + count - 1} of {values['prompt_tokens']}" if count else "no token"
            return "SCORED", "bold", f"request {values['request_id']}, its prompt's {where}"
        case "routed_experts":
            where = values["missing"] or f"{values['length']} bytes at {values['offset']} of {values['file']}"
            return "EXPERTS", "red" if values["missing"] else "bold", f"request {values['request_id']}: {where}"
        case what:
            word, style, text = _WORDS[what]
            cached = f", {values['cached_tokens']} of them cached" if "cached_tokens" in values else ""
            return word, style, text.format_map(values) + cached


def _row_line(row: Values) -> str:
    where = f"request {row['request_id']} index {row['batch_index']} position {row['position']} {row['status']}"
    return f"  {where}: {tokens_text(row)}"
