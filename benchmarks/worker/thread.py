"""What assembling and publishing a step costs the engine's thread, while a processor in another process takes it."""

import contextlib
import gc
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.bus.orders import Order, steps_of
from benchmarks.codec.ours import batch_of
from benchmarks.workload import Case
from tokenbus_contracts import LogprobBatch, Scoring, SpeculativeMethod
from tokenbus_services.settings import Settings
from tokenbus_services.worker import Publisher, StepArrays, StepAssembler
from tokenbus_services.worker.emitter import Emitter
from tokenbus_services.worker.outbox import Outbox

VOCABULARY = 151_936
ROWS, TOKENS = 256, 3


class Cost(NamedTuple):
    """Medians of the processor time of the engine's thread, in microseconds a step."""

    top_k: int
    dtypes: str
    handed_over: float
    """Through an Outbox, as `tokenbus worker` does it."""
    assemble: float
    publish: float
    both: float
    """Without: all of it in the engine's thread."""


def measure(top_k: int, count: int, rate: float, *, wide: bool) -> Cost:
    """Return what steps at a rate cost; `wide`: ids, ranks and counts as engines have them, 64 and 32 bits."""
    given = _widened(_arrays(top_k)) if wide else _arrays(top_k)
    handed = np.zeros(count)
    taken = np.zeros((count, 2))
    with tempfile.TemporaryDirectory() as folder, _processor(folder) as settings, Publisher(settings) as publisher:
        with Outbox(Emitter(publisher, VOCABULARY), settings.worker.outbox) as outbox:
            for place in _paced(given, count, rate):
                before = time.thread_time_ns()
                outbox.emit(given)
                handed[place] = time.thread_time_ns() - before
        assembler = StepAssembler(settings.limits, VOCABULARY)
        given.step = count
        for place in _paced(given, count, rate):
            given.step += 1
            before = time.thread_time_ns()
            batches = assembler.assemble(given)
            assembled = time.thread_time_ns()
            for batch in batches:
                publisher.publish(batch)
            taken[place] = assembled - before, time.thread_time_ns() - assembled
    kept = taken[count // 10 :] / 1e3
    dtypes = "int64 ids and ranks, int32 counts" if wide else "the wire's own"
    assemble, publish = np.median(kept, axis=0).tolist()
    handed_over = float(np.median(handed[count // 10 :])) / 1e3
    return Cost(top_k, dtypes, handed_over, assemble, publish, float(np.median(kept.sum(axis=1))))


def _paced(given: StepArrays, count: int, rate: float) -> Iterator[int]:
    """Yield the steps' numbers at a rate, each with positions of its own."""
    gc.collect()
    gc.disable()
    begin = time.monotonic()
    try:
        for place in range(count):
            time.sleep(max(0.0, begin + place / rate - time.monotonic()))
            given.positions = given.positions + TOKENS
            yield place
    finally:
        gc.enable()


@contextlib.contextmanager
def _processor(folder: str) -> Iterator[Settings]:
    """Run a processor that shows every step to an iterator, in a process of its own."""
    addresses = {
        "bus.workers_address": f"ipc://{folder}/w",
        "bus.clients_address": f"ipc://{folder}/c",
        "dead_letters.directory": f"{folder}/letters",
    }
    pairs = [f"{key}={value}" for key, value in addresses.items()]
    command = [sys.executable, "-m", "benchmarks.worker.taker", *pairs]
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root) as process:
        if process.stdout is not None:  # it is a pipe
            process.stdout.readline()
        try:
            yield Settings.load(environment={}, overrides=addresses)
        finally:
            process.terminate()


def _arrays(top_k: int) -> StepArrays:
    """Return a step as an engine has it: lines of alternatives for each token, rows permuted."""
    order = Order(case=Case(ROWS, TOKENS, top_k), address="", clients_address="", seed=1)
    made: LogprobBatch = batch_of(steps_of(order)[0])
    lines = (-1, top_k) if top_k else (made.token_ids.size, 0)
    return StepArrays(
        request_keys=made.request_keys,
        positions=made.positions,
        token_counts=made.token_counts,
        token_ids=made.token_ids,
        statuses=made.statuses,
        logprobs=made.logprobs,
        ranks=made.ranks,
        alternative_token_ids=made.alternative_token_ids.reshape(lines) if top_k else None,
        alternative_logprobs=made.alternative_logprobs.reshape(lines) if top_k else None,
        scored=made.scorings != Scoring.NONE,
        draft_token_counts=made.draft_token_counts,
        index_to_batch_id=made.batch_indices,
        method=SpeculativeMethod.MTP,
    )


def _widened(arrays: StepArrays) -> StepArrays:
    for name in ("token_ids", "ranks", "alternative_token_ids"):
        values = getattr(arrays, name)
        setattr(arrays, name, None if values is None else values.astype(np.int64))
    for name in ("token_counts", "draft_token_counts", "index_to_batch_id"):
        setattr(arrays, name, getattr(arrays, name).astype(np.int32))
    return arrays
