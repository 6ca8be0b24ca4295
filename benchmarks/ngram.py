"""Measure the ngram engine alone: `python -m benchmarks.ngram`."""

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import NamedTuple

import numpy as np

from benchmarks.machine import Placement, description, on_cores
from tokenbus_contracts.generated.request_pb2 import Generate, SamplingParameters, TextPrompt
from tokenbus_services.worker.ngram import NgramEngine, NgramOptions

PROMPT = "In the evening the old man said"
_WARM_UP = 20
_LONGEST = 2000
_DOCUMENT = Path("docs/benchmarks/ngram.md")
_ABOUT = """\
# The ngram engine's own speed

Written by `python -m benchmarks.ngram --write-docs`. One process on one core; each request has a seed of its own and
goes on past the model's end token. A step is `engine.step()` alone: its arrays are made, and nobody takes them.
"A row" is how many tokens a row got in a step, "accepted" the share of the drafts that the target accepted.
"""


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


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print or write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ngram", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three cases and few steps: whether it works")
    parser.add_argument("--steps", type=int, default=0, metavar="N", help="of each case (default 600, quick 30)")
    parser.add_argument("--write-docs", action="store_true", help=f"write {_DOCUMENT}, too")
    options = parser.parse_args(arguments)
    steps = options.steps or (30 if options.quick else 600)
    if not 1 <= steps <= _LONGEST:
        parser.error(f"--steps: 1 to {_LONGEST}, got {steps}")
    placement = Placement.here()
    with on_cores(placement.kept):
        built = build_seconds()
        table = render([(case, measure(case, steps)) for case in (QUICK if options.quick else FULL)])
    machine = ", ".join(f"{name}: {value}" for name, value in description(placement, vllm=False).items())
    text = f"{_ABOUT}\nMade ready in {built:.2f} s. {steps} steps each. Machine: {machine}.\n\n{table}"
    sys.stdout.write(text)
    if options.write_docs:
        _DOCUMENT.write_text(text)


def build_seconds() -> float:
    """Return how long the engine takes until it can be used; it learns its text once in a process."""
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


def render(figures: Sequence[tuple[Case, Figures]]) -> str:
    """Return the table."""
    lines = [
        "| rows | drafts | top-k | temperature | top-p | median us | p99 us | steps/s | tokens/s | a row | accepted |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case, found in figures:
        top = "none" if case.top_logprobs is None else case.top_logprobs
        accepted = "" if found.accepted is None else f"{found.accepted:.2f}"
        steps_per_second = 1e6 / found.median_us
        lines.append(
            f"| {case.rows} | {case.speculate} | {top} | {case.temperature:g} | {case.top_p:g} "
            f"| {found.median_us:,.0f} | {found.p99_us:,.0f} | {steps_per_second:,.0f} "
            f"| {found.tokens_per_second:,.0f} | {found.tokens_per_row:.2f} | {accepted} |"
        )
    return "\n".join([*lines, ""])


def _started(case: Case) -> NgramEngine:
    """Return an engine whose rows all go on after their first tokens, and do so long enough."""
    context = (_WARM_UP + _LONGEST) * (case.speculate + 1) + 64
    engine = NgramEngine(NgramOptions(speculate=case.speculate, max_running=case.rows, max_context=context))
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
