"""What was measured, and what the goals come to, as tables."""

from collections.abc import Sequence

from benchmarks.gateway.measure import Figures

_GOALS = {"k = 0": 0.97, "k = 20": 0.85}
_MOST_P50_MS, _MOST_P50_MS_OF = 5.0, {(40, "k = 20"): 3.0}
_MOST_TOKEN_US = {"none": 4.0, "k = 20": 8.0}
_LEAST_SPEED_UP = 3.5
"""Of four processes, by one."""


def render(figures: Sequence[Figures]) -> str:
    """Return the table, and what the goals come to."""
    lines = [
        "| steps/s | processes | logprobs | tokens/s | of none | MB/s | CPU | a token | to the socket, p50 | p99 |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in figures:
        pace = str(each.pace) if each.pace else "as fast as it can"
        lines.append(
            f"| {pace} | {each.processes} | {each.mode} | {each.tokens_per_second:,.0f} | {each.of_none:.3f} "
            f"| {each.megabytes_per_second:.1f} | {each.gateway_cpu:.2f} | {each.token_us:.1f} us "
            f"| {each.p50_ms:.2f} ms | {each.p99_ms:.1f} ms |"
        )
    lines += ["", "| goal | pace | found | |", "|---|---|---|---|"]
    for each in figures:
        pace = f"{each.pace} steps/s" if each.pace else "as fast as it can"
        where = pace if each.processes == 1 else f"{pace}, {each.processes} processes"
        if each.mode in _GOALS:
            goal = _GOALS[each.mode]
            met = _met(each.of_none >= goal)
            lines.append(f"| {each.mode}: at least {goal} of none | {where} | {each.of_none:.3f} | {met} |")
        if each.mode in _MOST_TOKEN_US:
            most = _MOST_TOKEN_US[each.mode]
            met = _met(each.token_us <= most)
            lines.append(f"| {each.mode}: at most {most:g} us a token | {where} | {each.token_us:.1f} us | {met} |")
        most = _MOST_P50_MS_OF.get((each.pace, each.mode), _MOST_P50_MS)
        met = _met(each.p50_ms <= most)
        lines.append(f"| {each.mode}: p50 to the socket at most {most:g} ms | {where} | {each.p50_ms:.2f} ms | {met} |")
        for one in figures:
            if (one.pace, one.mode, one.processes, each.processes) == (each.pace, each.mode, 1, 4):
                times = each.tokens_per_second / one.tokens_per_second
                goal_line = f"{each.mode}: 4 processes at least {_LEAST_SPEED_UP} times one"
                lines.append(f"| {goal_line} | {pace} | {times:.2f} | {_met(times >= _LEAST_SPEED_UP)} |")
    return "\n".join([*lines, ""])


def _met(is_met: bool) -> str:  # noqa: FBT001 - what it says
    return "met" if is_met else "missed"
