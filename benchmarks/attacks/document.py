"""The page for docs/: what was printed, and what it means."""

from collections.abc import Mapping, Sequence

from benchmarks.attacks.measure import Figures
from benchmarks.attacks.tables import render
from benchmarks.machine import in_words

_ABOUT = """\
# Under attack

Written by `python -m benchmarks.attacks --write-docs`. A processor and a worker with default settings, and a client,
the victim, with 8 requests of 300 tokens at once; each attack begins after a stretch without it, in the same run, and
comes from a process of its own. "Longest wait" is the longest time in which an open request of the victim got no token,
that until its first one included; "failed" counts its requests that ended with an error, or with tokens that are not
theirs; "peak" and "CPU" are the processor's. The stretch with the attack is 2 s longer. docs/security.md says what each
attack is, and which tests hold that it harms no other client.
"""


def page(figures: Sequence[Figures], seconds: float, machine: Mapping[str, str]) -> str:
    """Return the page."""
    return f"{_ABOUT}\nStretches of {seconds:g} s. Machine: {in_words(machine)}.\n\n{render(figures)}"
