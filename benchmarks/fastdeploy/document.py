"""The page for docs/: the tables, and what they mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.machine import in_words

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.fastdeploy.__main__ import Figure
    from benchmarks.outputs import Record

_ABOUT = """\
# The drop-in beside FastDeploy's ops

Written by `python -m benchmarks.fastdeploy --write-docs`; [fastdeploy.json](fastdeploy.json) has every figure.

A step with 3 tokens a slot goes from `speculate_save_output_topk` in one process to `speculate_get_output_topk` in
another. FastDeploy's lane is `benchmarks/fastdeploy/theirs.c`: the loops of release 2.6's ops, in C and without Paddle,
with the struct of 530,456 bytes over the kernel's queue. The drop-in's lane is its ops as an engine calls them. Python
calls both with the same arrays in host memory; the arguments of FastDeploy's lane are prepared beforehand. Neither lane
copies from a card.

Latency runs from before the save until the tensors are filled, at 200 steps a second. "Engine's thread" is the
processor time of a save at that rate, when the thread has slept before each step and its caches are cold; "flat out" is
the same without a pause. Each figure is the median of the rounds; the order of the lanes is drawn anew for each round.
This is not the latency of the bus: [bus.md](bus.md) has that.
"""
_HEADLINE, _RATE_TOP_K = 256, 20
_MOST_LATENCY, _LEAST_RATE = 1.0, 1.5
_VERDICTS = {True: "met", False: "missed"}


def goals(figures: Sequence[Figure]) -> list[Record]:
    """Return the drop-in's goals, as shares of FastDeploy's figures, and whether it met them."""
    found: list[Record] = []
    for theirs, ours in zip(figures[::2], figures[1::2], strict=True):
        if ours.slots != _HEADLINE:
            continue
        k, share, rate = ours.top_k, ours.p50 / theirs.p50, ours.steps_a_second / theirs.steps_a_second
        found.append(_goal(f"p50, k = {k}", f"at most {_MOST_LATENCY}", share, met=share <= _MOST_LATENCY))
        if k == _RATE_TOP_K:
            found.append(_goal(f"steps/s, k = {k}", f"at least {_LEAST_RATE}", rate, met=rate >= _LEAST_RATE))
    return found


def _goal(name: str, wanted: str, measured: float, *, met: bool) -> Record:
    return {"goal": name, "wanted": wanted, "measured": round(measured, 2), "met": met}


def page(figures: Sequence[Figure], machine: Mapping[str, str]) -> str:
    """Return the page. For each size `figures` has FastDeploy's, then the drop-in's."""
    lines = [
        "| slots | k | lane | p50, us | p99, us | engine's thread, us | flat out, us | steps/s |",
        "|---|---|---|---|---|---|---|---|",
        *(
            f"| {each.slots} | {each.top_k} | {each.lane} | {each.p50:,.0f} | {each.p99:,.0f} "
            f"| {each.engine_paced:,.0f} | {each.engine_flat:,.0f} | {each.steps_a_second:,.0f} |"
            for each in figures
        ),
        "",
        f"| goal, {_HEADLINE} x 3, of FastDeploy's | wanted | measured | |",
        "|---|---|---|---|",
        *(
            f"| {goal['goal']} | {goal['wanted']} | {goal['measured']:.2f} | {_VERDICTS[goal['met']]} |"
            for goal in goals(figures)
        ),
    ]
    return "\n".join([_ABOUT, f"Machine: {in_words(machine)}.", "", *lines, ""])
