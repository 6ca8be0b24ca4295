"""tokenbus log: writes workers' streams to a durable log, a JetStream stream."""

import argparse
import asyncio
import json
from contextlib import aclosing
from dataclasses import asdict
from typing import TYPE_CHECKING

from tokenbus_services.bus import Transport, require_nats
from tokenbus_services.cli.arguments import whole
from tokenbus_services.cli.configuration import declare_settings, load_settings, reporting_faults
from tokenbus_services.cli.errors import WRONG_USE, CommandError
from tokenbus_services.cli.watching import watched, widened
from tokenbus_services.logs import logger
from tokenbus_services.settings import Settings
from tokenbus_services.signals import stop_on_signals
from tokenbus_services.terminal import Progress

if TYPE_CHECKING:
    from tokenbus_services.durable_log.writer import LogCounts

_DESCRIPTION = """\
Write each item of workers' streams, as it passes through a processor, to a JetStream stream: once and in order, however
many of these commands write to one log, and however often one is killed and started again. Each life of a worker has a
subject of its own, tokenbus.NAME.WORKER.EPOCH. A log that exists stays as it was made, with --replicas, --max-bytes and
--max-age. It ends after --count items, or with a signal. docs/log.md has the format, what durability means here, and
how to read a log: `tokenbus.read_log` and `tokenbus tap --from`.

It watches as `tokenbus record` does. Another writer of the same log may have the items that it reads too slowly, or
that pass while it is away; the log names those that no writer has as missing, and then the status is 1. A processor
that keeps the log itself, with durable_log.address and durable_log.durable, misses nothing.

examples:
  tokenbus log --to nats://127.0.0.1:4222                          every worker, into the log `log`
  tokenbus log --to nats://127.0.0.1:4222/rollouts --worker w-1    one worker, into the log `rollouts`
  tokenbus log --to nats://a:4222,b:4222,c:4222/log --replicas 3   on three servers of a cluster

settings that matter: durable_log.* (how much is kept, how long, on how many servers), bus.nats_* (this process's
credentials), bus.clients_address (the processor), client.drain_timeout_ms (how long it goes on writing when it ends).
"""
_log = logger("log")


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = _DESCRIPTION
    parser.add_argument(
        "--worker", default="", metavar="ID", help="the worker whose streams are written (default: every worker)"
    )
    parser.add_argument("--count", type=whole(), default=0, metavar="N", help="end after so many items were seen")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON document")
    direct = {"--to": "address", "--replicas": "replicas", "--max-bytes": "max_bytes", "--max-age": "max_age_hours"}
    declare_settings(
        parser,
        {flag: f"durable_log.{name}" for flag, name in direct.items()} | {"--clients-address": "bus.clients_address"},
    )


def run(options: argparse.Namespace) -> int:
    """Write until a signal, or until there was enough; return 1 if something is missing."""
    settings = widened(load_settings(options))
    if not settings.durable_log.address:
        raise CommandError("--to: where the log is, as nats://127.0.0.1:4222", WRONG_USE)
    with reporting_faults():
        require_nats(settings.durable_log.address)
        counts, unwritten = asyncio.run(_run(settings, options))
    if options.json:
        print(json.dumps(asdict(counts) | {"unwritten_items": unwritten}, indent=2))
    else:
        _tell(counts, unwritten)
    return 1 if counts.missing_items or counts.refused_items or unwritten else 0


async def _run(settings: Settings, options: argparse.Namespace) -> "tuple[LogCounts, int]":
    with stop_on_signals() as stop:
        return await log(settings, stop, worker_id=options.worker, count=options.count)


async def log(
    settings: Settings,
    stop: asyncio.Event,
    *,
    worker_id: str = "",
    count: int = 0,
    transport: Transport | None = None,
) -> "tuple[LogCounts, int]":
    """Write items until `stop` is set or `count` items were seen; return the counts, and how many are unwritten."""
    from tokenbus_services.durable_log.stream import LogStream  # noqa: PLC0415 - an extra
    from tokenbus_services.durable_log.writer import LogWriter  # noqa: PLC0415

    wait, drain = settings.bus.heartbeat_interval_ms / 1000, settings.client.drain_timeout_ms / 1000
    stream = LogStream(settings)
    writer = LogWriter(stream, settings, wait_seconds=wait, drain_seconds=drain)
    progress, seen = Progress(), 0
    try:
        async with writer, aclosing(watched(settings, worker_id, stop, transport)) as items:
            _log.info("writing", log=stream.address)
            async for item in items:
                await writer.write(item, stop=stop)
                progress.show(lambda: f"{writer.counts.items} items, {writer.counts.payload_bytes} bytes written")
                seen += 1
                if seen == count:
                    break
    finally:
        progress.clear()
    return writer.counts, writer.unwritten_items


def _tell(counts: "LogCounts", unwritten: int) -> None:
    there = f", {counts.already_there} were there already" if counts.already_there else ""
    missing = f", {counts.missing_items} MISSING" if counts.missing_items else ""
    refused = f", {counts.refused_items} TOO LARGE" if counts.refused_items else ""
    left = f", {unwritten} NOT WRITTEN" if unwritten else ""
    print(f"{counts.items} items, {counts.payload_bytes} bytes, {counts.messages} messages", end="")
    print(f"{there}{missing}{refused}{left}")
