"""tokenbus replay: publishes a recorded stream to a processor again."""

import argparse
import asyncio
import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenbus_services.cli.configuration import declare_settings, load_settings, reporting_faults
from tokenbus_services.cli.errors import WRONG_USE, CommandError
from tokenbus_services.cli.watching import logged
from tokenbus_services.items import Recorder, RecordingError, read_recording
from tokenbus_services.printable import printable
from tokenbus_services.settings import ENTRIES, Settings
from tokenbus_services.signals import stop_on_signals
from tokenbus_services.terminal import Progress
from tokenbus_services.worker.replay import Replay, Replayed, ReplayError

_DESCRIPTION = """\
Publish a recording to a processor, as the worker that published it first: the same worker id and epoch, the same bytes.
A processor that has seen this or a later life of that worker refuses it; with --as the stream is another worker's, in a
new epoch, and everything else in it stays. Items that are missing in the recording are reported to the processor as
missing. The replayed worker takes no new requests. The status is 1 if the recording is broken, with a line that says
where, if the processor refuses it, or if not everything was acknowledged.

Its requests are those of the recording: `processor.request(key)` or a client's `resume(key, 0)` takes their
tokens. The processor keeps rows that no consumer takes for 10 s, and then acknowledges them.

examples:
  tokenbus replay steps.tokenbus                           as fast as it was produced
  tokenbus replay steps.tokenbus --speed 10                ten times as fast
  tokenbus replay steps.tokenbus --speed max --as again    as fast as the processor takes it, as the worker `again`
  tokenbus replay --from nats://127.0.0.1:4222 --worker w-1    what a durable log has of a worker's latest life

settings that matter: bus.workers_address, bus.key_file and bus.server_key, worker.retention_* (the most that waits for
acknowledgement), worker.block_timeout_ms (how long it waits for a processor, for room in its
retention, and at the end for acknowledgements), worker.drain_timeout_ms (the same, after a signal).
"""


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = _DESCRIPTION
    parser.add_argument("files", nargs="*", metavar="FILE", help="what `tokenbus record` wrote")
    parser.add_argument("--from", dest="log", metavar="ADDRESS", help="a durable log, instead of a file")
    parser.add_argument("--worker", default="", metavar="ID", help="with --from: the worker whose latest life it is")
    parser.add_argument(
        "--speed", type=_speed, default=1.0, metavar="X", help="how many times as fast as it was produced, or max (1)"
    )
    parser.add_argument("--as", dest="worker_id", metavar="WORKER_ID", help="publish it as this worker's")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON document")
    declare_settings(parser, {"--workers-address": "bus.workers_address"})


def run(options: argparse.Namespace) -> int:
    """Publish a recording; return 1 if not everything was acknowledged."""
    settings = load_settings(options)
    if len(options.files) + (options.log is not None) != 1:
        raise CommandError("one FILE or --from ADDRESS", WRONG_USE)
    name = options.log or options.files[0]
    with reporting_faults():
        if options.worker_id is not None:
            ENTRIES["worker.id"].convert(options.worker_id, "--as")
    try:
        with reporting_faults():
            if options.files:
                done = asyncio.run(_run(settings, options, Path(name)))
            else:
                with TemporaryDirectory() as folder:
                    asyncio.run(_fetch(settings, name, options.worker, file := Path(folder, "log")))
                    done = asyncio.run(_run(settings, options, file))
    except OSError as error:
        raise CommandError(printable(f"{name}: {(error.strerror or str(error)).lower()}")) from None
    except (RecordingError, ReplayError) as error:
        raise CommandError(printable(str(error))) from None
    _tell(done, as_json=options.json)
    return 1 if done.unacknowledged else 0


async def _fetch(settings: Settings, address: str, worker_id: str, path: Path) -> None:
    """Write what a log has of the latest life of a worker to a file, as `tokenbus record` would."""
    recorder: Recorder | None = None
    with path.open("wb") as file:
        async for item in logged(address, worker_id, settings):
            if recorder is not None and item.worker_id != recorder.hello.worker_id:
                raise CommandError("--worker: the log has items of several workers", WRONG_USE)
            if recorder is not None and item.epoch < recorder.epoch:  # written late
                continue
            if recorder is None or item.epoch > recorder.epoch:
                recorder = Recorder(item.epoch, item.hello)
                file.seek(0)
                file.truncate()
            file.write(recorder.add(item))
    if recorder is None:
        raise CommandError(f"{address}: nothing to replay" + (f" of worker {worker_id}" if worker_id else ""))


async def _run(settings: Settings, options: argparse.Namespace, path: Path) -> Replayed:
    name = None if options.worker_id is None else (options.worker_id, time.time_ns())
    progress = Progress()
    with stop_on_signals() as stop:
        replay = Replay(read_recording(path), settings, renamed_to=name, speed=options.speed)
        done = replay.done
        try:
            return await replay.run(
                stop, lambda: progress.show(lambda: f"{done.items} items, {done.payload_bytes} bytes published")
            )
        finally:
            progress.clear()


def _tell(done: Replayed, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(done) | {"epoch": str(done.epoch)}, indent=2))
        return
    missing = f", {done.missing_items} MISSING in the recording" if done.missing_items else ""
    waiting = f", {done.unacknowledged} NOT ACKNOWLEDGED" if done.unacknowledged else ""
    name = f"{done.worker_id}/{done.epoch}"
    print(printable(f"{done.items} items, {done.payload_bytes} bytes as {name}{missing}{waiting}"))


def _speed(text: str) -> float:
    """Return a speed; 0 stands for max."""
    if text == "max":
        return 0
    try:
        speed = float(text)
    except ValueError:
        speed = math.nan
    if not 0 < speed < math.inf:
        raise argparse.ArgumentTypeError(f"a number above 0, or max, got {text!r}")
    return speed
