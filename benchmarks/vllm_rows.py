"""Measure what reading a step of vLLM's costs its engine's thread: `python -m benchmarks.vllm_rows`.

The objects are made here in the shape of vLLM's, which is not needed: a step of 256 rows whose requests all go on, from
the return of vLLM's own update_from_output until the arrays that the worker publishes are there.
"""

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.report import Report, Row
from benchmarks.workload import HEADLINE_ROWS, VOCABULARY_SIZE
from tokenbus.engines.vllm.requests import Request, Requests

_VARIANTS = 8
"""As many different steps are read in turn."""
_LEAVING = 4
"""As many requests end in a step, and begin, where some do."""


class _FinishReason(IntEnum):
    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4


class _LogprobsLists(NamedTuple):
    logprob_token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    sampled_token_ranks: npt.NDArray[np.int32]
    cu_num_generated_tokens: list[int] | None


@dataclass(slots=True)
class _EngineCoreOutput:
    request_id: str
    new_token_ids: list[int]
    finish_reason: _FinishReason | None = None
    stop_reason: int | str | None = None
    prefill_stats: None = None


@dataclass(slots=True)
class _SchedulerOutput:
    num_scheduled_tokens: dict[str, int]
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    preempted_req_ids: set[str] = field(default_factory=set)
    num_invalid_spec_tokens: dict[str, int] | None = None


class _Step(NamedTuple):
    """What vLLM's update_from_output has taken, and what it has returned."""

    scheduled: _SchedulerOutput
    indices: dict[str, int]
    outputs: list[_EngineCoreOutput]
    logprobs: _LogprobsLists | None


class _Case(NamedTuple):
    name: str
    top_k: int | None
    has_ties: bool = False
    drafts: int = 0
    leaving: int = 0


_CASES = (
    _Case("no logprobs", None),
    _Case("k = 0", 0),
    _Case("k = 20, none equal", 20),
    _Case("k = 20, equal ones in any order", 20, has_ties=True),
    _Case("k = 20, up to 3 drafts accepted", 20, drafts=3),
    _Case(f"k = 0, {_LEAVING} requests end and {_LEAVING} begin", 0, leaving=_LEAVING),
)


def main(arguments: Sequence[str] | None = None) -> None:
    report = Report("vllm_rows", __doc__)
    options = report.parse(arguments)
    report.table([_measured(case, 40 if options.quick else 2000) for case in _CASES])
    report.write()


def _measured(case: _Case, count: int) -> Row:
    """Return the thread's processor time for a step."""
    model = SimpleNamespace(logprobs_mode="raw_logprobs")
    requests = Requests(
        SimpleNamespace(FinishReason=_FinishReason), SimpleNamespace(speculative_config=None, model_config=model)
    )
    chance = np.random.default_rng(1)
    names = [f"{key:016x}" for key in chance.integers(2**63, size=HEADLINE_ROWS).tolist()]
    for key, name in enumerate(names, 1):
        requests.add(name, Request(key, case.top_k))
    # Its arrays have rows in an order of their own, which stays while no request ends.
    batch = [names[row] for row in chance.permutation(len(names)).tolist()]
    steps = [_step(chance, case, names, batch) for _ in range(_VARIANTS)]
    taken = np.zeros(count)
    gc.disable()  # vLLM freezes what it has, and no cycle is made here
    for place in range(count):
        step = steps[place % _VARIANTS]
        before = time.thread_time_ns()
        of_step, _stopped = requests.rows_of(step.scheduled, step.indices, step.outputs)
        arrays = requests.arrays(requests.abort(()) + of_step, step.logprobs)
        taken[place] = time.thread_time_ns() - before
        for key, output in enumerate(step.outputs[: case.leaving], 1):  # those that have ended come again
            requests.add(output.request_id, Request(key, case.top_k))
    gc.enable()
    steady = taken[count // 10 :] / 1e3
    low, middle, high = np.quantile(steady, (0.1, 0.5, 0.9)).tolist()
    return {
        "a step of 256 rows": case.name,
        "tokens": len(arrays.token_ids),
        "us": middle,
        "10 %": low,
        "90 %": high,
    }


def _step(chance: np.random.Generator, case: _Case, names: Sequence[str], batch: Sequence[str]) -> _Step:
    """Return a step of the requests, which are in this order in vLLM's batch."""
    rows = len(names)
    indices = {name: index for index, name in enumerate(batch)}
    lines = 1 + case.drafts
    width = 1 + (case.top_k or 0)
    ids = chance.integers(VOCABULARY_SIZE, size=(rows * lines, width), dtype=np.int32)
    values = np.sort(-chance.exponential(size=(rows * lines, width)).astype(np.float32) * 4)[:, ::-1]
    if case.has_ties:
        values = np.round(values * 8) / np.float32(8)
    starts = list(range(0, rows * lines, lines))
    logprobs = _LogprobsLists(ids, values.copy(), np.ones(rows * lines, np.int32), starts if case.drafts else None)
    counts = chance.integers(1, lines + 1, rows).tolist()
    outputs = []
    for name, count in zip(names, counts, strict=True):
        first = indices[name] * lines
        outputs.append(_EngineCoreOutput(name, ids[first : first + count, 0].tolist()))
    for output in outputs[: case.leaving]:
        output.finish_reason = _FinishReason.LENGTH
    drafts = {name: [-1] * case.drafts for name in names} if case.drafts else {}
    scheduled = _SchedulerOutput(dict.fromkeys(names, lines), drafts)
    return _Step(scheduled, indices, outputs, None if case.top_k is None else logprobs)


if __name__ == "__main__":
    main()
