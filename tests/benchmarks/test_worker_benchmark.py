"""The worker's benchmark: it measures what it says, through real processes."""

from benchmarks.worker import system, thread
from benchmarks.worker.tables import cost_table, rate_table


def test_costs_are_of_steps_that_went_through() -> None:
    """Each part of a step's way has a cost, in the table too."""
    cost = thread.measure(5, 20, 400.0, wide=True)
    assert min(cost.handed_over, cost.assemble, cost.publish) > 0
    assert cost.both >= max(cost.assemble, cost.publish)
    assert cost_table([cost]).count("\n") == 3
    assert "| 20 | " not in cost_table([cost])


def test_tokens_reach_a_client() -> None:
    """Tokens of the ngram engine come out at the other end of three processes, and the table says how many."""
    rate = system.measure(1, 3.0)
    assert rate > 0
    assert f"{rate:,.0f}" in rate_table({None: rate, 1: rate})
