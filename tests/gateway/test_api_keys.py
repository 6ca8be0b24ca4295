"""Callers: what a key may ask for in a minute, and how much of that it may save up."""

import pytest

from tests.in_process.builders import settings
from tokenbus.gateway.api_keys import Caller, made
from tokenbus.gateway.errors import ApiError
from tokenbus.testing import ManualClock


def _admitted(caller: Caller, most: int) -> int:
    for count in range(most):
        try:
            caller.admit()
        except ApiError:
            return count
    return most


@pytest.mark.parametrize("idle", [0.0, 60.0, 86_400.0])
def test_idle_key_saves_up_no_more_than_a_minute(idle: float) -> None:
    clock = ManualClock()
    caller = Caller(made("alice", requests_per_minute=5)[1], settings().gateway, clock.now)
    assert _admitted(caller, 100) == 5
    clock.advance(idle)
    assert caller.limits()["x-ratelimit-remaining-requests"] == ("5" if idle else "0")
    assert _admitted(caller, 100) == (5 if idle else 0)
    clock.advance(12.0)
    assert _admitted(caller, 100) == 1
