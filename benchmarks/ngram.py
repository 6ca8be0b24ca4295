"""Measure the ngram engine alone: `python -m benchmarks.ngram`."""

import gc
from collections.abc import Sequence
from time import perf_counter_ns
from typing import NamedTuple

import numpy as np

from benchmarks.processes import PROMPT
from benchmarks.report import Report, Row, core_to_keep, on_cores
from tokenbus_contracts.generated.request_pb2 import Generate, SamplingParameters, TextPrompt
from tokenbus_engines.ngram import NgramEngine, NgramOptions

_LONGEST = 2000
_WARM_UP = 20


class Case(NamedTuple):
    """What is asked of the engine."""

    rows: int
    speculate: int
    top_logprobs: int | None
    temperature: float = 1.0
    top_p: float = 1.0


_FULL = [
    *(Case(rows, 3, 5) for rows in (1, 4, 16, 64, 256)),
    *(Case(256, speculate, 5) for speculate in (0, 1, 5, 7)),
    *(Case(256, 3, top) for top in (None, 0, 20)),
    Case(256, 3, 5, temperature=0.0),
    Case(256, 3, 5, temperature=0.7),
    Case(256, 3, 5, temperature=0.7, top_p=0.9),
]
_QUICK = [Case(1, 3, 5), Case(32, 0, None), Case(32, 3, 20, 0.7, 0.9)]


def main(arguments: Sequence[str] | None = None) -> None:
    report = Report("ngram", __doc__)
    report.parser.add_argument("--steps", type=int, default=0, metavar="N", help="of each case (600, quick 30)")
    options = report.parse(arguments)
    steps = options.steps or (30 if options.quick else 600)
    if not 1 <= steps <= _LONGEST:
        report.parser.error(f"--steps: 1 to {_LONGEST}, got {steps}")
    with on_cores(core_to_keep()):
        begin = perf_counter_ns()
        NgramEngine()  # reads its model, once in a process
        report.say(f"The engine was ready in {(perf_counter_ns() - begin) / 1e9:.2f} s. {steps} steps of each.")
        report.table([measured(case, steps) for case in (_QUICK if options.quick else _FULL)])
    report.write()


def measured(case: Case, steps: int) -> Row:
    engine = _started(case)
    taken, tokens, drafted = np.zeros(steps), 0, 0
    gc.collect()
    gc.disable()
    try:
        for place in range(steps):
            if not engine.has_work:
                engine = _started(case)
            begin = perf_counter_ns()
            target, *_ = engine.step()
            taken[place] = perf_counter_ns() - begin
            tokens += int(np.sum(target.token_counts))
            drafted += int(np.sum([] if target.draft_token_counts is None else target.draft_token_counts))
    finally:
        gc.enable()
    rows, median_us = steps * case.rows, float(np.median(taken)) / 1e3
    return {
        "rows": case.rows,
        "drafts": case.speculate,
        "top-k": "none" if case.top_logprobs is None else case.top_logprobs,
        "temperature": case.temperature,
        "top-p": case.top_p,
        "median us": median_us,
        "p99 us": float(np.percentile(taken, 99)) / 1e3,
        "steps/s": 1e6 / median_us,
        "tokens/s": tokens / (float(taken.sum()) / 1e9),
        "tokens a row": tokens / rows,
        "accepted": (tokens - rows) / drafted if drafted else None,
    }


def _started(case: Case) -> NgramEngine:
    """Return an engine whose rows all go on after their first tokens, and do so long enough."""
    context = (_WARM_UP + _LONGEST) * (case.speculate + 1) + 64
    engine = NgramEngine(NgramOptions(speculate=case.speculate, max_running=case.rows, context=context))
    for key in range(1, case.rows + 1):
        sampling = SamplingParameters(
            seed=key, temperature=case.temperature, top_p=case.top_p, ignore_end_token=True, max_tokens=context
        )
        generate = Generate(request_key=key, text=TextPrompt(text=PROMPT), sampling=sampling)
        if case.top_logprobs is not None:
            generate.top_logprobs = case.top_logprobs
        engine.admit(generate)
    for _ in range(_WARM_UP):
        engine.step()
    return engine


if __name__ == "__main__":
    main()
