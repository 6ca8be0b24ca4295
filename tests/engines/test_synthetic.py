"""SyntheticEngine: steps like an engine's, whose every token is known beforehand."""

from collections.abc import Iterable

import numpy as np
import pytest

from tests.in_process.builders import generate_of, ids
from tokenbus.engines import synthetic
from tokenbus.engines.synthetic import SyntheticEngine
from tokenbus.processor.assembly import _unpaired
from tokenbus.worker.assembler import StepAssembler
from tokenbus_contracts import BatchKind, Limits, LogprobBatch, RowStatus, Scoring, SpeculativeMethod, decode, encode
from tokenbus_contracts.generated.request_pb2 import SamplingParameters, TextPrompt


def addressed(made: LogprobBatch) -> LogprobBatch:
    """Return a batch as it is after it was published: checked, and under some worker's name."""
    return decode(encode(LogprobBatch.of_views(made.header._replace(worker_id="w"), made.columns)))


def run(engine: SyntheticEngine, steps: int) -> list[list[LogprobBatch]]:
    """Return the batches of some steps, each of which keeps the contract."""
    assembler = StepAssembler(Limits.default(), engine.vocabulary_size)
    return [[addressed(made) for made in step_of(engine, assembler)] for _ in range(steps)]


def step_of(engine: SyntheticEngine, assembler: StepAssembler) -> list[LogprobBatch]:
    return [made for arrays in engine.step() for made in assembler.assemble(arrays)]


def tokens_of(steps: Iterable[list[LogprobBatch]], key: int) -> list[int]:
    """Return a request's tokens, which must come without a hole."""
    found: list[int] = []
    for step in steps:
        for made in step:
            if made.header.kind is BatchKind.TARGET and key in made.request_keys:
                row = made.row(made.request_keys.tolist().index(key))
                assert row.position == len(found)
                found += row.token_ids.tolist()
    return found


def test_tokens_are_true_until_the_length() -> None:
    engine = SyntheticEngine(tokens_per_step=3)
    assert engine.admit(generate_of(5, 7)) == 3
    steps = run(engine, 3)
    assert tokens_of(steps, 5) == ids(5, 0, 7)
    assert [made.statuses.tolist() for (made,) in steps] == [[1], [1], [RowStatus.FINISHED_LENGTH]]
    assert [made.token_counts.tolist() for (made,) in steps] == [[3], [3], [1]]
    assert not engine.has_work
    assert engine.vocabulary_size == synthetic.VOCABULARY_SIZE


def test_request_without_a_length_goes_on() -> None:
    """A prompt of text is counted in letters."""
    engine = SyntheticEngine()
    assert engine.admit(generate_of(5, text=TextPrompt(text="four"), sampling=SamplingParameters())) == 4
    run(engine, 20)
    assert engine.has_work


def test_rows_come_in_another_order_than_the_batchs() -> None:
    """Rows lie in an order of the engine's own, which changes; the batch's order is in the indices (case 3)."""
    engine = SyntheticEngine()
    for key in range(1, 9):
        engine.admit(generate_of(key, 100))
    orders = [made.request_keys.tolist() for (made,) in run(engine, 3)]
    assert len({tuple(order) for order in orders}) == 3
    (made,) = run(engine, 1)[0]
    assert made.in_batch_order().request_keys.tolist() == list(range(1, 9))


def test_neighbours_do_not_change_a_request() -> None:
    """A request's tokens and alternatives are the same alone and beside others that want something else (case 15)."""
    alone, beside = SyntheticEngine(), SyntheticEngine()
    for engine in (alone, beside):
        engine.admit(generate_of(5, 6, top_logprobs=2))
    beside.admit(generate_of(6, 6, top_logprobs=5))
    beside.admit(generate_of(7, 6))
    (mine,), (theirs,) = run(alone, 1)[0], run(beside, 1)[0]
    row = theirs.row(theirs.request_keys.tolist().index(5))
    for name, value in mine.row(0)._asdict().items():
        if name != "batch_index":
            assert np.array_equal(value, getattr(row, name)), name


def test_scoring_is_what_was_asked_for() -> None:
    engine = SyntheticEngine()
    engine.admit(generate_of(5, 6))
    engine.admit(generate_of(6, 6, top_logprobs=0))
    ((made,),) = run(engine, 1)
    by_key = {row.key: row for row in made.rows()}
    assert (by_key[5].scoring, by_key[5].logprobs.size) == (Scoring.NONE, 0)
    assert (by_key[6].scoring, by_key[6].logprobs.size, by_key[6].alternative_token_ids.size) == (Scoring.FULL, 3, 0)


@pytest.mark.parametrize(("rows", "wanted", "parts"), [(1, 3, 1), (7, 3, 3), (5, 1, 1)])
def test_steps_come_in_as_many_parts_as_wanted(rows: int, wanted: int, parts: int) -> None:
    engine = SyntheticEngine(parts=wanted)
    for key in range(1, rows + 1):
        engine.admit(generate_of(key, 6))
    (step,) = run(engine, 1)
    assert [(made.header.part_index, made.header.part_count) for made in step] == [(n, parts) for n in range(parts)]
    assert {made.header.step_rows for made in step} == {rows}
    assert LogprobBatch.joined(step).request_keys.tolist() == list(range(1, rows + 1))


def test_rows_beyond_the_bound_wait() -> None:
    engine = SyntheticEngine(tokens_per_step=6, max_rows=2)
    for key in (1, 2, 3):
        engine.admit(generate_of(key, 6))
    steps = run(engine, 2)
    assert [sorted(made.request_keys.tolist()) for (made,) in steps] == [[1, 2], [3]]


def test_aborted_request_has_one_more_row_without_tokens() -> None:
    engine = SyntheticEngine()
    engine.admit(generate_of(5, 60))
    run(engine, 1)
    engine.abort(5)
    engine.abort(99)
    ((made,),) = run(engine, 1)
    row = made.row(0)
    assert (row.status, row.position, row.token_ids.size) == (RowStatus.ABORTED, 3, 0)
    assert not engine.has_work


def test_drafts_are_about_the_targets_rows() -> None:
    """A step's draft names rows of its target by key, place and position, also where a row was aborted (case 2, 4)."""
    engine = SyntheticEngine(drafts=True)
    for key in range(1, 9):
        engine.admit(generate_of(key, 60))
    engine.abort(3)
    engine.abort(6)
    ((target, draft),) = run(engine, 1)
    assert target.header.draft_follows
    assert (target.header.kind, draft.header.kind) == (BatchKind.TARGET, BatchKind.DRAFT)
    assert target.header.method == draft.header.method == SpeculativeMethod.MTP
    assert _unpaired(target, draft) is None
    drafted = {row.key: row.token_ids.tolist() for row in draft.rows()}
    assert drafted == {key: ids(key, 0, 0 if key in {3, 6} else 3) for key in range(1, 9)}
