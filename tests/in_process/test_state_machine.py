"""The whole bus under a simulated network: hypothesis decides what happens, and when, and what goes wrong.

`SOAK=10 python -m pytest tests/in_process/test_state_machine.py` looks for what is rare: new examples in each run.
"""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.in_process.machines import ContinuingBus, FaultlessBus, FaultyBus, HealingBus, LosslessBus
from tests.support.campaigns import IS_SOAK, many


def run(machine: type[RuleBasedStateMachine], steps: int = 40) -> None:
    """Let hypothesis put a machine's rules together: a few examples, or new ones and as many as SOAK says."""
    chosen = settings(
        max_examples=many(2000, 12),
        stateful_step_count=steps,
        derandomize=not IS_SOAK,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=chosen)


@pytest.mark.parametrize("machine", [FaultlessBus, LosslessBus, HealingBus, FaultyBus])
def test_no_fault_makes_a_token_wrong(machine: type[RuleBasedStateMachine]) -> None:
    """Without faults, when processes and connections come and go, and when items are lost: requests have their tokens.

    Whatever is lost, doubled, damaged or too slow: each request has a beginning of its tokens, and an end.
    """
    run(machine)


def test_requests_outlive_their_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often workers die, fail, stand still and come back: no request ends with an error, no turns are mixed."""
    monkeypatch.setattr("tokenbus.client.open_request._MOST_LOSSES", 1_000_000)
    run(ContinuingBus)
