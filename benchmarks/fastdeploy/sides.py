"""The two sides of a lane, each a process: `python -m benchmarks.fastdeploy.sides ORDER` with an order as JSON.

Both have the same arrays at hand and do nothing else. What the kernel's queue costs is its structs filled and copied by
numpy, where that engine has C++ loops; both sides then do what its ops do, and no more.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from benchmarks.codec.fastdeploy_struct import STRUCT
from benchmarks.sysv import Queue
from benchmarks.workload import Case, make_steps
from tokenbus_engines import fastdeploy

SLOTS, TOKENS, COLUMNS = 512, 6, 21
TOKENS_A_SLOT = 3
_WAIT, _NOT = True, False
KERNEL, DROP_IN = "System V struct", "drop-in"
Array = np.ndarray[Any, np.dtype[Any]]


class Order(NamedTuple):
    """What a side is to do."""

    side: str
    lane: str
    slots: int
    top_k: int
    steps: int
    rate: float
    """Steps a second; 0: as many as there can be."""
    queue: int
    """The kernel's queue."""
    results: str


def arguments(slots: int, top_k: int) -> list[Any]:
    """Return what `speculate_save_output_topk` is given of a step."""
    step = make_steps(Case(slots, TOKENS_A_SLOT, top_k), 1, 1)[0]
    ids = step.rectangle_ids.astype(np.int64)
    counts = np.full(slots, TOKENS_A_SLOT, np.int32)
    return [
        *(ids[:, :1].copy(), ids, step.rectangle_logprobs, step.ranks, counts),
        (np.cumsum(counts) - counts).astype(np.int32),
        np.array([True]),
        np.full((slots, 1), 9, np.int32),
        np.full((slots, 1), 4),
        np.zeros((slots, 1), np.int32),
        *(3, 0, False),
    ]


def outputs() -> list[Array]:
    """Return what `speculate_get_output_topk` fills."""
    places = SLOTS * TOKENS
    return [
        np.zeros((3 + SLOTS + places * COLUMNS, 1), np.int64),
        np.zeros((places * COLUMNS, 1), np.float32),
        np.zeros(places, np.int64),
    ]


def _kernel_save(queue: Queue, given: list[Any]) -> Callable[[], None]:
    struct = np.zeros((), STRUCT)
    struct["mtype"] = 1
    meta, text = struct["meta"], struct["mtext"]

    def save() -> None:
        sampled, ids, scores, ranks, counts = given[:5]
        slots, columns, most = counts.size, ids.shape[1], int(counts.max())
        meta[:3] = 1, 3 | columns << 8, slots
        meta[3 : 3 + slots] = counts
        lines = (slots, most, columns)
        text["tokens"][:slots, :most, :columns] = ids.reshape(lines)
        text["tokens"][:slots, :most, 0] = sampled.reshape(lines[:2])
        text["scores"][:slots, :most, :columns] = scores.reshape(lines)
        text["ranks"][:slots, :most] = ranks.reshape(lines[:2])
        given[9][:] = 0
        queue.send(struct)

    return save


def _kernel_get(queue: Queue, into: list[Array]) -> Callable[[], None]:
    struct = np.zeros((), STRUCT)
    meta, text = struct["meta"], struct["mtext"]
    tokens, scores, ranks = into[0].reshape(-1), into[1].reshape(SLOTS, TOKENS, COLUMNS), into[2].reshape(SLOTS, TOKENS)
    ids = tokens[3 + SLOTS :].reshape(SLOTS, TOKENS, COLUMNS)

    def get() -> None:
        queue.receive(struct)
        slots, columns = int(meta[2]), int(meta[1]) >> 8
        tokens[: 3 + slots] = meta[: 3 + slots]
        most = int(meta[3 : 3 + slots].max())
        ids[:slots, :most, :columns] = text["tokens"][:slots, :most, :columns]
        scores[:slots, :most, :columns] = text["scores"][:slots, :most, :columns]
        ranks[:slots, :most] = text["ranks"][:slots, :most]

    return get


def save_side(order: Order) -> Array:
    """Save, and return for each step when it began, and what it cost this thread, in nanoseconds."""
    given = arguments(order.slots, order.top_k)
    lengths = given[7]
    if order.lane == KERNEL:
        save = _kernel_save(Queue(order.queue), given)
    else:
        save = lambda: fastdeploy.speculate_save_output_topk(*given)  # noqa: E731 - as the other
    noted = np.zeros((2, order.steps), np.int64)
    begin = time.monotonic()
    for number in range(order.steps):
        if order.rate:
            time.sleep(max(0.0, begin + number / order.rate - time.monotonic()))
        lengths += TOKENS_A_SLOT
        cpu = time.thread_time_ns()
        noted[0, number] = time.monotonic_ns()
        save()
        noted[1, number] = time.thread_time_ns() - cpu
    fastdeploy.close()
    return noted


def get_side(order: Order) -> Array:
    """Get, and return when each step was in the tensors, in nanoseconds."""
    into = outputs()
    if order.lane == KERNEL:
        get = _kernel_get(Queue(order.queue), into)
    else:
        tokens, scores, ranks = into
        fastdeploy.speculate_get_output_topk(tokens, scores, ranks, COLUMNS - 1, 0, _NOT)  # from now on it listens
        get = lambda: fastdeploy.speculate_get_output_topk(tokens, scores, ranks, COLUMNS - 1, 0, _WAIT)  # noqa: E731
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    noted = np.zeros(order.steps, np.int64)
    for number in range(order.steps):
        get()
        noted[number] = time.monotonic_ns()
    expected = arguments(order.slots, order.top_k)
    found = into[0].reshape(-1)[3 + SLOTS :].reshape(SLOTS, TOKENS, COLUMNS)[: order.slots, :TOKENS_A_SLOT]
    if not np.array_equal(found[..., : order.top_k + 1].reshape(expected[1].shape), expected[1]):
        raise ValueError(f"{order.lane}: what was got is not what was saved")
    return noted


def main() -> None:
    """Do what an order says, and leave the result where it says."""
    order = Order(**json.loads(sys.argv[1]))
    gc.collect()
    gc.disable()
    noted = (save_side if order.side == "save" else get_side)(order)
    np.save(order.results, noted)
    os._exit(0)


if __name__ == "__main__":
    main()
