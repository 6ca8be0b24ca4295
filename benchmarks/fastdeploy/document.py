"""The page for docs/: the tables, and what they mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.machine import in_words

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.fastdeploy.__main__ import Figure

_ABOUT = """\
# The drop-in beside FastDeploy's ops

Written by `python -m benchmarks.fastdeploy --write-docs`; [fastdeploy.json](fastdeploy.json) has every figure.

One step, 3 tokens a slot, from `speculate_save_output_topk` in one process to `speculate_get_output_topk` in another.
FastDeploy's lane is its ops' own loops of release 2.6, in C and without Paddle, with the struct of 530,456 bytes
through the kernel's queue; the drop-in's lane is its ops as an engine calls them, with arrays in the computer's memory.
Both have the same arrays at hand, and neither copies from a card. Latency is from before the save to when the tensors
are filled, at 200 steps a second; the engine's thread is its processor time for a save, at that rate, where it has
slept before each step and finds its caches cold, and flat out. Medians of the rounds, the lanes in an order drawn anew
for each. It is not the latency of the bus, which [bus.md](bus.md) has.
"""
_HEADLINE = 256
_MOST_LATENCY, _LEAST_RATE = 1.0, 1.5
_RATE_TOP_K = 20


def page(figures: Sequence[Figure], machine: Mapping[str, str]) -> str:
    """Return the page; the figures of one size stand one behind the other, FastDeploy's first."""
    lines = [
        "| slots | k | lane | p50, us | p99, us | engine's thread, us | flat out, us | steps/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {each.slots} | {each.top_k} | {each.lane} | {each.p50:,.0f} | {each.p99:,.0f} "
        f"| {each.engine_paced:,.0f} | {each.engine_flat:,.0f} | {each.steps_a_second:,.0f} |"
        for each in figures
    ]
    goals = ["| goal, 256 x 3, of FastDeploy's | | |", "|---|---|---|"]
    for theirs, ours in zip(figures[::2], figures[1::2], strict=True):
        if ours.slots != _HEADLINE:
            continue
        share, rate = ours.p50 / theirs.p50, ours.steps_a_second / theirs.steps_a_second
        goals.append(
            f"| p50, k = {ours.top_k}: at most {_MOST_LATENCY} | {share:.2f} | {_verdict(met=share <= _MOST_LATENCY)} |"
        )
        if ours.top_k == _RATE_TOP_K:
            met = rate >= _LEAST_RATE
            goals.append(f"| steps/s, k = {ours.top_k}: at least {_LEAST_RATE} | {rate:.2f} | {_verdict(met=met)} |")
    return "\n".join([_ABOUT, f"Machine: {in_words(machine)}.", "", *lines, "", *goals, ""])


def _verdict(*, met: bool) -> str:
    return "met" if met else "missed"
