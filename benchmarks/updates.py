"""Measure the pause of an update of weights, beside vLLM's own server: `python -m benchmarks.updates`.

Both serve the same model, in turn: while streams are generated, its weights are loaded from its folder again. vLLM's
server does so by /pause, /collective_rpc with reload_weights, and /resume; ours by /update_weights. The pause is the
longest time between two events of a stream, of the median stream. What follows -- are vLLM's own options, for both.
"""

import asyncio
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Iterable, Sequence
from itertools import repeat
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.errors import NotRunError
from benchmarks.http_clients import Stream, connected, request_of
from benchmarks.processes import Child, TaskFailedError
from benchmarks.report import Report, Row, progress
from benchmarks.vllm.model import SHAPES, save_weights
from benchmarks.vllm.systems import PYTHON, TOKENBUS, Plan, System, running

_PATH = "/v1/completions"
_EVENTS = 20
"""Which each stream has before an update, and after it."""
_LOOK_SECONDS = 0.01


class Pause(NamedTuple):
    """What one update took, in milliseconds."""

    pause: float
    update: float
    """The requests for it, one after the other."""
    before: float
    """The longest time between two events in as many events before it."""


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if arguments is None else arguments)
    split = given.index("--") if "--" in given else len(given)
    report = Report("updates", __doc__)
    add = report.parser.add_argument
    add("--rounds", type=int, default=9, metavar="N", help="updates of each server (9)")
    add("--streams", type=int, default=8, metavar="N", help="at once (8)")
    add("--model", type=Path, metavar="FOLDER", help="a model's folder (one is made, with random weights)")
    add("--shape", choices=SHAPES, default="tiny", help="of the model that is made (tiny)")
    options = report.parse(given[:split])
    if options.quick:
        options.rounds, options.streams = 2, 2
    if importlib.util.find_spec("vllm") is None:
        report.fail(NotRunError("not run: vLLM is not installed beside Tokenbus"))
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # else vLLM's server has no /collective_rpc
    try:
        found = _measured(options.model, options.shape, given[split + 1 :], options.rounds, options.streams)
    except (NotRunError, TaskFailedError) as error:
        report.fail(error)
    report.table([_row(name, of) for name, of in found.items()], "milliseconds")
    ratios = [ours.pause / theirs.pause for ours, theirs in zip(found[TOKENBUS], found[PYTHON], strict=True)]
    report.table([{"": f"{TOKENBUS} / {PYTHON}", "pause": median(ratios), "least": min(ratios), "most": max(ratios)}])
    report.keep("rounds", {name: [each._asdict() for each in of] for name, of in found.items()})
    report.write()


def _row(name: str, found: Sequence[Pause]) -> Row:
    return {"": name, **{field: median(getattr(each, field) for each in found) for field in Pause._fields}}


def _measured(
    model: Path | None, shape: str, engine_options: list[str], rounds: int, streams: int
) -> dict[str, list[Pause]]:
    """Return each server's pauses; the first update of each, which finds the weights on no page, does not count."""
    with tempfile.TemporaryDirectory(prefix="tb", dir="/tmp") as folder, Child() as reader:
        if model is None:
            make, own_options = SHAPES[shape]
            # As last given: the weights of a model that is made are read from its folder here.
            engine_options = [*own_options, "--load-format", "auto", *engine_options]
            model = Path(folder, "made")
            for task in (make, save_weights):
                reader.begin(task, model)
                reader.answer()
        plan = Plan([PYTHON, TOKENBUS], model, engine_options, settings={"gateway__control": "true"})
        found: dict[str, list[Pause]] = {name: [] for name in plan.names}
        with running(plan) as systems:
            for number in range(rounds + 1):
                for name in sorted(systems, reverse=number % 2 == 1):
                    progress(f"round {number} of {rounds}: {name}")
                    pause = _updated(systems[name], plan.model, reader, streams)
                    if number:
                        found[name].append(pause)
    return found


def _updated(system: System, model: Path, reader: Child, streams: int) -> Pause:
    body = {"model": model.name, "prompt": [1, 2, 3], "max_tokens": 200, "ignore_eos": True, "stream": True}
    reader.begin(read, system.addresses[0], body | {"stream_options": {"include_usage": True}}, streams)
    before = reader.answer()
    began = time.monotonic()
    if system.name == TOKENBUS:
        system.get("/update_weights", {"weight_dir": str(model)})
    else:
        system.get("/pause?mode=keep&clear_cache=false", {})  # else it computes what streams have so far again
        system.get("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(model)}})
        system.get("/resume", {})
    took = time.monotonic() - began
    pause = reader.ask("updated")
    return Pause(1000 * pause, 1000 * took, 1000 * before)


# What the clients' process does.


class _Timed(Stream):
    """A stream that notes the longest time between two of its events."""

    def __init__(self, requests: Iterable[bytes]) -> None:
        super().__init__(requests)
        self.count, self.longest, self._latest = 0, 0.0, 0.0

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        self.longest = max(self.longest, now - (self._latest or now))
        self._latest = now
        self.count += 1
        super().data_received(data)

    def close(self) -> None:
        self.ended.cancel()
        self._transport.close()


def read(connection: Connection, address: str, body: dict[str, Any], streams: int) -> float:
    """Send how long streams waited at most for an event, and return it again once each has gone on after an update."""
    return asyncio.run(_read(connection, address, request_of(_PATH, body), streams))


async def _read(connection: Connection, address: str, request: bytes, count: int) -> float:
    streams = await connected([address], [repeat(request)] * count, _Timed)
    for stream in streams:
        stream.ask()
    await _gone_on(streams)  # the first events wait for the prompts of all
    connection.send(await _longest(streams))
    found = await _longest(streams, asyncio.to_thread(connection.recv))
    for stream in streams:
        stream.close()
    return found


async def _longest(streams: Sequence[_Timed], until: Awaitable[object] | None = None) -> float:
    """Return the longest wait of the median stream from now on, until something happens and all have gone on."""
    for stream in streams:
        stream.longest = 0.0
    if until is not None:
        await until
    await _gone_on(streams)
    return median(stream.longest for stream in streams)


async def _gone_on(streams: Sequence[_Timed]) -> None:
    for stream in streams:
        stream.count = 0
    while any(stream.count < _EVENTS for stream in streams):  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(_LOOK_SECONDS)


if __name__ == "__main__":
    main()
