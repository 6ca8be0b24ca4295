"""SyntheticEngine: steps like an engine's, whose every token follows from a key and a position."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engines.runs import Run
from tests.in_process.builders import generate_of, ids
from tokenbus.engines import synthetic
from tokenbus.engines.synthetic import SyntheticEngine
from tokenbus.processor.assembly import _unpaired
from tokenbus_contracts import BatchKind, LogprobBatch, RowStatus, Scoring, SpeculativeMethod
from tokenbus_contracts.generated.request_pb2 import Generate, SamplingParameters, TextPrompt


def run(*requests: Generate, **options: Any) -> Run:  # noqa: ANN401 - each option's own
    return Run(SyntheticEngine(**options), requests)


def test_tokens_are_true_until_the_length() -> None:
    steps = run(tokens_per_step=3)
    assert steps.admit(generate_of(5, 7)) == 3
    got = steps.to_the_end().got[5]
    assert got.tokens == ids(5, 0, 7)
    assert got.statuses == [RowStatus.ACTIVE, RowStatus.ACTIVE, RowStatus.FINISHED_LENGTH]
    assert [row.token_ids.size for row in got.rows] == [3, 3, 1]
    assert steps.engine.vocabulary_size == synthetic.VOCABULARY_SIZE


def test_request_without_a_length_goes_on() -> None:
    """A prompt of text is counted in letters."""
    steps = run()
    assert steps.admit(generate_of(5, text=TextPrompt(text="four"), sampling=SamplingParameters())) == 4
    for _ in range(20):
        steps.step()
    assert steps.engine.has_work


def test_rows_come_in_another_order_than_the_batchs() -> None:
    """Rows lie in an order of the engine's own, which changes; the batch's order is in the indices (case 3)."""
    steps = run(*(generate_of(key, 100) for key in range(1, 9)))
    made = [steps.step()[0] for _ in range(3)]
    assert len({tuple(batch.request_ids.tolist()) for batch in made}) == 3
    assert made[-1].in_batch_order().request_ids.tolist() == list(range(1, 9))


def test_scoring_is_what_was_asked_for() -> None:
    steps = run(generate_of(5, 6), generate_of(6, 6, top_logprobs=0))
    by_key = {row.request_id: row for row in steps.step()[0].rows()}
    assert (by_key[5].scoring, by_key[5].logprobs.size) == (Scoring.NONE, 0)
    assert (by_key[6].scoring, by_key[6].logprobs.size, by_key[6].alternative_token_ids.size) == (Scoring.FULL, 3, 0)


@pytest.mark.parametrize(("rows", "wanted", "parts"), [(1, 3, 1), (7, 3, 3), (5, 1, 1)])
def test_steps_come_in_as_many_parts_as_wanted(rows: int, wanted: int, parts: int) -> None:
    step = run(*(generate_of(key, 6) for key in range(1, rows + 1)), parts=wanted).step()
    assert [(made.header.part_index, made.header.part_count) for made in step] == [(n, parts) for n in range(parts)]
    assert {made.header.step_rows for made in step} == {rows}
    assert LogprobBatch.joined(step).request_ids.tolist() == list(range(1, rows + 1))


def test_rows_beyond_the_bound_wait() -> None:
    steps = run(*(generate_of(key, 6) for key in (1, 2, 3)), tokens_per_step=6, max_rows=2)
    assert [sorted(steps.step()[0].request_ids.tolist()) for _ in range(2)] == [[1, 2], [3]]


def test_aborted_request_has_one_more_row_without_tokens() -> None:
    steps = run(generate_of(5, 60))
    steps.step()
    steps.engine.abort(5)
    steps.engine.abort(99)
    row = steps.to_the_end().got[5].rows[-1]
    assert (row.status, row.position, row.token_ids.size) == (RowStatus.ABORTED, 3, 0)


def test_drafts_are_about_the_targets_rows() -> None:
    """A step's draft names rows of its target by key, place and position, also where a row was aborted (case 2, 4)."""
    steps = run(*(generate_of(key, 60) for key in range(1, 9)), drafts=True)
    steps.engine.abort(3)
    steps.engine.abort(6)
    target, draft = steps.step()
    assert target.header.draft_follows
    assert (target.header.kind, draft.header.kind) == (BatchKind.TARGET, BatchKind.DRAFT)
    assert target.header.method == draft.header.method == SpeculativeMethod.MTP
    assert _unpaired(target, draft) is None
    drafted = {row.request_id: row.token_ids.tolist() for row in draft.rows()}
    assert drafted == {key: ids(key, 0, 0 if key in {3, 6} else 3) for key in range(1, 9)}


KEYS = st.integers(1, 2**64 - 1)
_MASK = 2**64 - 1


def plain_mixed(word: int) -> int:
    """Return splitmix64 of a word, in Python's own integers."""
    word = (word + 0x9E3779B97F4A7C15) & _MASK
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _MASK
    return word ^ (word >> 31)


@given(KEYS, st.integers(0, 2**31 - 1))
def test_token_is_what_the_definition_says(key: int, position: int) -> None:
    number = plain_mixed(key ^ plain_mixed(position))
    place = (number >> 40) % 4
    for begin in (position, max(0, position - 3)):  # any cut of a request is the same
        found = synthetic.true_tokens(key, begin, position + 1)
        assert found.ids[-1] == (number % 50_000 + place) % 50_000
        assert found.ranks[-1] == place + 1
        assert found.logprobs[-1] == -((number >> 50) % 64 / 64 + place / 4 + 0.125)


@given(st.lists(KEYS, min_size=1, max_size=5), st.data())
def test_alternatives_are_in_order_and_hold_the_token(keys: list[int], data: st.DataObject) -> None:
    """Alternatives fall in value, and a token among them is at its own rank with its own logprob (case 15)."""
    top_ks = np.array([data.draw(st.integers(0, 6)) for _ in keys])
    numbers = synthetic.draws(np.array(keys, np.uint64), np.zeros(len(keys), np.uint64))
    tokens = synthetic.sampled(numbers)
    ids, logprobs = synthetic.alternatives(numbers, top_ks)
    ends = np.cumsum(top_ks)
    assert ids.size == logprobs.size == ends[-1]
    for place, (end, top_k) in enumerate(zip(ends.tolist(), top_ks.tolist(), strict=True)):
        mine = ids[end - top_k : end].tolist(), logprobs[end - top_k : end].tolist()
        assert mine[1] == sorted(mine[1], reverse=True)
        assert len(set(mine[0])) == top_k
        rank = int(tokens.ranks[place])
        if rank <= top_k:
            assert mine[0][rank - 1] == tokens.ids[place]
            assert mine[1][rank - 1] == tokens.logprobs[place]


def test_token_zero_occurs() -> None:
    """Token id 0 is among the tokens that requests get, so that code that takes it for none is found out (case 10)."""
    numbers = synthetic.draws(np.arange(1, 200_000, dtype=np.uint64), np.zeros(199_999, np.uint64))
    assert 0 in synthetic.sampled(numbers).ids
