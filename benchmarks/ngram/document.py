"""The page for docs/: what was printed, and what it means."""

from collections.abc import Mapping, Sequence

from benchmarks.machine import in_words
from benchmarks.ngram.measure import Case, Figures
from benchmarks.ngram.tables import render

_ABOUT = """\
# The ngram engine's own speed

Written by `python -m benchmarks.ngram --write-docs`. One process on one core; each request has a seed of its own and
goes on past the model's end token. A step is `engine.step()` alone: its arrays are made, and nobody takes them.
"A row" is how many tokens a row got in a step, "accepted" the share of the drafts that the target accepted.
"""


def page(figures: Sequence[tuple[Case, Figures]], built: float, steps: int, machine: Mapping[str, str]) -> str:
    """Return the page."""
    about = f"{_ABOUT}\nMade ready in {built:.2f} s. {steps} steps each. Machine: {in_words(machine)}."
    return f"{about}\n\n{render(figures)}"
