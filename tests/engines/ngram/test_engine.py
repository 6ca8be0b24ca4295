"""NgramEngine: what requests get, from their first token to what ends them, whoever else asks."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engines.ngram import reference
from tests.engines.runs import PROMPT, Got, asked, ngram, text_of
from tokenbus.engines.ngram import default_tokenizer
from tokenbus_contracts import BatchKind, RowStatus, Scoring, SpeculativeMethod, StepPhase, ValueKind
from tokenbus_contracts.generated.request_pb2 import Generate

TOKENIZER = default_tokenizer()
TOLERANCE = 2e-6
STOPPED, LENGTH = RowStatus.FINISHED_STOP, RowStatus.FINISHED_LENGTH


def outcome(options: dict[str, int] | None = None, **wanted: Any) -> Got:  # noqa: ANN401 - any parameter
    return ngram([asked(1, **wanted)], **options or {}).to_the_end().got[1]


def check_scores(prompt: list[int], got: Got, top_k: int) -> None:
    """Compare the scores of a request's tokens with a plain computation of every distribution."""
    text = list(prompt)
    assert len(got.tokens) == len(got.logprobs) == len(got.ranks) == len(got.alternatives)
    for place, token in enumerate(got.tokens):
        truth = reference.logprobs_after(text)
        assert abs(got.logprobs[place] - truth[token]) <= TOLERANCE
        assert got.ranks[place] == reference.rank(truth, token)
        ids = [token_id for token_id, _ in got.alternatives[place]]
        assert ids == reference.ordered(truth)[:top_k]
        assert np.allclose([value for _, value in got.alternatives[place]], truth[ids], rtol=0, atol=TOLERANCE)
        text.append(token)


@pytest.mark.parametrize("speculate", [0, 3, 15])
def test_logprobs_are_those_of_the_whole_distribution(speculate: int) -> None:
    """Logprobs, ranks and alternatives of every token are the model's own, however many came in a step (case 11)."""
    for top_k in (0, 20):
        got = outcome({"speculate": speculate}, top_logprobs=top_k, seed=top_k, max_tokens=40, temperature=1.3)
        assert got.tokens
        check_scores(TOKENIZER.encode(PROMPT), got, top_k)


@pytest.mark.parametrize("speculate", [0, 3])
def test_entropies_are_those_of_the_whole_distribution(speculate: int) -> None:
    wanting, plain = asked(1, PROMPT, 0, seed=3, max_tokens=20), asked(2, PROMPT, 0, seed=4, max_tokens=20)
    wanting.token_scoring.entropies = True
    run = ngram([wanting, plain], speculate=speculate).to_the_end()
    prompt, got = TOKENIZER.encode(PROMPT), run.got[1]
    found = [value for row in got.rows if row.extras is not None for value in row.extras.entropies.tolist()]
    expected = []
    for place in range(len(got.tokens)):
        logprobs = reference.logprobs_after([*prompt, *got.tokens[:place]])
        expected.append(-sum(math.exp(value) * value for value in logprobs if value > -math.inf))
    assert found == pytest.approx(expected, abs=1e-5)
    assert all(row.extras is None for row in run.got[2].rows)


@pytest.mark.parametrize("speculate", [0, 3])
def test_greedy_follows_the_most_probable(speculate: int) -> None:
    """At temperature 0 each token has rank 1, whatever else is asked for, with drafts and without (case 31)."""
    got = outcome({"speculate": speculate}, top_logprobs=1, temperature=0, top_p=0.2, max_tokens=40)
    assert got.ranks == [1] * len(got.tokens)
    assert [line[0][0] for line in got.alternatives] == got.tokens


def test_the_length_ends_a_request_within_a_block() -> None:
    whole = outcome(seed=3, max_tokens=50, ignore_end_token=True)
    for length in range(1, 12):
        got = outcome(seed=3, max_tokens=length, ignore_end_token=True, top_logprobs=1)
        assert got.tokens == whole.tokens[:length]
        assert got.statuses[-1] is LENGTH
        assert len(got.logprobs) == len(got.ranks) == len(got.alternatives) == length


def test_the_end_token_ends_a_request() -> None:
    end = TOKENIZER.end_token
    stopped = [got for seed in range(8) if (got := outcome(seed=seed)).statuses[-1] is STOPPED]
    assert len(stopped) > 5
    assert all(got.tokens.index(end) == len(got.tokens) - 1 for got in stopped)
    assert outcome(seed=0, stop_token_ids=[end], stop=["no such text"]).stop == 0
    own = outcome(seed=0, ignore_end_token=True, stop_token_ids=[end])
    assert (own.statuses[-1], own.stop, own.tokens[-1]) == (STOPPED, 1, end), "ignored, but one of its own stops"
    gone_on = outcome(seed=0, ignore_end_token=True, max_tokens=300)
    assert len(gone_on.tokens) == 300
    assert end in gone_on.tokens


def test_a_stop_token_ends_a_request() -> None:
    """A request's own stop token ends it, and token id 0 may be one (case 10)."""
    whole = outcome(seed=1, max_tokens=200, ignore_end_token=True)
    got = outcome(seed=1, max_tokens=200, ignore_end_token=True, stop_token_ids=[0, 7])
    place = min(whole.tokens.index(0), whole.tokens.index(7))
    assert got.tokens == whole.tokens[: place + 1]
    assert (got.statuses[-1], got.stop) == (STOPPED, 1)


def test_stop_string_within_a_block_trims_everything() -> None:
    """What an accepted block has behind a stop string goes with its ids, logprobs, ranks, alternatives (case 13)."""
    trimmed = straddling = 0
    for seed in range(12):
        whole = outcome(seed=seed, max_tokens=60, ignore_end_token=True)
        text = text_of(TOKENIZER, whole.tokens)
        stop = text[len(text) // 2 : len(text) // 2 + 5]
        run = ngram([asked(1, seed=seed, max_tokens=60, ignore_end_token=True, stop=[stop], top_logprobs=2)])
        got = run.to_the_end().got[1]
        first = next(at for at in range(61) if stop in text_of(TOKENIZER, whole.tokens[:at]))
        assert got.tokens == whole.tokens[:first]
        assert got.statuses[-1] is STOPPED
        assert stop in text_of(TOKENIZER, got.tokens)
        check_scores(TOKENIZER.encode(PROMPT), got, 2)
        ((arrays,),) = run.arrays[-1:]
        trimmed += arrays.kept_counts is not None
        straddling += stop not in TOKENIZER.token_bytes(got.tokens[-1]).decode()
    assert trimmed > 2
    assert straddling > 5


@pytest.mark.parametrize(("speculate", "method"), [(0, SpeculativeMethod.NONE), (3, SpeculativeMethod.NGRAM)])
def test_steps_say_what_they_are(speculate: int, method: SpeculativeMethod) -> None:
    """The first step is a prefill, what follows decodes; the method and how many drafts were verified are reported."""
    run = ngram([asked(1, top_logprobs=0, seed=1, max_tokens=12, ignore_end_token=True)], speculate=speculate)
    run.step()
    run.step()
    run.admit(asked(2, seed=1, max_tokens=4))
    run.to_the_end()
    headers = [batch.header for (batch,) in run.batches]
    assert [header.phase.name for header in headers[:4]] == ["PREFILL", "DECODE", "MIXED", "DECODE"]
    assert {header.method for header in headers} == {method}
    assert headers[0].value_kind is ValueKind.RAW_LOGPROBS
    first, *others = run.got[1].rows
    assert first.draft_token_count == 0
    assert {row.draft_token_count for row in others} == {speculate}
    assert (max(row.token_ids.size for row in others) > 1) == bool(speculate)
    assert not run.engine.has_work
    assert run.engine.step() == []


def test_rows_are_sorted_by_what_was_computed_and_can_be_put_back() -> None:
    """Prompts come after rows that go on; batch indices say the order of admission (case 1)."""
    wanted = [asked(key, seed=key, max_tokens=30, ignore_end_token=True) for key in (1, 2, 3)]
    run = ngram(wanted, max_running=2, slice_steps=2).to_the_end()
    keys = [batch.request_ids.tolist() for (batch,) in run.batches]
    assert [batch.in_batch_order().request_ids.tolist() for (batch,) in run.batches] == [sorted(each) for each in keys]
    assert sum(each != sorted(each) for each in keys) > 3
    for (batch,) in run.batches:
        rows = [batch.row(place) for place in range(batch.row_count)]
        has_tokens = [row.token_ids.size > 0 for row in rows]
        assert has_tokens == sorted(has_tokens, reverse=True)


def test_an_abort_ends_a_request_at_the_next_step() -> None:
    run = ngram([asked(key, seed=key, ignore_end_token=True) for key in (1, 2, 3)], max_running=2)
    run.step()
    for key in (3, 1, 1, 99):
        run.engine.abort(key)
    (batch,) = run.step()
    by_key = dict(zip(batch.request_ids.tolist(), batch.statuses.tolist(), strict=True))
    assert by_key == {1: RowStatus.ABORTED, 2: RowStatus.ACTIVE, 3: RowStatus.ABORTED}
    assert batch.in_batch_order().request_ids.tolist() == [1, 2, 3]
    assert run.step()[0].request_ids.tolist() == [2]
    run.admit(asked(1, seed=1, max_tokens=2))
    run.engine.abort(2)
    run.to_the_end()
    assert run.got[1].statuses[-1] is LENGTH
    run.admit(asked(4))
    run.engine.abort(4)
    assert run.step()[0].statuses.tolist() == [RowStatus.ABORTED]
    assert not run.engine.has_work
    run.engine.close()


def test_drafts_are_emitted_for_those_who_want_them() -> None:
    wanted: dict[str, Any] = {"max_tokens": 30, "ignore_end_token": True}
    wants, ids_only = (
        asked(key, PROMPT, top, include_draft_logprobs=True, seed=key, **wanted) for key, top in ((1, 4), (3, None))
    )
    run = ngram([wants, asked(2, PROMPT, 1, seed=3, ignore_end_token=True, max_tokens=40), ids_only]).to_the_end()
    assert [len(batches) for batches in run.batches[:3]] == [1, 2, 2]
    accepted = 0
    text = TOKENIZER.encode(PROMPT) + run.got[1].tokens[:1]
    for target, *drafts in run.batches:
        assert target.header.draft_follows == bool(drafts)
        for draft in drafts:
            assert draft.header.kind is BatchKind.DRAFT
            for column in ("request_ids", "positions", "batch_indices"):
                assert getattr(draft, column).tolist() == getattr(target, column).tolist()
            by_key = {draft.row(place).request_id: draft.row(place) for place in range(draft.row_count)}
            assert by_key[2].status is RowStatus.IDLE
            assert by_key[2].token_ids.size == 0
            if 3 in by_key:
                assert (by_key[3].token_ids.size, by_key[3].scoring) == (3, Scoring.NONE)
            if 1 in by_key:
                here = list(text)
                row, mine = by_key[1], target.row(target.request_ids.tolist().index(1))
                for place, token in enumerate(row.token_ids.tolist()):
                    truth = reference.draft_logprobs_after(here)
                    assert abs(row.logprobs[place] - truth[token]) <= TOLERANCE
                    assert row.ranks[place] == reference.rank(truth, token)
                    assert row.alternative_token_ids[place].tolist() == reference.ordered(truth)[:4]
                    here.append(token)
                given = mine.token_ids.tolist()
                accepted += sum(a == b for a, b in zip(given[:-1], row.token_ids.tolist(), strict=False))
                text += given
    assert accepted > 5


def test_a_long_prompt_is_computed_in_chunks() -> None:
    """A prompt beyond a chunk takes several steps, whose rows have no tokens and no drafts, then gives one (case 9)."""
    prompt = TOKENIZER.encode(PROMPT * 8)
    assert len(prompt) == 32
    wanted: dict[str, Any] = {"seed": 4, "max_tokens": 9, "ignore_end_token": True}
    generate = asked(1, prompt, 2, include_draft_logprobs=True, **wanted)
    run = ngram([generate], prefill_chunk=10).to_the_end()
    got = run.got[1]
    assert got.statuses[:4] == [*[RowStatus.PREFILLING] * 3, RowStatus.ACTIVE]
    assert [row.token_ids.size for row in got.rows[:4]] == [0, 0, 0, 1]
    assert [len(batches) for batches in run.batches[:5]] == [1, 1, 1, 1, 2]
    assert [batch.header.phase for batch, *_ in run.batches[:5]] == [*[StepPhase.PREFILL] * 4, StepPhase.DECODE]
    whole = ngram([asked(1, prompt, **wanted)]).to_the_end()
    assert got.tokens == whole.got[1].tokens


PROMPTS = ["The old man said", "What is", "xyz 12", "In the evening the", ".", "\N{GRINNING FACE}"]
SAMPLINGS = st.fixed_dictionaries(
    {"seed": st.integers(0, 2**64 - 1), "max_tokens": st.integers(1, 24)},
    optional={
        "temperature": st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.5, 3.0]),
        "top_p": st.sampled_from([0.1, 0.5, 0.9, 0.99, 1.0]),
        "top_k": st.sampled_from([0, 1, 5, 40, 100_000]),
        "stop": st.lists(st.sampled_from(["the", ". ", "e w", '"']), max_size=2),
        "stop_token_ids": st.lists(st.integers(0, default_tokenizer().vocabulary_size - 1), max_size=3),
        "ignore_end_token": st.booleans(),
    },
)


@st.composite
def requests(draw: st.DrawFn) -> Generate:
    sampling: dict[str, Any] = draw(SAMPLINGS)
    top_logprobs = draw(st.none() | st.integers(0, 20))
    wants_drafts = draw(st.booleans())
    return asked(1, draw(st.sampled_from(PROMPTS)), top_logprobs, include_draft_logprobs=wants_drafts, **sampling)


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(
    mine=requests(),
    others=st.lists(requests(), min_size=1, max_size=12),
    place=st.integers(0, 11),
    late=st.integers(0, 3),
    options=st.sampled_from([{}, {"max_running": 2, "slice_steps": 2, "prefill_chunk": 3}, {"prefill_chunk": 2}]),
)
def test_an_outcome_does_not_depend_on_neighbours(
    mine: Generate, others: list[Generate], place: int, late: int, options: dict[str, int]
) -> None:
    """Tokens, scores and drafts of a request are the same alone and among others, whatever they ask for.

    So they are where it is preempted, and computed again in chunks (cases 15, 22).
    """
    alone = ngram([mine]).to_the_end()
    wanted = list(others)
    wanted.insert(min(place, len(wanted)), mine)
    for key, generate in enumerate(wanted, start=1):
        generate.request_id = key
    mine_key = mine.request_id
    run = ngram(wanted[: len(wanted) - late], **options)
    for generate in wanted[len(wanted) - late :]:
        run.step()
        run.admit(generate)
    run.to_the_end()
    got, other = run.got[mine_key], alone.got[1]
    for column in ("tokens", "logprobs", "ranks", "alternatives"):
        assert getattr(got, column) == getattr(other, column), column
    assert got.statuses[-1] is other.statuses[-1]
    drafts = [
        [(row.token_ids.tolist(), row.logprobs.tolist()) for row in each.drafts if row.token_ids.size]
        for each in (got, other)
    ]
    assert drafts[0] == drafts[1]
