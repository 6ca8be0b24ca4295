"""tokenbus record: writes workers' streams to files, one for each life of a worker."""

import argparse
import asyncio
import json
from dataclasses import replace

from tokenbus_services.bus import Transport
from tokenbus_services.cli.arguments import whole
from tokenbus_services.cli.configuration import declare_settings, faults_told, load_settings
from tokenbus_services.cli.files import Files
from tokenbus_services.cli.progress import Progress
from tokenbus_services.cli.watching import watching
from tokenbus_services.printable import printable
from tokenbus_services.settings import Settings
from tokenbus_services.signals import stop_on_signals

_DESCRIPTION = """\
Write a worker's stream to a file, as it passes through a processor: the same bytes that the worker published, with its
handshake before them, for `tokenbus replay` or to look into. Each life of a worker is a stream of its own and has a
file of its own: {worker} and {epoch} in FILE stand for both. Where two streams would have one name, the later one's
file has .WORKER.EPOCH behind it. Files that exist are not written over: then it ends with status 2.

What it reads too slowly is missing: the file says so in its place, a line says how much, and the status is 1. It starts
with the first item that it sees; to have all of a stream, start it before the worker. It ends after --count items, or
with a signal. docs/recording.md has the format.

examples:
  tokenbus record steps.tokenbus --worker worker-1            one worker
  tokenbus record 'streams/{worker}-{epoch}.tokenbus'         every worker, a file for each of their lives
  tokenbus record steps.tokenbus --count 1000 --json          a summary for machines

settings that matter: bus.clients_address, bus.key_file and bus.server_key, client.window_frames and
client.window_bytes (how much may be on its way to this client, here at least 512 frames; the processor's
clients.send_queue_frames must be above that).
"""
_WINDOW_FRAMES = 512
"""For a few tenths of a second of a fast worker's stream; a client that asked for the tokens has others to wait for."""


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = _DESCRIPTION
    parser.add_argument("files", nargs=1, metavar="FILE", help="where to write; {worker} and {epoch} are filled in")
    parser.add_argument("--worker", default="", metavar="ID", help="whose streams (default: every worker's)")
    parser.add_argument("--count", type=whole, default=0, metavar="N", help="end after so many items in all")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON document")
    declare_settings(parser, {"--clients-address": "bus.clients_address"})


def run(options: argparse.Namespace) -> int:
    """Record until a signal, or until there was enough; return 1 if something is missing."""
    settings = load_settings(options)
    client = replace(settings.client, window_frames=max(settings.client.window_frames, _WINDOW_FRAMES))
    settings = replace(settings, client=client)
    files = Files(options.files[0])
    with faults_told():
        asyncio.run(_run(settings, options, files))
    if options.json:
        print(json.dumps(files.summary(), indent=2))
    else:
        _tell(files)
    return 1 if files.missing_items else 0


async def _run(settings: Settings, options: argparse.Namespace, files: Files) -> None:
    with stop_on_signals() as stop:
        await record(settings, files, stop, worker_id=options.worker, count=options.count)


async def record(  # noqa: PLR0913 - each is given by name
    settings: Settings,
    files: Files,
    stop: asyncio.Event,
    *,
    worker_id: str = "",
    count: int = 0,
    transport: Transport | None = None,
) -> None:
    """Write each item that is seen to its stream's file, until told to stop or until so many were written."""
    progress = Progress()
    try:
        async with watching(settings, worker_id, transport) as watch:
            while (seen := await watch.next(stop)) is not None:
                if seen.watched is not None:
                    files.write(seen.stream, seen.watched)
                    progress.show(lambda: f"{files.items} items, {files.payload_bytes} bytes recorded")
                if count and files.items >= count:
                    return
    finally:
        progress.clear()
        files.close()


def _tell(files: Files) -> None:
    for each in files.summary()["files"]:
        which = f"{each['worker_id']}/{each['epoch']}, {each['first_sequence']} to {each['last_sequence']}"
        missing = f", {each['missing_items']} MISSING in {each['gaps']} gaps" if each["gaps"] else ""
        print(printable(f"{each['file']}: {each['items']} items of {which}, {each['payload_bytes']} bytes{missing}"))
    if not files.recordings:
        print("nothing was seen")
