"""Tests that the arrays hold the engine's tokens, and that a failed rollout is left out."""

import asyncio

import numpy as np
import pytest
from rollouts import batch_of, importance_ratios, rollouts

import tokenbus
from tokenbus import testing


@pytest.mark.asyncio
async def test_arrays_hold_each_token_and_its_logprob() -> None:
    engine = testing.ScriptedEngine(
        testing.Answer(tokens=[5, 6, 7], logprobs=[-0.5, -1.0, -2.0], tokens_per_step=2),
        testing.Answer(tokens=[8], logprobs=-0.25),
    )
    async with testing.bus(engine) as bus:
        batch = batch_of(await rollouts(bus.client, [[1], [2]], max_tokens=16))
    assert batch.token_ids.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch.logprobs.tolist() == [[-0.5, -1.0, -2.0], [-0.25, 0.0, 0.0]]
    assert batch.mask.tolist() == [[True, True, True], [True, False, False]]
    assert np.allclose(importance_ratios(batch, batch.logprobs), 1.0)


@pytest.mark.asyncio
async def test_many_rollouts_through_faults_are_the_engines_own() -> None:
    async with testing.bus(testing.SyntheticEngine, workers=2, step_seconds=0.1) as bus:
        sampling = asyncio.ensure_future(rollouts(bus.client, [[number] for number in range(20)], max_tokens=30))
        await bus.advance(0.3)
        bus.line(bus.client).drop(received=2)
        await bus.advance(0.3)
        await bus.restart_processor()
        found = await bus.until(sampling)
    assert {(rollout.status, rollout.error) for rollout in found} == {(tokenbus.RowStatus.FINISHED_LENGTH, "")}
    assert batch_of(found).mask.sum() == 20 * 30


@pytest.mark.asyncio
async def test_rollout_that_fails_is_told_and_left_out() -> None:
    engine = testing.ScriptedEngine(testing.Answer(tokens=[1, 2, 3], fails_after=2), testing.Answer(tokens=[4]))
    async with testing.bus(engine) as bus:
        failed, other = await rollouts(bus.client, [[1], [2]], max_tokens=16)
    assert "the engine failed" in failed.error
    assert np.concatenate(failed.token_ids).tolist() == [1, 2]
    assert batch_of([failed, other]).token_ids.tolist() == [[4]]


def test_columns_of_any_step_are_read_alike() -> None:
    """A batch of the contract has the rows that `testing.batch` was asked to build."""
    batch = testing.batch(testing.row_shapes([7, 8], tokens=3))
    assert [row.token_ids.tolist() for row in batch.rows()] == [
        testing.true_tokens(key, 0, 3).ids.tolist() for key in (7, 8)
    ]
