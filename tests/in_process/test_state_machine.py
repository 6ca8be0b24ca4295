"""The whole bus under a simulated network: hypothesis decides what happens, and when, and what goes wrong.

`SOAK_EXAMPLES=20000 python -m pytest tests/in_process/test_state_machine.py` looks for what is rare: as many examples
of each machine, new ones in each run.
"""

import os

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.in_process.machines import Bus, FaultlessBus, FaultyBus, HealingBus, LosslessBus

_SOAK = int(os.environ.get("SOAK_EXAMPLES", "0"))


def _run(machine: type[Bus], examples: int, steps: int) -> None:
    chosen = settings(
        max_examples=_SOAK or examples,
        stateful_step_count=steps,
        derandomize=not _SOAK,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=chosen)


def test_without_faults_nothing_ends_with_an_error() -> None:
    """Whatever is tight, and in whichever order messages arrive, every request has its tokens and no node complains."""
    _run(FaultlessBus, 60, 40)


def test_no_restart_and_no_broken_connection_loses_a_token() -> None:
    """Processors, clients and connections come and go, and every request still has each of its tokens once."""
    _run(LosslessBus, 60, 40)


def test_what_is_lost_on_the_way_is_sent_again() -> None:
    """Items that are lost, doubled, damaged or out of order come again until all are there: no request notices."""
    _run(HealingBus, 60, 40)


def test_no_fault_makes_a_token_wrong() -> None:
    """Whatever is lost, doubled, damaged or too slow: each request has a beginning of its tokens, and an end."""
    _run(FaultyBus, 120, 50)
