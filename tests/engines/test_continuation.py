"""A continued request gets what it would have got from an engine that was never killed."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.engines.runs import Got, Run, asked, ngram
from tokenbus_contracts import RowStatus
from tokenbus_contracts.generated.request_pb2 import ErrorCode, Generate

REQUESTS = {
    "greedy": asked(1, max_tokens=30, temperature=0.0, top_logprobs=3),
    "seeded": asked(2, max_tokens=30, seed=5, temperature=1.4, top_p=0.9, top_logprobs=3),
    "with a stop": asked(3, max_tokens=90, seed=7, stop=["other one"], top_logprobs=0),
}


def continued(generate: Generate, token_ids: list[int]) -> Generate:
    turn = Generate()
    turn.CopyFrom(generate)
    turn.request_id, turn.first_request_id = 99, generate.request_id
    turn.continuation.token_ids.extend(token_ids)
    turn.continuation.turn, turn.continuation.reason = 1, ErrorCode.ERROR_CODE_WORKER_LOST
    return turn


def both(run: Callable[..., Run], generate: Generate, **options: Any) -> list[tuple[Got, Got]]:  # noqa: ANN401
    """Return what a request gets at once, beside what it gets if its engine dies after each of its steps."""
    whole = run([generate], **options).to_the_end().got[generate.request_id]
    found = []
    for steps in range(1, len(whole.rows)):
        before = Got([row._replace(request_id=99) for row in whole.rows[:steps]])
        if not before.tokens:
            continue
        other = run(**options)
        other.admit(continued(generate, before.tokens), before=before)
        found.append((whole, other.to_the_end().got[99]))
    assert len(found) > 2
    return found


def _verified(got: Got) -> list[int]:
    return [row.draft_token_count for row in got.rows if row.token_ids.size]


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("speculate", [0, 3])
def test_ngram_goes_on_bit_for_bit(name: str, speculate: int) -> None:
    for whole, parts in both(ngram, REQUESTS[name], speculate=speculate, prefill_chunk=8):
        assert (parts.tokens, parts.logprobs, parts.ranks) == (whole.tokens, whole.logprobs, whole.ranks)
        assert (parts.alternatives, parts.stop) == (whole.alternatives, whole.stop)
        assert _verified(parts) == _verified(whole)


def handed_on(
    run: Callable[..., Run],
    requests: Sequence[Generate],
    prefill: Run,
    **options: Any,  # noqa: ANN401 - the engine's
) -> dict[int, Got]:
    decode = run(role="decode", **options)
    for generate in requests:
        before = prefill.got[generate.request_id]
        if before.statuses[-1] is not RowStatus.HANDED_OFF:
            continue
        turn = Generate()
        turn.CopyFrom(generate)
        turn.continuation.token_ids.extend(before.tokens)
        decode.admit(turn, before=Got([row for row in before.rows if row.token_ids.size]))
    return decode.to_the_end().got


@pytest.mark.parametrize("name", ["greedy", "seeded"])
def test_continued_request_begins_at_a_prefill_engine(name: str) -> None:
    whole = ngram([REQUESTS[name]]).to_the_end().got[REQUESTS[name].request_id]
    cut = whole.rows[3].position
    prefill = ngram([continued(REQUESTS[name], whole.tokens[:cut])], role="prefill").to_the_end().got[99]
    assert (prefill.statuses[-1], prefill.rows[-1].position) == (RowStatus.HANDED_OFF, cut)
    accepted = [*whole.tokens[:cut], *_ids(prefill)]
    decode = ngram([continued(REQUESTS[name], accepted)], role="decode").to_the_end().got[99]
    assert [*accepted, *_ids(decode)] == whole.tokens


def _ids(got: Got) -> list[int]:
    return [token for row in got.rows for token in row.token_ids.tolist()]


def test_drawn_seed_is_used_where_the_client_gave_none() -> None:
    """So both turns choose alike; a seed of the client's own counts first."""
    texts = []
    for seed, drawn in ((None, 5), (None, 5), (None, 6), (5, 0), (5, 6)):
        generate = asked(1, max_tokens=20, ignore_end_token=True, seed=seed)
        generate.drawn_seed = drawn
        texts.append(ngram([generate]).to_the_end().got[1].tokens)
    assert texts[0] == texts[1] == texts[3] == texts[4]
    assert texts[0] != texts[2]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([5, 2**31 - 2], r"continuation.token_ids\[1\]: below \d+, got 2147483646"),
        ([5] * 4, "continuation.token_ids: less than the request's 4 tokens, got 4"),
        ([7], "continuation.token_ids: no token that ends the request, got a stop"),
    ],
)
def test_tokens_that_it_cannot_have_are_refused(ids: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ngram([continued(asked(1, max_tokens=4, stop_token_ids=[7]), ids)])


def test_continued_request_is_preempted_as_others_are() -> None:
    generate = REQUESTS["greedy"]
    whole = ngram([generate]).to_the_end().got[1]
    run = ngram([continued(generate, whole.tokens[:4]), asked(5, max_tokens=30)], max_running=1, slice_steps=2)
    run.to_the_end()
    assert [token for row in run.got[99].rows for token in row.token_ids.tolist()] == whole.tokens[4:]
    assert run.got[99].statuses[-1] in (RowStatus.FINISHED_LENGTH, RowStatus.FINISHED_STOP)
