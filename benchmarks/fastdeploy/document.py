"""The page for docs/: the tables, and what they mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.machine import in_words

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.fastdeploy.__main__ import Figure

_ABOUT = """\
# The drop-in beside FastDeploy's queue

Written by `python -m benchmarks.fastdeploy --write-docs`; [fastdeploy.json](fastdeploy.json) has every figure.

From `speculate_save_output_topk` in one process to `speculate_get_output_topk` in another, 3 tokens a slot: the struct
of 530,456 bytes through a System V queue, and the drop-in. Latency is from before the save to when the tensors are
filled, at 200 steps a second; the engine's thread is its processor time for a save, at that rate, where it has slept
before each step and finds its caches cold, and flat out. The structs are filled and copied by numpy, where that engine
has C++ loops. Medians of the rounds, the lanes in an order drawn anew for each.
"""
_ENGINE_GOAL = 150.0
_HEADLINE = 256


def page(figures: Sequence[Figure], machine: Mapping[str, str]) -> str:
    """Return the page; the figures of one size stand one behind the other, the kernel's queue first."""
    lines = [
        "| slots | k | lane | p50, us | p99, us | engine's thread, us | flat out, us | steps/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {each.slots} | {each.top_k} | {each.lane} | {each.p50:,.0f} | {each.p99:,.0f} "
        f"| {each.engine_paced:,.0f} | {each.engine_flat:,.0f} | {each.steps_a_second:,.0f} |"
        for each in figures
    ]
    goals = ["| goal | | |", "|---|---|---|"]
    for kernel, ours in zip(figures[::2], figures[1::2], strict=True):
        share = ours.p50 / kernel.p50
        name = f"p50 of {ours.slots} slots, k = {ours.top_k}, of the kernel queue's"
        goals.append(f"| {name}, at most 0.50 | {share:.2f} | {_verdict(met=share <= 0.5)} |")  # noqa: PLR2004
        if ours.slots == _HEADLINE:
            name = f"engine's thread at 256 x 3, k = {ours.top_k}, at most {_ENGINE_GOAL:.0f} us"
            for kind, value in (("at the rate", ours.engine_paced), ("flat out", ours.engine_flat)):
                goals.append(f"| {name}, {kind} | {value:.0f} | {_verdict(met=value <= _ENGINE_GOAL)} |")
    return "\n".join([_ABOUT, f"Machine: {in_words(machine)}.", "", *lines, "", *goals, ""])


def _verdict(*, met: bool) -> str:
    return "met" if met else "missed"
