"""Measure the drop-in beside FastDeploy's own ops: `python -m benchmarks.fastdeploy`.

A process saves, another gets, with the same arrays. FastDeploy's lane is its ops' loops in C over the kernel's queue,
with arguments that are prepared beforehand; the drop-in's lane is its ops as an engine calls them.
"""

import gc
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from benchmarks.codec.fastdeploy import STRUCT_BYTES
from benchmarks.errors import NotRunError
from benchmarks.processes import Child
from benchmarks.report import Report, Row, progress
from benchmarks.sysv import Queue, queue_for
from benchmarks.workload import HEADLINE_ROWS, Array, Case, make_steps
from tests.engines.fastdeploy.theirs import GETS, Queues, Theirs
from tokenbus.engines import fastdeploy

THEIRS, DROP_IN = "FastDeploy's ops", "drop-in"
_SIZES, _TOP_KS = (64, 256, 512), (0, 5, 20)
_RATE = 200.0
_WAITING = 16
"""How many structs the kernel's queue holds."""
_FORM = "2.6"
_SLOTS, _TOKENS, _COLUMNS, _TOKENS_A_SLOT = 512, 6, 21, 3
_SAVE = "speculate_save_output_topk"


class Figures(NamedTuple):
    """One lane at one size; times in microseconds, medians of the rounds."""

    p50: float
    p99: float
    engine_paced: float
    """Processor time of the engine's thread for a step at the rate."""
    engine_flat: float
    """The same flat out."""
    steps: float
    """Steps a second."""


def main(arguments: Sequence[str] | None = None) -> None:
    report = Report("fastdeploy", __doc__)
    options = report.parse(arguments)
    steps, rounds = (60, 1) if options.quick else (1000, 3)
    sizes = [(HEADLINE_ROWS, 0)] if options.quick else list(product(_SIZES, _TOP_KS))
    rows: list[Row] = []
    shares: list[Row] = []
    try:
        with queue_for(_WAITING * STRUCT_BYTES) as queue:
            for slots, top_k in sizes:
                progress(f"{slots} slots, k = {top_k}")
                found: dict[str, list[Figures]] = {THEIRS: [], DROP_IN: []}
                for _ in range(rounds):
                    for lane in random.sample(list(found), len(found)):
                        found[lane].append(_measured(lane, slots, top_k, steps, queue.identity))
                medians = {lane: Figures(*np.median(each, axis=0).tolist()) for lane, each in found.items()}
                rows += [{"slots": slots, "k": top_k, "lane": lane, **each._asdict()} for lane, each in medians.items()]
                ours, theirs = medians[DROP_IN], medians[THEIRS]
                times = {"p50": ours.p50 / theirs.p50, "steps/s": ours.steps / theirs.steps}
                shares.append({"slots": slots, "k": top_k, **times})
    except NotRunError as error:
        report.fail(error)
    report.table(rows)
    report.table(shares, "the drop-in's, by FastDeploy's")
    report.write()


def _measured(lane: str, slots: int, top_k: int, steps: int, queue: int) -> Figures:
    began, cost, got = turn(lane, slots, top_k, steps, _RATE, queue)
    kept = slice(steps // 10, None)
    latency = (got - began)[kept] / 1e3
    _, flat_cost, flat_got = turn(lane, slots, top_k, steps, 0.0, queue)
    flat = flat_got[kept]
    rate = (flat.size - 1) / (int(flat[-1]) - int(flat[0])) * 1e9
    p50, p99 = np.percentile(latency, (50, 99)).tolist()
    paced, flat_out = (float(np.median(each[kept])) / 1e3 for each in (cost, flat_cost))
    return Figures(p50, p99, paced, flat_out, rate)


def turn(  # noqa: PLR0913, PLR0917 - sizes
    lane: str, slots: int, top_k: int, steps: int, rate: float, queue: int
) -> tuple[Array, Array, Array]:
    order = lane, slots, top_k, steps, rate, queue
    with tempfile.TemporaryDirectory(prefix="tb") as folder, Child() as getter, Child() as saver:
        getter.begin(get_side, folder, *order)
        getter.answer()
        saver.begin(save_side, folder, *order)
        began, cost = saver.answer()
        return began, cost, getter.answer()


def _begin(folder: str) -> None:
    os.environ |= {"TOKENBUS_FASTDEPLOY_FORM": _FORM, "TMPDIR": folder}
    tempfile.tempdir = None
    gc.collect()
    gc.disable()


def save_side(  # noqa: PLR0913, PLR0917 - sizes
    _connection: Connection, folder: str, lane: str, slots: int, top_k: int, steps: int, rate: float, queue: int
) -> tuple[Array, Array]:
    """Save, and return for each step when it began, and what it cost this thread."""
    _begin(folder)
    given = _arguments(slots, top_k)
    lengths, values = given["seq_lens_decoder"], list(given.values())
    save: Callable[[], object] = partial(fastdeploy.speculate_save_output_topk, *values)
    if lane == THEIRS:
        save = _theirs(queue).saving(_SAVE, given)
    noted = np.zeros((2, steps), np.int64)
    begin = time.monotonic()
    for number in range(steps):
        if rate:
            time.sleep(max(0.0, begin + number / rate - time.monotonic()))
        lengths += _TOKENS_A_SLOT
        cpu = time.thread_time_ns()
        noted[0, number] = time.monotonic_ns()
        save()
        noted[1, number] = time.thread_time_ns() - cpu
    fastdeploy.close()
    return noted[0], noted[1]


def get_side(  # noqa: PLR0913, PLR0917 - sizes
    connection: Connection, folder: str, lane: str, slots: int, top_k: int, steps: int, _rate: float, queue: int
) -> Array:
    """Get, and return when each step was in the tensors."""
    _begin(folder)
    places = _SLOTS * _TOKENS
    into: list[Array] = [
        np.zeros((3 + _SLOTS + places * _COLUMNS, 1), np.int64),
        np.zeros((places * _COLUMNS, 1), np.float32),
        np.zeros(places, np.int64),
    ]
    get: Callable[[], object]
    if lane == THEIRS:
        get = _theirs(queue).getting(GETS[_SAVE], into, wait=True)
    else:
        op = partial(fastdeploy.speculate_get_output_topk, into[0], into[1], into[2], _COLUMNS - 1, 0)
        op(False)  # noqa: FBT003 - by that engine's position; from now on it listens
        get = partial(op, True)  # noqa: FBT003 - as above
    connection.send("ready")
    noted = np.zeros(steps, np.int64)
    for number in range(steps):
        get()
        noted[number] = time.monotonic_ns()
    expected = _arguments(slots, top_k)["logprob_token_ids"]
    found = into[0].reshape(-1)[3 + _SLOTS :].reshape(_SLOTS, _TOKENS, _COLUMNS)[:slots, :_TOKENS_A_SLOT]
    if not np.array_equal(found[..., : top_k + 1].reshape(expected.shape), expected):
        raise ValueError(f"{lane}: what was got is not what was saved")
    return noted


def _arguments(slots: int, top_k: int) -> dict[str, Any]:
    """Return the arguments of `speculate_save_output_topk` for a step, by name and in order."""
    step = make_steps(Case(slots, _TOKENS_A_SLOT, top_k), 1, 1)[0]
    ids = step.rectangle_ids.astype(np.int64)
    counts = np.full(slots, _TOKENS_A_SLOT, np.int32)
    return {
        "sampled_token_ids": ids[:, 0].reshape(slots, _TOKENS_A_SLOT).copy(),
        "logprob_token_ids": ids,
        "logprob_scores": step.rectangle_logprobs,
        "logprob_ranks": np.asarray(step.ranks, np.int64),
        "token_num_per_batch": counts,
        "cu_batch_token_offset": (np.cumsum(counts) - counts).astype(np.int32),
        "not_need_stop": np.array([True]),
        "seq_lens_decoder": np.full((slots, 1), 9, np.int32),
        "prompt_lens": np.full((slots, 1), 4),
        "preempted_idx": np.zeros((slots, 1), np.int32),
        "message_flag": 3,
        "rank_id": 0,
        "save_each_rank": False,
    }


def _theirs(queue: int) -> Theirs:
    opened = Queue(queue)
    return Theirs(_FORM, Queues(opened, opened))


if __name__ == "__main__":
    main()
