"""Launches: steps that overlap are numbered when they are launched, and pair whenever they finish."""

from dataclasses import replace

import pytest

from tests.in_process.builders import arrays_of, settings
from tokenbus.processor.assembly import Assembler
from tokenbus.testing import RowShape, batch
from tokenbus.worker import StepArrays, StepAssembler
from tokenbus.worker.step import Launches
from tokenbus_contracts import BatchKind, ContractError, LogprobBatch


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


def test_batches_that_finish_out_of_step_still_pair() -> None:
    """A draft that is done after the next target, and targets that are done in the wrong order, pair by number."""
    launches, assembler = Launches(4), StepAssembler(settings().limits)
    first, second = launches.launch(2), launches.launch(2)
    made = [
        *assembler.assemble(_arrays(BatchKind.TARGET, second.step)),
        *assembler.assemble(_arrays(BatchKind.TARGET, first.step)),
        *assembler.assemble(_arrays(BatchKind.DRAFT, second.step)),
        *assembler.assemble(_arrays(BatchKind.DRAFT, first.step)),
    ]
    processor = Assembler("w", 1, settings().processor)
    for each in made:
        processor.add(LogprobBatch.of_views(each.header._replace(worker_id="w"), each.columns), 0.0)
    steps = list(processor.ready(0.0))
    assert [step.number for step in steps] == [1, 2]
    for step in steps:
        assert step.draft is not None
        assert step.draft.header.step == step.target.header.step == step.number


def _arrays(kind: BatchKind, step: int) -> StepArrays:
    arrays = arrays_of(batch([RowShape(7, 4 * step, 4), RowShape(8, 4 * step, 2)]))
    return replace(arrays, kind=kind, step=step, draft_follows=kind is BatchKind.TARGET, draft_token_counts=None)
