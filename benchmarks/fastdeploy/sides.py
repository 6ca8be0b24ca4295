"""The two sides of a lane, each a process: `python -m benchmarks.fastdeploy.sides ORDER` with an order as JSON.

Both use the same arrays. FastDeploy's lane is its ops' loops in C over the kernel's queue, with arguments that are
prepared beforehand; the drop-in's lane is its ops as an engine calls them.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from benchmarks.fastdeploy.theirs import GETS, Queues, Theirs
from benchmarks.sysv import Queue
from benchmarks.workload import Case, make_steps
from tokenbus_engines import fastdeploy

FORM = "2.6"
SLOTS, TOKENS, COLUMNS = 512, 6, 21
TOKENS_A_SLOT = 3
_SAVE = "speculate_save_output_topk"
THEIRS, DROP_IN = "FastDeploy's ops", "drop-in"
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


def arguments(slots: int, top_k: int) -> dict[str, Any]:
    """Return the arguments of `speculate_save_output_topk` for a step, by name and in order."""
    step = make_steps(Case(slots, TOKENS_A_SLOT, top_k), 1, 1)[0]
    ids = step.rectangle_ids.astype(np.int64)
    counts = np.full(slots, TOKENS_A_SLOT, np.int32)
    return {
        "sampled_token_ids": ids[:, 0].reshape(slots, TOKENS_A_SLOT).copy(),
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


def outputs() -> list[Array]:
    """Return what `speculate_get_output_topk` fills."""
    places = SLOTS * TOKENS
    return [
        np.zeros((3 + SLOTS + places * COLUMNS, 1), np.int64),
        np.zeros((places * COLUMNS, 1), np.float32),
        np.zeros(places, np.int64),
    ]


def _theirs(order: Order) -> Theirs:
    queue = Queue(order.queue)
    return Theirs(FORM, Queues(queue, queue))


def save_side(order: Order) -> Array:
    """Save, and return for each step when it began, and what it cost this thread, in nanoseconds."""
    given = arguments(order.slots, order.top_k)
    lengths, values = given["seq_lens_decoder"], list(given.values())
    save: Callable[[], object]
    if order.lane == THEIRS:
        save = _theirs(order).saving(_SAVE, given)
    else:
        save = partial(fastdeploy.speculate_save_output_topk, *values)
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
    get: Callable[[], object]
    if order.lane == THEIRS:
        get = _theirs(order).getting(GETS[_SAVE], into, wait=True)
    else:
        tokens, scores, ranks = into
        op = partial(fastdeploy.speculate_get_output_topk, tokens, scores, ranks, COLUMNS - 1, 0)
        op(False)  # noqa: FBT003 - by that engine's position; from now on it listens
        get = partial(op, True)  # noqa: FBT003 - as above
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    noted = np.zeros(order.steps, np.int64)
    for number in range(order.steps):
        get()
        noted[number] = time.monotonic_ns()
    expected = arguments(order.slots, order.top_k)["logprob_token_ids"]
    found = into[0].reshape(-1)[3 + SLOTS :].reshape(SLOTS, TOKENS, COLUMNS)[: order.slots, :TOKENS_A_SLOT]
    if not np.array_equal(found[..., : order.top_k + 1].reshape(expected.shape), expected):
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
