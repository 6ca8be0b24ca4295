"""What is asked of the engine, and how long its steps take."""

import gc
from time import perf_counter_ns
from typing import NamedTuple

import numpy as np

from benchmarks.programs import PROMPT
from tokenbus_contracts.generated.request_pb2 import Generate, SamplingParameters, TextPrompt
from tokenbus_engines.ngram import NgramEngine, NgramOptions

LONGEST = 2000
_WARM_UP = 20


class Case(NamedTuple):
    """What is asked of the engine."""

    rows: int
    speculate: int
    top_logprobs: int | None
    temperature: float = 1.0
    top_p: float = 1.0


class Figures(NamedTuple):
    """What came of it."""

    median_us: float
    p99_us: float
    tokens_per_second: float
    tokens_per_row: float
    accepted: float | None
    """None: nothing was drafted."""


FULL = [
    *(Case(rows, 3, 5) for rows in (1, 4, 16, 64, 256)),
    *(Case(256, speculate, 5) for speculate in (0, 1, 5, 7)),
    *(Case(256, 3, top) for top in (None, 0, 20)),
    Case(256, 3, 5, temperature=0.0),
    Case(256, 3, 5, temperature=0.7),
    Case(256, 3, 5, temperature=0.7, top_p=0.9),
]
QUICK = [Case(1, 3, 5), Case(32, 0, None), Case(32, 3, 20, 0.7, 0.9)]


def build_seconds() -> float:
    """Return how long the engine takes until it can be used; it reads its model once in a process."""
    begin = perf_counter_ns()
    NgramEngine()
    return (perf_counter_ns() - begin) / 1e9


def measure(case: Case, steps: int) -> Figures:
    """Return what some steps of a full batch take."""
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
    rows = steps * case.rows
    return Figures(
        float(np.median(taken)) / 1e3,
        float(np.percentile(taken, 99)) / 1e3,
        tokens / (float(taken.sum()) / 1e9),
        tokens / rows,
        (tokens - rows) / drafted if drafted else None,
    )


def _started(case: Case) -> NgramEngine:
    """Return an engine whose rows all go on after their first tokens, and do so long enough."""
    context = (_WARM_UP + LONGEST) * (case.speculate + 1) + 64
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
