"""What was measured, and what the goals come to, as tables."""

from collections.abc import Sequence

from benchmarks.attacks.measure import Figures

MOST_WAIT_S = 1.0
MOST_MIB = 256


_HEAD = (
    "| attack | longest wait without | under it | tokens/s without | under it | failed "
    "| peak without | under it | CPU without | under it |"
)


def render(figures: Sequence[Figures]) -> str:
    """Return the tables."""
    lines = [
        _HEAD,
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, control, under in figures:
        lines.append(
            f"| {name} | {control.longest_wait_s:.2f} s | {under.longest_wait_s:.2f} s "
            f"| {control.tokens_per_second:,.0f} | {under.tokens_per_second:,.0f} | {under.failed} "
            f"| {control.peak_mib} MiB | {under.peak_mib} MiB | {control.cpu_s:.1f} s | {under.cpu_s:.1f} s |"
        )
    lines += ["", "| goal | attack | found | |", "|---|---|---|---|"]
    for name, control, under in figures:
        wait = under.longest_wait_s - control.longest_wait_s
        more = under.peak_mib - control.peak_mib
        lines.append(f"| at most {MOST_WAIT_S:g} s longer | {name} | {wait:.2f} s | {_met(wait <= MOST_WAIT_S)} |")
        lines.append(f"| at most {MOST_MIB} MiB more | {name} | {more} MiB | {_met(more <= MOST_MIB)} |")
        lines.append(f"| no request fails | {name} | {under.failed} | {_met(not under.failed)} |")
    return "\n".join([*lines, ""])


def _met(met: bool) -> str:  # noqa: FBT001 - private, and named at the call
    return "met" if met else "missed"
