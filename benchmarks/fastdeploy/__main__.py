"""Measure the drop-in beside FastDeploy's own ops: `python -m benchmarks.fastdeploy`."""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.codec.fastdeploy_struct import STRUCT_BYTES
from benchmarks.fastdeploy.document import goals, page
from benchmarks.fastdeploy.sides import DROP_IN, FORM, THEIRS, Order
from benchmarks.machine import Placement, description
from benchmarks.outputs import Record, declare_outputs, progress, write_outputs
from benchmarks.sysv import queue_for

_SLOTS, _TOP_KS = (64, 256, 512), (0, 5, 20)
_RATE = 200.0
_WAITING = 16
"""How many structs the kernel's queue holds."""
_ROOT = Path(__file__).resolve().parents[2]
_MOST_SECONDS = 300


class Figure(NamedTuple):
    """One lane at one size; times in microseconds, medians of the rounds."""

    lane: str
    slots: int
    top_k: int
    p50: float
    p99: float
    engine_paced: float
    """Processor time of the engine's thread for a step at the rate."""
    engine_flat: float
    """The same flat out."""
    steps_a_second: float


def main(given: Sequence[str] | None = None) -> None:
    """Measure, print the tables, and write what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fastdeploy", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one size and few steps: whether it works")
    declare_outputs(parser, "fastdeploy", has_plot=False)
    options = parser.parse_args(given)
    steps, rounds = (60, 1) if options.quick else (1000, 3)
    sizes = [(256, 0)] if options.quick else list(product(_SLOTS, _TOP_KS))
    figures = []
    with queue_for(_WAITING * STRUCT_BYTES) as queue:
        for slots, top_k in sizes:
            progress(f"{slots} slots, k = {top_k}")
            found: dict[str, list[Figure]] = {THEIRS: [], DROP_IN: []}
            for _ in range(rounds):
                for lane in random.sample(list(found), len(found)):
                    found[lane].append(_measured(lane, slots, top_k, steps, queue.identity))
            figures += [_median(each) for each in found.values()]
    machine = description(Placement(None, frozenset()), vllm=False)
    text = page(figures, machine)
    sys.stdout.write(text)
    record: Record = {"machine": machine, "figures": [each._asdict() for each in figures], "goals": goals(figures)}
    write_outputs(options, "fastdeploy", record, lambda: text)


def _measured(lane: str, slots: int, top_k: int, steps: int, queue: int) -> Figure:
    began, cost, got = _turn(lane, slots, top_k, steps, _RATE, queue)
    kept = slice(steps // 10, None)
    latency = (got - began)[kept] / 1e3
    _, flat_cost, flat_got = _turn(lane, slots, top_k, steps, 0.0, queue)
    flat = flat_got[kept]
    rate = (flat.size - 1) / (int(flat[-1]) - int(flat[0])) * 1e9
    p50, p99 = np.percentile(latency, (50, 99)).tolist()
    engine = [float(np.median(each[kept])) / 1e3 for each in (cost, flat_cost)]
    return Figure(lane, slots, top_k, p50, p99, engine[0], engine[1], rate)


def _turn(  # noqa: PLR0913, PLR0917 - an order without a side
    lane: str, slots: int, top_k: int, steps: int, rate: float, queue: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Run both sides; return when each step was saved, what that cost, and when it was got."""
    with tempfile.TemporaryDirectory(prefix="tb", dir="/tmp") as folder:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TOKENBUS_")}
        environment["TOKENBUS_FASTDEPLOY_FORM"] = FORM
        running = []
        for side in ("get", "save"):
            order = Order(side, lane, slots, top_k, steps, rate, queue, f"{folder}/{side}.npy")
            command = [sys.executable, "-m", "benchmarks.fastdeploy.sides", json.dumps(order._asdict())]
            process = subprocess.Popen(
                command, cwd=_ROOT, env=environment | {"TMPDIR": folder}, stdout=subprocess.PIPE, text=True
            )
            running.append(process)
            if side == "get" and process.stdout is not None:
                process.stdout.readline()
        try:
            for process in reversed(running):
                if process.wait(_MOST_SECONDS):
                    raise RuntimeError(f"{lane}: a side ended with {process.returncode}")
        finally:
            for process in running:
                process.kill()
                process.communicate()
        (began, cost), got = np.load(f"{folder}/save.npy"), np.load(f"{folder}/get.npy")
        return began, cost, got


def _median(rounds: Sequence[Figure]) -> Figure:
    numbers = [float(np.median([each[at] for each in rounds])) for at in range(3, len(Figure._fields))]
    return Figure._make([*rounds[0][:3], *numbers])


if __name__ == "__main__":
    main()
