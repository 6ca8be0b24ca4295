"""Schedule: which requests run and which wait, and that no tokens depend on it."""

import pytest

from tests.engines.ngram.runs import PROMPT, Run, asked
from tokenbus_contracts import RowStatus, StepPhase
from tokenbus_engines.ngram import NgramOptions, default_tokenizer


def test_a_long_prompt_is_computed_in_chunks() -> None:
    """A prompt beyond a chunk takes several steps, whose rows have no tokens and no drafts, then gives one (case 9)."""
    prompt = default_tokenizer().encode(PROMPT * 8)
    assert len(prompt) == 32
    generate = asked(1, prompt, seed=4, max_tokens=9, top_logprobs=2, ignore_end_token=True)
    generate.include_draft_logprobs = True
    run = Run(NgramOptions(prefill_chunk=10), [generate]).to_the_end()
    got = run.got[1]
    assert got.statuses[:4] == [*[RowStatus.PREFILLING] * 3, RowStatus.ACTIVE]
    assert got.counts[:4] == [0, 0, 0, 1]
    assert [len(batches) for batches in run.batches[:5]] == [1, 1, 1, 1, 2]
    assert [batch.header.phase for batch, *_ in run.batches[:5]] == [*[StepPhase.PREFILL] * 4, StepPhase.DECODE]
    whole = Run(requests=[asked(1, prompt, seed=4, max_tokens=9, ignore_end_token=True)]).to_the_end()
    assert got.tokens == whole.got[1].tokens


def test_more_requests_than_run_wait_in_order() -> None:
    """At most so many rows are in a step; the others wait, first come first served, and get what they would have."""
    wanted = [asked(key, seed=key, max_tokens=5, ignore_end_token=True) for key in range(1, 11)]
    run = Run(NgramOptions(max_running=3), wanted).to_the_end()
    assert max(batch.row_count for (batch,) in run.batches) == 3
    assert run.batches[0][0].request_keys.tolist() == [1, 2, 3]
    firsts = [min(at for at, (batch,) in enumerate(run.batches) if key in batch.request_keys) for key in range(1, 11)]
    assert firsts == sorted(firsts)
    alone = Run(requests=wanted).to_the_end()
    assert {key: got.tokens for key, got in run.got.items()} == {key: got.tokens for key, got in alone.got.items()}


def check_preemption(options: NgramOptions, requests: int) -> int:
    """Compare a run with preemptions with one without, and return how many there were."""
    wanted = [
        asked(key, seed=key, max_tokens=30, top_logprobs=key % 4, temperature=0.5 + key / 10, ignore_end_token=True)
        for key in range(1, requests + 1)
    ]
    run, calm = Run(options, wanted).to_the_end(), Run(requests=wanted).to_the_end()
    for key, got in run.got.items():
        other = calm.got[key]
        assert (got.tokens, got.logprobs, got.ranks) == (other.tokens, other.logprobs, other.ranks)
        assert got.alternatives == other.alternatives
        assert got.statuses[-1] is RowStatus.FINISHED_LENGTH
        for place, status in enumerate(got.statuses):
            if status is RowStatus.PREEMPTED:
                assert got.counts[place] == got.verified[place] == 0
    return sum(got.statuses.count(RowStatus.PREEMPTED) for got in run.got.values())


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_preempted_requests_go_on_with_the_same_tokens(steps: int) -> None:
    """A request that is taken out and resumed gets exactly the tokens that it would have had (case 22)."""
    assert check_preemption(NgramOptions(max_running=2, slice_steps=steps), 6) > 1


def test_a_full_memory_preempts_the_newest() -> None:
    """When all together have too many tokens the newest waits until there is room, and loses nothing (case 22)."""
    options = NgramOptions(context=64, kv_tokens=100)
    assert check_preemption(options, 8) > 3
    run = Run(options, [asked(key, seed=key, ignore_end_token=True) for key in range(1, 9)])
    while run.engine.has_work:
        (batch,) = run.step()
        rows = [batch.row(place) for place in range(batch.row_count)]
        running = [row for row in rows if row.status is not RowStatus.PREEMPTED]
        assert sum(4 + row.position for row in running) <= 100
        preempted = [row.key for row in rows if row.status is RowStatus.PREEMPTED]
        assert all(key > max(row.key for row in running) for key in preempted)


def test_a_preempted_request_can_be_aborted() -> None:
    """An abort ends a request that was taken out, too, and it does not come back."""
    run = Run(NgramOptions(max_running=1, slice_steps=2))
    for key in (1, 2):
        run.admit(asked(key, seed=key, ignore_end_token=True))
    while RowStatus.PREEMPTED not in run.got[1].statuses:
        run.step()
    for key in (1, 2):
        run.engine.abort(key)
    run.step()
    assert run.got[1].statuses[-1] is RowStatus.ABORTED
    assert not run.engine.has_work


def test_resumed_requests_compute_their_context_again() -> None:
    """After a preemption the context is computed in chunks again before the next tokens come."""
    run = Run(NgramOptions(max_running=1, slice_steps=6, prefill_chunk=5))
    for key in (1, 2):
        run.admit(asked(key, seed=key, max_tokens=60, ignore_end_token=True))
    run.to_the_end()
    statuses = run.got[1].statuses
    place = statuses.index(RowStatus.PREEMPTED)
    assert statuses[place + 1 : place + 3] == [RowStatus.PREFILLING] * 2
    assert len(run.got[1].tokens) == 60
