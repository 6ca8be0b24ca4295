"""What was measured, as a table."""

from collections.abc import Sequence

from benchmarks.ngram.measure import Case, Figures


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
