"""Admission: a request that cannot be run is refused in one line, and does not harm the others."""

import math

import pytest

from tests.engines.ngram.runs import PROMPT, Run, asked
from tokenbus_contracts.generated.request_pb2 import Generate, SamplingParameters
from tokenbus_engines.ngram import NgramEngine, NgramOptions, default_tokenizer

SIZE = default_tokenizer().vocabulary_size
REFUSED = {
    "text.text: at least 1 token, got none": asked(5, ""),
    "tokens.token_ids: at least 1 token, got none": asked(5, []),
    r"text.text: at most 2047 tokens, got 2400": asked(5, PROMPT * 600),
    "text.text: at most 32752 bytes, got 4000000": asked(5, "x" * 4_000_000),
    r"tokens.token_ids: at most 2047 tokens, got 2048": asked(5, [0] * 2048),
    rf"tokens.token_ids\[1\]: below {SIZE}, got {SIZE}": asked(5, [1, SIZE, 9_999]),
    "request_key: at least 1, got 0": asked(0),
    "request_key: one that is not in use, got 1": asked(1),
    r"sampling.temperature: a finite number of at least 0, got -0.5": asked(5, temperature=-0.5),
    "sampling.temperature: a finite number of at least 0, got nan": asked(5, temperature=math.nan),
    "sampling.temperature: a finite number of at least 0, got inf": asked(5, temperature=math.inf),
    "sampling.top_p: above 0 and at most 1, got 0.0": asked(5, top_p=0),
    "sampling.top_p: above 0 and at most 1, got 1.5": asked(5, top_p=1.5),
    "sampling.top_p: above 0 and at most 1, got nan": asked(5, top_p=math.nan),
    "sampling.max_tokens: at least 1, got 0": asked(5, max_tokens=0),
    r"sampling.stop\[1\]: 1 to 256 bytes, got 0": asked(5, stop=["a", ""]),
    r"sampling.stop\[0\]: 1 to 256 bytes, got 257": asked(5, stop=["x" * 257]),
    "sampling.stop: at most 16 texts, got 17": asked(5, stop=["a"] * 17),
    "sampling.stop_token_ids: at most 64 ids, got 65": asked(5, stop_token_ids=[1] * 65),
    rf"sampling.stop_token_ids\[0\]: below {SIZE}, got {SIZE}": asked(5, stop_token_ids=[SIZE]),
    "top_logprobs: at most 20, got 21": asked(5, top_logprobs=21),
    "at least 1 token, got none": Generate(request_key=5, sampling=SamplingParameters()),
}


@pytest.mark.parametrize(("message", "request_"), REFUSED.items(), ids=range(len(REFUSED)))
def test_a_wrong_request_is_refused(message: str, request_: Generate) -> None:
    """A refusal names the field, the limit and the value in one line; the other requests go on as before."""
    run = Run(requests=[asked(1, seed=1, max_tokens=20)])
    run.step()
    with pytest.raises(ValueError, match=message) as error:
        run.engine.admit(request_)
    assert "\n" not in str(error.value)
    run.to_the_end()
    assert run.got[1].tokens == Run(requests=[asked(1, seed=1, max_tokens=20)]).to_the_end().got[1].tokens


def test_a_prompt_may_fill_the_context_but_one() -> None:
    """A prompt that leaves room for one token is taken, and gets that token."""
    run = Run(NgramOptions(context=8))
    assert run.admit(asked(1, [0] * 7)) == 7
    assert len(run.to_the_end().got[1].tokens) == 1


def test_text_and_tokens_are_the_same_prompt() -> None:
    """A prompt as text goes on as the tokens of it do, and both are as long; token id 0 is one (case 10)."""
    run = Run()
    ids = default_tokenizer().encode("It is. It was.")
    assert 0 in ids
    assert run.admit(asked(1, "It is. It was.", seed=2, max_tokens=20)) == len(ids)
    assert run.admit(asked(2, ids, seed=2, max_tokens=20)) == len(ids)
    run.to_the_end()
    assert run.got[1].tokens == run.got[2].tokens
    assert b"".join(map(default_tokenizer().token_bytes, ids)) == b"It is. It was."


@pytest.mark.parametrize("prompt", ["\0", "Grüße, 世界 \N{GRINNING FACE}", "\n\n\n", "🄰" * 40])
def test_any_text_can_be_a_prompt(prompt: str) -> None:
    """A text of which the model knows no word is a prompt like any other."""
    got = Run(requests=[asked(1, prompt, seed=1, max_tokens=10, ignore_end_token=True)]).to_the_end().got[1]
    assert len(got.tokens) == 10


def test_a_refused_key_can_be_used_later() -> None:
    """A key whose request was refused, or ended, is free."""
    run = Run()
    with pytest.raises(ValueError, match="top_logprobs"):
        run.admit(asked(1, top_logprobs=99))
    run.admit(asked(1, max_tokens=1))
    run.to_the_end()
    run.admit(asked(1, max_tokens=1))
    run.engine.abort(1)
    run.to_the_end()


WRONG_OPTIONS = {
    "role: one of mixed, prefill, decode, got 'both'": {"role": "both"},
    "speculate: 0 to 15, got 16": {"speculate": 16},
    "speculate: 0 to 15, got -1": {"speculate": -1},
    "context: 2 to 1048576, got 1": {"context": 1},
    "max_running: 1 to 1024, got 0": {"max_running": 0},
    "prefill_chunk: 1 to 1048576, got 0": {"prefill_chunk": 0},
    "kv_tokens: 2051 to 1099511627776, got 100": {"kv_tokens": 100},
    "slice_steps: 0 to 2147483647, got -1": {"slice_steps": -1},
    "max_top_logprobs: 0 to 32, got 33": {"max_top_logprobs": 33},
}


@pytest.mark.parametrize(("message", "options"), WRONG_OPTIONS.items(), ids=range(len(WRONG_OPTIONS)))
def test_wrong_options_are_refused(message: str, options: dict[str, object]) -> None:
    """An engine that could not run is not made; one line names the option, the limit and the value."""
    with pytest.raises(ValueError, match=f"^{message}$"):
        NgramOptions(**options)  # type: ignore[arg-type]


def test_many_requests_come_and_go() -> None:
    """Slots are used again, so an engine that has seen many requests is no larger than its most at once."""
    engine = NgramEngine()
    for begin in range(1, 2_000, 100):
        for key in range(begin, begin + 100):
            engine.admit(asked(key, max_tokens=1))
        while engine.has_work:
            engine.step()
    assert engine._requests.keys.size == 128


@pytest.mark.parametrize("temperature", [1e-45, 1e-20, 1e20, 3e38])
def test_any_temperature_is_sound(temperature: float) -> None:
    """The smallest and the largest numbers that the schema allows are temperatures like others."""
    wanted = asked(1, seed=1, max_tokens=40, temperature=temperature, top_p=0.9, top_logprobs=2, ignore_end_token=True)
    got = Run(requests=[wanted]).to_the_end().got[1]
    assert len(got.tokens) == 40
    if temperature < 1:
        assert got.ranks == [1] * 40
    else:
        assert len(set(got.tokens)) > 30
