"""What was measured, and what the goals come to, as tables."""

from collections.abc import Sequence

from benchmarks.gateway.measure import Figures

_GOALS = {"k = 0": 0.97, "k = 20": 0.85}
_MOST_P50_MS = 5.0


def render(figures: Sequence[Figures]) -> str:
    """Return the table, and what the goals come to."""
    lines = [
        "| steps/s | logprobs | tokens/s | of none | MB/s | gateway CPU | to the socket, p50 | p99 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in figures:
        pace = str(each.pace) if each.pace else "as fast as it can"
        lines.append(
            f"| {pace} | {each.mode} | {each.tokens_per_second:,.0f} | {each.of_none:.3f} "
            f"| {each.megabytes_per_second:.1f} | {each.gateway_cpu:.2f} "
            f"| {each.p50_ms:.2f} ms | {each.p99_ms:.1f} ms |"
        )
    lines += ["", "| goal | pace | found | |", "|---|---|---|---|"]
    for each in figures:
        pace = f"{each.pace} steps/s" if each.pace else "as fast as it can"
        if each.mode in _GOALS:
            goal = _GOALS[each.mode]
            met = "met" if each.of_none >= goal else "missed"
            lines.append(f"| {each.mode}: at least {goal} of none | {pace} | {each.of_none:.3f} | {met} |")
        met = "met" if each.p50_ms <= _MOST_P50_MS else "missed"
        lines.append(f"| {each.mode}: p50 to the socket at most 5 ms | {pace} | {each.p50_ms:.2f} ms | {met} |")
    return "\n".join([*lines, ""])
