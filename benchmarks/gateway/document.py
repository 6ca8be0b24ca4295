"""The page for docs/: what was printed, and what it means."""

from collections.abc import Mapping, Sequence

from benchmarks.gateway.clients import CONNECTIONS
from benchmarks.gateway.measure import Figures
from benchmarks.gateway.tables import render
from benchmarks.machine import in_words

_ABOUT = """\
# The gateway under load

Written by `python -m benchmarks.gateway --write-docs`. {streams} streams at once, each on a connection of its own, ask
for 256 tokens again and again, beginning and ending at all times; the ngram engine drafts 3 tokens a step. Worker,
processor, gateway and the clients are processes that share this machine's cores. "Of none" is the rate of tokens by
that of the same pace without logprobs, whose rounds are taken in turn with the others'; "to the socket" is from a row's
publication by the worker until the gateway has written it to its client's socket, for all rows of the time that was
measured; "CPU" is of one core, all processes of the gateway together, and "a token" is that time for each
token, with a 256th of what a request costs.

The paces are what an engine on a GPU does with a batch of 256 (20 to 80 steps a second); "as fast as it can" is the
ngram engine without a pace: then the engine, which needs a few microseconds a token, takes part in a contest for the
cores, and the rates are those at which this machine as a whole is busy.
"""


def page(figures: Sequence[Figures], rounds: int, seconds: float, machine: Mapping[str, str]) -> str:
    """Return the page."""
    about = _ABOUT.format(streams=CONNECTIONS)
    return (
        f"{about}\n{rounds} rounds of {seconds:g} s each, medians. Machine: {in_words(machine)}.\n\n{render(figures)}"
    )
