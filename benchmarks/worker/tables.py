"""What was measured, as tables."""

from collections.abc import Sequence

from benchmarks.worker.thread import Cost

_GOALS = {0: 40.0, 20: 150.0}
_TOKENS_GOAL = 100_000


def cost_table(costs: Sequence[Cost]) -> str:
    """Return what a step costs the engine's thread."""
    lines = ["| k | arrays | handed over | goal | assemble | publish | both |", "|---|---|---|---|---|---|---|"]
    for cost in costs:
        goal = _GOALS.get(cost.top_k)
        verdict = "" if goal is None else f"{goal:.0f}: {'met' if cost.handed_over <= goal else 'missed'}"
        lines.append(
            f"| {cost.top_k} | {cost.dtypes} | {cost.handed_over:.0f} | {verdict} "
            f"| {cost.assemble:.0f} | {cost.publish:.0f} | {cost.both:.0f} |"
        )
    return "\n".join([*lines, ""])


def rate_table(rates: dict[int | None, float]) -> str:
    """Return the tokens a second through the whole system, by the alternatives asked for; None: no logprobs."""
    lines = ["| logprobs | tokens/s | of the rate without | goal |", "|---|---|---|---|"]
    for asked, rate in rates.items():
        name = "none" if asked is None else f"k = {asked}"
        verdict = "" if asked is None else f"{_TOKENS_GOAL:,}: {'met' if rate >= _TOKENS_GOAL else 'missed'}"
        lines.append(f"| {name} | {rate:,.0f} | {rate / rates[None]:.2f} | {verdict} |")
    return "\n".join([*lines, ""])
