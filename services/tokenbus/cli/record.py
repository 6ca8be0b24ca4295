"""tokenbus record: writes workers' streams to files, or to a durable log."""

import argparse
import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING

from tokenbus.cli.configuration import load_settings
from tokenbus.cli.errors import WRONG_USE, CommandError
from tokenbus.cli.export import require_parquet
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
Write workers' streams as they pass through a processor, to files or to a durable log. It starts with the first item
that it sees; to have all of a stream, start it before the worker. It ends after --count items, or with a signal. Items
that it reads too slowly are missing: a line says how many, and the status is 1.

Each life of a worker has a file of its own, with the bytes that the worker published: {worker} and {epoch} in FILE
stand for both. Where two streams would have one name, the later one's file has .WORKER.EPOCH behind it. Files that
exist are not written over. With --format parquet FILE is a folder of Parquet files, with a row for each token; after a
kill, `tokenbus export` completes it. docs/recording.md has the format.

With --to each item goes into a JetStream stream once and in order, however many of these commands write to one log, and
however often one is killed and started again. docs/log.md says how to read it, and how a processor keeps it itself.

examples:
  tokenbus record steps.tokenbus --worker worker-1            one worker
  tokenbus record 'streams/{worker}-{epoch}.tokenbus'         every worker, a file for each of their lives
  tokenbus record 'rollouts/{worker}-{epoch}' --format parquet
  tokenbus record --to nats://127.0.0.1:4222/rollouts         every worker, into the log `rollouts`

settings that matter: bus.clients_address, bus.key_file and bus.server_key; with --to durable_log.*
"""
_PART_BYTES = 1 << 27
"""How many bytes of items a Parquet file has."""
_WINDOW_FRAMES = 4096
_WINDOW_BYTES = 1 << 26
"""Enough for a burst of some fast workers. Each item may have a frame before it that announces its stream."""
_log = logger("record")


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = _DESCRIPTION
    parser.usage = f"{parser.prog} (FILE | --to ADDRESS) [options]"
    parser.add_argument("files", nargs="*", metavar="FILE", help="where to write; {worker} and {epoch} are filled in")
    parser.add_argument("--to", dest="durable_log.address", metavar="ADDRESS", help="a durable log, instead of FILE")
    parser.add_argument("--format", choices=("tokenbus", "parquet"), default="tokenbus", help="of the files (tokenbus)")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON document")
    declare_watching(parser)


def run(options: argparse.Namespace) -> int:
    """Record until a signal, or until there was enough; return 1 if something is missing."""
    to = vars(options)["durable_log.address"]
    if len(options.files) + bool(to) != 1:
        raise CommandError("FILE, or --to ADDRESS: one of them", WRONG_USE)
    if to and options.format == "parquet":
        raise CommandError("--format: with FILE, not with --to", WRONG_USE)
    settings = _widened(load_settings(options))
    return asyncio.run((_to_log if to else _to_files)(settings, options))


def _widened(settings: Settings) -> Settings:
    """Return settings with a window that leaves hardly an item of a fast worker out."""
    frames, size = max(settings.client.window_frames, _WINDOW_FRAMES), max(settings.client.window_bytes, _WINDOW_BYTES)
    return replace(settings, client=replace(settings.client, window_frames=frames, window_bytes=size))


async def _to_files(settings: Settings, options: argparse.Namespace) -> int:
    is_parquet = options.format == "parquet"
    if is_parquet:
        require_parquet()
    files = Files(options.files[0], _PART_BYTES if is_parquet else 0)
    with stop_on_signals() as stop:
        await record(watched(settings, options.worker, stop), files, options.count)
    if options.json:
        print(json.dumps(files.summary(), indent=2))
    else:
        _tell(files)
    return 1 if files.total("missing_items") else 0


async def _to_log(settings: Settings, options: argparse.Namespace) -> int:
    require_nats(settings.durable_log.address)
    with stop_on_signals() as stop:
        items = watched(settings, options.worker, stop)
        counts, unwritten = await record_to_log(items, settings, stop, options.count)
    if options.json:
        print(json.dumps(asdict(counts) | {"unwritten_items": unwritten}, indent=2))
    else:
        _tell_log(counts, unwritten)
    return 1 if counts.missing_items or counts.refused_items or unwritten else 0


async def record(items: AsyncGenerator[StreamItem, None], files: Files, count: int = 0) -> None:
    """Write `count` items to their streams' files; 0: until there are no more."""

    async def write(item: StreamItem) -> None:
        files.write(item)

    try:
        await _write(items, count, write, lambda: (files.total("items"), files.total("payload_bytes")))
    finally:
        files.close()


async def record_to_log(
    items: AsyncGenerator[StreamItem, None], settings: Settings, stop: asyncio.Event, count: int = 0
) -> "tuple[LogCounts, int]":
    """Write `count` items to the log, 0: until there are no more; return the counts, and how many are unwritten."""
    from tokenbus.recordings.durable_log.stream import LogError, LogStream  # noqa: PLC0415 - an extra
    from tokenbus.recordings.durable_log.writer import LogWriter  # noqa: PLC0415

    stream = LogStream(settings)
    writer = LogWriter(stream, settings, wait_seconds=settings.bus.heartbeat_interval_ms / 1000)
    await writer.open(LogError, 2 * settings.bus.heartbeat_timeout_ms / 1000)
    drain_seconds = 0.0
    try:
        _log.info("writing", log=stream.address)
        write = partial(writer.write, stop=stop)
        await _write(items, count, write, lambda: (writer.counts.items, writer.counts.payload_bytes))
        drain_seconds = settings.client.drain_timeout_ms / 1000
    finally:
        await writer.close(drain_seconds)
    return writer.counts, writer.unwritten_items


async def _write(
    items: AsyncGenerator[StreamItem, None],
    count: int,
    write: Callable[[StreamItem], Awaitable[None]],
    written: Callable[[], tuple[int, int]],
) -> None:
    progress, seen = Progress(), 0
    try:
        async with aclosing(items):
            async for item in items:
                await write(item)
                progress.show(lambda: "{} items, {} bytes recorded".format(*written()))
                seen += 1
                if seen == count:
                    return
    finally:
        progress.clear()


def _tell(files: Files) -> None:
    for each in files.summary()["files"]:
        which = f"{each['worker_id']}/{each['epoch']}, {each['first_sequence']} to {each['last_sequence']}"
        missing = f", {each['missing_items']} MISSING in {each['gaps']} gaps" if each["gaps"] else ""
        print(printable(f"{each['file']}: {each['items']} items of {which}, {each['payload_bytes']} bytes{missing}"))
    if not files.recorders:
        print("nothing was seen")


def _tell_log(counts: "LogCounts", unwritten: int) -> None:
    there = f", {counts.already_there} were there already" if counts.already_there else ""
    missing = f", {counts.missing_items} MISSING" if counts.missing_items else ""
    refused = f", {counts.refused_items} TOO LARGE" if counts.refused_items else ""
    left = f", {unwritten} NOT WRITTEN" if unwritten else ""
    print(f"{counts.items} items, {counts.payload_bytes} bytes, {counts.messages} messages", end="")
    print(f"{there}{missing}{refused}{left}")
