"""Measure what a step costs its engine's thread: `python -m benchmarks.worker`.

A processor in another process takes the steps, of 256 rows x 3 tokens at 200 a second.
"""

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from benchmarks.bus.pair import BY_STEP, Order, Pair, steps_of
from benchmarks.bus.tokenbus import receive, settings_of
from benchmarks.codec.ours import batch_of
from benchmarks.report import Report, Row
from benchmarks.workload import HEADLINE_ROWS, HEADLINE_TOKENS, VOCABULARY_SIZE, Case
from tokenbus_contracts import Scoring, SpeculativeMethod
from tokenbus_services.settings import Settings
from tokenbus_services.worker import Publisher, StepArrays, StepAssembler
from tokenbus_services.worker.publishing import publishing

_RATE = 200.0


def main(arguments: Sequence[str] | None = None) -> None:
    report = Report("worker", __doc__)
    options = report.parse(arguments)
    count, top_ks = (60, (0,)) if options.quick else (1000, (0, 5, 20))
    report.table([_measured(top_k, count, is_wide) for top_k in top_ks for is_wide in (False, True)])
    report.write()


def _measured(top_k: int, count: int, is_wide: bool) -> Row:  # noqa: FBT001
    """Return what steps cost; `is_wide`: ids, ranks and counts as engines have them, 64 and 32 bits."""
    case = Case(HEADLINE_ROWS, HEADLINE_TOKENS, top_k)
    given = _widened(_arrays(case)) if is_wide else _arrays(case)
    with Pair() as pair:
        order = Order(case=case, address=pair.address("ipc", "w"), clients_address=pair.address("ipc", "c"))
        pair.receiver.begin(receive, order._replace(taking=BY_STEP))
        pair.receiver.answer()  # its address: it is there
        settings = settings_of(order, pair.folder, worker__drain_timeout_ms=10_000)
        in_thread = _handed_over(_anew(given, 1), settings, count, in_process=False)
        in_process = _handed_over(_anew(given, 2), settings, count, in_process=True)
        taken = _costs(_anew(given, 3), settings, count)
    assemble, publish, both = np.median(taken, axis=0).tolist()
    return {
        "k": top_k,
        "arrays": "int64 ids and ranks, int32 counts" if is_wide else "the wire's own",
        "to a thread, us": in_thread[0],
        "its process, us": in_thread[1],
        "to a process, us": in_process[0],
        "its process then, us": in_process[1],
        "assemble, us": assemble,
        "publish, us": publish,
        "both, us": both,
    }


def _handed_over(given: StepArrays, settings: Settings, count: int, *, in_process: bool) -> tuple[float, float]:
    """Return the microseconds that a step costs the engine's thread, the median, and its whole process, the mean."""
    handed, clock = np.zeros(count), time.thread_time_ns
    own = replace(settings, worker=replace(settings.worker, publisher="process" if in_process else "thread"))
    with ExitStack() as stack:
        _, out = publishing(stack, own, VOCABULARY_SIZE)
        began = time.process_time_ns()
        for place in _paced(given, count):
            before = clock()
            out.emit(given)
            handed[place] = clock() - before
        of_process = (time.process_time_ns() - began) / count
    return float(np.median(handed[count // 10 :])) / 1e3, of_process / 1e3


def _costs(given: StepArrays, settings: Settings, count: int) -> np.ndarray:
    """Return the thread's microseconds for each step, to assemble and publish it itself."""
    taken, clock = np.zeros((count, 3)), time.thread_time_ns
    with Publisher(settings) as publisher:
        assembler = StepAssembler(settings.limits, VOCABULARY_SIZE)
        for place in _paced(given, count):
            before = clock()
            batches = assembler.assemble(given)
            assembled = clock()
            for batch in batches:
                publisher.publish(batch)
            published = clock()
            taken[place] = assembled - before, published - assembled, published - before
    return taken[count // 10 :] / 1e3


def _anew(given: StepArrays, run: int) -> StepArrays:
    """Return the same step of other requests, at their beginning."""
    return replace(given, request_keys=given.request_keys ^ np.uint64(run << 56), positions=given.positions * 0)


def _paced(given: StepArrays, count: int) -> Iterator[int]:
    """Yield the steps' numbers at a rate, each with positions of its own."""
    gc.collect()
    gc.disable()
    begin = time.monotonic()
    try:
        for place in range(count):
            time.sleep(max(0.0, begin + place / _RATE - time.monotonic()))
            given.positions = given.positions + HEADLINE_TOKENS
            yield place
    finally:
        gc.enable()


def _arrays(case: Case) -> StepArrays:
    """Return a step as an engine has it: lines of alternatives for each token, rows permuted."""
    made = batch_of(steps_of(Order(case=case))[0])
    lines = (-1, case.top_k or 0)
    return StepArrays(
        request_keys=made.request_keys,
        positions=made.positions,
        token_counts=made.token_counts,
        token_ids=made.token_ids,
        statuses=made.statuses,
        logprobs=made.logprobs,
        ranks=made.ranks,
        alternative_token_ids=made.alternative_token_ids.reshape(lines) if case.top_k else None,
        alternative_logprobs=made.alternative_logprobs.reshape(lines) if case.top_k else None,
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


if __name__ == "__main__":
    main()
