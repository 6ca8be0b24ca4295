"""A prefill engine begins and a decode engine goes on: all tokens are those of one engine."""

from tests.engines.runs import PROMPT, asked, ngram
from tests.engines.test_continuation import handed_on
from tokenbus_contracts import RowStatus, StepPhase


def test_tokens_are_those_of_one_engine() -> None:
    """All requests of a prefill step go on elsewhere, and get what one engine alone would have given them (case 27)."""
    requests = [
        asked(
            key,
            PROMPT * (key % 3 + 1),
            (None, 0, 3, 20)[key % 4],
            seed=key,
            max_tokens=1 + key % 30,
            temperature=0.4 + key / 8,
            top_p=0.95,
            stop=["."] if key % 5 == 0 else [],
        )
        for key in range(1, 25)
    ]
    prefill, whole = ngram(requests, role="prefill").to_the_end(), ngram(requests).to_the_end()
    assert prefill.batches[0][0].header.phase is StepPhase.PREFILL
    parts = handed_on(ngram, requests, prefill)
    for key, alone in whole.got.items():
        got = parts.get(key, prefill.got[key])
        assert (got.tokens, got.logprobs, got.ranks) == (alone.tokens, alone.logprobs, alone.ranks)
        assert (got.alternatives, got.statuses[-1]) == (alone.alternatives, alone.statuses[-1])
    assert len(parts) > 15


def test_first_token_that_ends_a_request_is_its_last() -> None:
    first = ngram([asked(2, seed=2)]).to_the_end().got[2].tokens[0]
    run = ngram([asked(1, max_tokens=1), asked(2, seed=2, stop_token_ids=[first])], role="prefill").to_the_end()
    assert run.got[1].statuses == [RowStatus.FINISHED_LENGTH]
    assert run.got[2].statuses == [RowStatus.FINISHED_STOP]
