"""tokenbus record."""

import argparse
import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from tokenbus.cli.configuration import load_settings
from tokenbus.cli.errors import WRONG_USE, CommandError
from tokenbus.cli.recording_files import Files
from tokenbus.cli.terminal import Progress
from tokenbus.cli.watching import declare_watching, watched
from tokenbus.logs import logger
from tokenbus.printable import printable
from tokenbus.recordings.durable_log import require_nats
from tokenbus.recordings.items import StreamItem
from tokenbus.settings import Settings
from tokenbus.signals import stop_on_signals

if TYPE_CHECKING:
    from tokenbus.recordings.durable_log.writer import LogCounts

_DESCRIPTION = """\
Write the workers' streams to files or to a durable log, as they pass through a processor. Recording begins with the
next item; to record a whole stream, start this command before the worker. It stops after --count items or on a signal.
If it is too slow, items are missing: a line says how many, and the status is 1.

Each life of a worker gets its own file with the bytes that the worker published. {worker} and {epoch} in FILE are
replaced; if two streams have the same name, .WORKER.EPOCH is added to the second. Existing files are never overwritten.

With --to each item goes into a JetStream stream exactly once and in order, even if several of these commands write to
one log, or are killed and restarted.

examples:
  tokenbus record steps.tokenbus --worker worker-1            one worker
  tokenbus record 'streams/{worker}-{epoch}.tokenbus'         every worker, one file for each life
  tokenbus record --to nats://127.0.0.1:4222/rollouts         every worker, to the log `rollouts`

main settings: bus.clients_address, bus.key_file, bus.server_key; with --to durable_log.*
"""
_WINDOW_FRAMES = 4096
_WINDOW_BYTES = 1 << 26
"""Maximum number of unacknowledged bytes, which is enough for bursts of several fast workers."""
_log = logger("record")


def declare(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    parser.usage = f"{parser.prog} (FILE | --to ADDRESS) [options]"
    parser.add_argument("files", nargs="*", metavar="FILE", help="the file; {worker} and {epoch} are replaced")
    parser.add_argument("--to", dest="durable_log.address", metavar="ADDRESS", help="a durable log instead of FILE")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON document")
    declare_watching(parser)


def run(options: argparse.Namespace) -> int:
    to = vars(options)["durable_log.address"]
    if len(options.files) + bool(to) != 1:
        raise CommandError("expected either FILE or --to ADDRESS", WRONG_USE)
    settings = load_settings(options)
    frames, size = max(settings.client.window_frames, _WINDOW_FRAMES), max(settings.client.window_bytes, _WINDOW_BYTES)
    settings = replace(settings, client=replace(settings.client, window_frames=frames, window_bytes=size))
    return asyncio.run((_to_log if to else _to_files)(settings, options))


async def _to_files(settings: Settings, options: argparse.Namespace) -> int:
    files = Files(options.files[0])
    with stop_on_signals() as stop:
        await record(watched(settings, options.worker, stop), files, options.count)
    if options.json:
        print(json.dumps(files.summary(), indent=2))
    else:
        for each in files.summary()["files"]:
            which = f"{each['worker_id']}/{each['epoch']}, {each['first_sequence']} to {each['last_sequence']}"
            missing = f", {each['missing_items']} MISSING in {each['gaps']} gaps" if each["gaps"] else ""
            print(
                printable(f"{each['file']}: {each['items']} items of {which}, {each['payload_bytes']} bytes{missing}")
            )
        if not files.recorders:
            print("no item was recorded")
    return 1 if files.total("missing_items") else 0


async def _to_log(settings: Settings, options: argparse.Namespace) -> int:
    require_nats(settings.durable_log.address)
    with stop_on_signals() as stop:
        items = watched(settings, options.worker, stop)
        counts, unwritten = await record_to_log(items, settings, stop, options.count)
    if options.json:
        print(json.dumps(asdict(counts) | {"unwritten_items": unwritten}, indent=2))
    else:
        known = f", {counts.already_there} were in the log already" if counts.already_there else ""
        missing = f", {counts.missing_items} MISSING" if counts.missing_items else ""
        refused = f", {counts.refused_items} TOO LARGE" if counts.refused_items else ""
        left = f", {unwritten} NOT WRITTEN" if unwritten else ""
        written = f"{counts.items} items, {counts.payload_bytes} bytes, {counts.messages} messages"
        print(f"{written}{known}{missing}{refused}{left}")
    return 1 if counts.missing_items or counts.refused_items or unwritten else 0


async def record(items: AsyncGenerator[StreamItem, None], files: Files, count: int = 0) -> None:
    """Write `count` items, or all items if `count` is 0, to the files of their streams."""
    try:
        async with aclosing(_first(items, count)) as wanted:
            async for item in wanted:
                files.write(item)
    finally:
        files.close()


async def record_to_log(
    items: AsyncGenerator[StreamItem, None], settings: Settings, stop: asyncio.Event, count: int = 0
) -> "tuple[LogCounts, int]":
    """Write `count` items to the log, or all if `count` is 0. Return the counts and the number of unwritten items."""
    from tokenbus.recordings.durable_log.stream import LogError, LogStream  # noqa: PLC0415 - an extra
    from tokenbus.recordings.durable_log.writer import LogWriter  # noqa: PLC0415

    stream = LogStream(settings)
    writer = LogWriter(stream, settings, wait_seconds=settings.bus.heartbeat_interval_ms / 1000)
    await writer.open(LogError, 2 * settings.bus.heartbeat_timeout_ms / 1000)
    drain_seconds = 0.0
    try:
        _log.info("writing", log=stream.address)
        async with aclosing(_first(items, count)) as wanted:
            async for item in wanted:
                await writer.write(item, stop=stop)
        drain_seconds = settings.client.drain_timeout_ms / 1000
    finally:
        await writer.close(drain_seconds)
    return writer.counts, writer.unwritten_items


async def _first(items: AsyncGenerator[StreamItem, None], count: int) -> AsyncGenerator[StreamItem, None]:
    """Yield the first `count` items, or all items if `count` is 0, and show the progress."""
    progress, seen, size = Progress(), 0, 0
    try:
        async with aclosing(items):
            async for item in items:
                yield item
                seen, size = seen + 1, size + len(item.payload)
                progress.show(f"{seen} items, {size} bytes recorded")
                if seen == count:
                    return
    finally:
        progress.clear()
