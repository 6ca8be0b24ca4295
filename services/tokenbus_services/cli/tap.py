"""tokenbus tap: shows what workers emit as it passes, without being in anybody's way."""

import argparse
import asyncio
import json
import time
from collections.abc import Callable

from tokenbus_services.bus import Transport
from tokenbus_services.cli.arguments import whole
from tokenbus_services.cli.configuration import declare_settings, faults_told, load_settings
from tokenbus_services.cli.seen import Values, item_values, left_out_values, lines_of
from tokenbus_services.cli.watching import watching
from tokenbus_services.settings import Settings
from tokenbus_services.signals import stop_on_signals

_DESCRIPTION = """\
Show the items of workers' streams as they pass through a processor, a line for each: its stream and sequence, then what
it is. A batch's line says its step, part, rows and tokens, and how long ago it was produced, which is right as far as
both machines' clocks agree. Requests are not disturbed: what this reads too slowly is left out, and a line says how
many items that were. It ends after --count items, or with a signal.

examples:
  tokenbus tap                                  every worker's items
  tokenbus tap --worker worker-1 --rows         with the tokens of each row and their logprobs
  tokenbus tap --json --count 100 | jq .        a JSON object on each line, for machines

settings that matter: bus.clients_address, bus.key_file and bus.server_key, client.window_frames and
client.window_bytes (how much may be on its way to this client; beyond that items are left out), client.name (what the
processor's logs call it).
"""


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = _DESCRIPTION
    parser.add_argument("--worker", default="", metavar="ID", help="whose streams (default: every worker's)")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each item instead of a line")
    parser.add_argument("--rows", action="store_true", help="show each row's tokens with their logprobs")
    parser.add_argument("--count", type=whole, default=0, metavar="N", help="end after so many items")
    declare_settings(parser, {"--clients-address": "bus.clients_address"})


def run(options: argparse.Namespace) -> int:
    """Show items until a signal, or until there were enough."""
    settings = load_settings(options)
    with faults_told():
        asyncio.run(_run(settings, options))
    return 0


async def _run(settings: Settings, options: argparse.Namespace) -> None:
    with stop_on_signals() as stop:
        await tap(settings, options, _print_json if options.json else _print_lines, stop)


async def tap(
    settings: Settings,
    options: argparse.Namespace,
    show: Callable[[Values], None],
    stop: asyncio.Event,
    transport: Transport | None = None,
) -> None:
    """Show each item that is seen, and each run of items that was left out."""
    last: dict[str, tuple[int, int]] = {}
    """By worker: its latest life, and the last sequence that was seen of it."""
    shown = 0
    async with watching(settings, options.worker, transport) as watch:
        while (seen := await watch.next(stop)) is not None and not stop.is_set():
            if seen.watched is None:
                continue
            sequence = seen.watched.item.sequence
            worker_id, epoch = seen.name
            known_epoch, before = last.get(worker_id, (epoch, sequence - 1))
            if known_epoch != epoch:
                before = sequence - 1
            if sequence > before + 1:
                show(left_out_values(seen.name, before + 1, sequence - 1))
            last[worker_id] = epoch, max(sequence, before)
            show(item_values(seen.name, seen.watched, time.time_ns(), rows=options.rows))
            shown += 1
            if shown == options.count:
                return


def _print_json(values: Values) -> None:
    print(json.dumps(values, allow_nan=False), flush=True)


def _print_lines(values: Values) -> None:
    print("\n".join(lines_of(values)), flush=True)
