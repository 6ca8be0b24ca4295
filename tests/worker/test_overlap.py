"""Launches: steps that overlap are numbered when they are launched, and pair whenever they finish."""

import pytest

from tokenbus.worker.step import Launches
from tokenbus_contracts import ContractError


@pytest.mark.parametrize(("real_batch_size", "tokens_per_step", "tokens"), [(0, 4, 0), (1, 1, 1), (3, 4, 12)])
def test_tokens_of_the_next_launch(real_batch_size: int, tokens_per_step: int, tokens: int) -> None:
    """The next launch can emit the real batch size times the tokens of one step, whatever the last one accepted."""
    launches = Launches(tokens_per_step)
    launches.finish(launches.launch(8).step, 1)
    assert launches.launch(real_batch_size).tokens == tokens


def test_more_tokens_than_were_launched_are_refused() -> None:
    launches = Launches(4)
    first, second = launches.launch(2), launches.launch(2)
    with pytest.raises(ContractError, match="tokens of step 1: at most 8, got 9"):
        launches.finish(first.step, 9)
    launches.finish(second.step, 8)
    assert len(launches) == 0


def test_launches_are_bounded() -> None:
    launches = Launches(4, most=2)
    first = launches.launch(1)
    launches.launch(1)
    with pytest.raises(ContractError, match="launched steps: at most 2, got 3"):
        launches.launch(1)
    launches.finish(first.step, 4)
    with pytest.raises(ContractError, match=r"step: one of those launched, \[2\], got 1"):
        launches.finish(first.step, 4)
    assert launches.launch(1).step == 3
