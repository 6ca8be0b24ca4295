"""Sampling parameters: each one that an engine does not offer is refused by its name, unless it changes nothing."""

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from tests.engines.runs import PROMPT, asked, ngram
from tests.in_process.builders import generate_of
from tokenbus.engines.admission import OFFERED, request_of
from tokenbus.engines.ngram import NgramEngine, NgramOptions, default_tokenizer
from tokenbus.engines.paddle import ByteTokenizer
from tokenbus.engines.requests import Request, Stops
from tokenbus.engines.synthetic import SyntheticEngine
from tokenbus_contracts import ContractError
from tokenbus_contracts.frames import read_frame, write_frame
from tokenbus_contracts.generated.client_pb2 import ClientFrame
from tokenbus_contracts.generated.request_pb2 import Generate, SamplingParameters

CONTEXT = 1024


def of_bytes(generate: Generate, context: int = CONTEXT) -> Request:
    return request_of(generate, ByteTokenizer(), context=context, max_top_logprobs=20)


FIELDS = cast("Descriptor", SamplingParameters.DESCRIPTOR).fields_by_name
ENGINES: dict[str, Callable[[Generate], object]] = {
    "ngram": NgramEngine().admit,
    "paddle": of_bytes,
    "synthetic": SyntheticEngine().admit,
}
PROMPT_TOKENS = 3
_KEYS = iter(range(1, 10_000))


def with_sampling(sampling: SamplingParameters) -> Generate:
    return generate_of(next(_KEYS), sampling=sampling)


def effective(name: str) -> SamplingParameters:
    sampling: Any = SamplingParameters()
    field = FIELDS[name]
    if name == "structured_output":
        sampling.structured_output.regex.pattern = "a"
    elif field.message_type is not None:
        getattr(sampling, name).add()
    elif field.is_repeated:
        getattr(sampling, name).append("a" if field.type == FieldDescriptor.TYPE_STRING else 1)
    else:
        values = {FieldDescriptor.TYPE_STRING: "a", FieldDescriptor.TYPE_BOOL: True, FieldDescriptor.TYPE_FLOAT: 0.5}
        setattr(sampling, name, values.get(field.type, 2))
    return cast("SamplingParameters", sampling)


@pytest.mark.parametrize("admit", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("name", FIELDS)
def test_every_parameter_is_offered_or_refused(name: str, admit: Callable[[Generate], object]) -> None:
    if name in OFFERED:
        admit(with_sampling(effective(name)))
        return
    with pytest.raises(ValueError, match=rf"^sampling\.{name}: (only|none|no element) .*with this engine, got .+$"):
        admit(with_sampling(effective(name)))


@pytest.mark.parametrize("engine", ENGINES)
def test_value_that_changes_nothing_is_taken(engine: str) -> None:
    """A client that writes every default out is not refused, and gets what one gets that writes none."""
    admit = ENGINES[engine]
    zeros: dict[str, Any] = dict.fromkeys(("min_p", "presence_penalty", "frequency_penalty", "min_tokens"), 0)
    neutral = SamplingParameters(
        seed=7, repetition_penalty=1, include_special_tokens=False, lora_adapter="", priority=3, **zeros
    )
    taken, expected = admit(with_sampling(neutral)), admit(with_sampling(SamplingParameters(seed=7)))
    if isinstance(taken, Request) and isinstance(expected, Request):
        assert replace(taken, request_id=1) == replace(expected, request_id=1)
    else:
        assert taken == expected == PROMPT_TOKENS


def _outcome(data: bytes) -> tuple[str, str]:
    """Return what became of a frame with a request, "unread", "refused", "taken" or "other", and the error's text."""
    try:
        frame = read_frame(ClientFrame, data)
    except ContractError as error:
        return "unread", str(error)
    if not frame.HasField("generate"):
        return "other", ""
    try:
        taken = of_bytes(frame.generate)
    except ValueError as error:
        return "refused", str(error)
    sampling = frame.generate.sampling
    assert (taken.request_id, taken.top_k) == (frame.generate.request_id, sampling.top_k)
    assert taken.seed == sampling.seed or not sampling.HasField("seed")
    assert 0 < taken.top_p <= 1
    assert 0 <= taken.temperature < math.inf
    assert 1 <= taken.most <= CONTEXT
    return "taken", ""


def test_damaged_request_is_read_and_refused_or_taken() -> None:
    full = SamplingParameters(seed=7)
    for name in OFFERED:
        full.MergeFrom(effective(name))
    whole = write_frame(ClientFrame(generate=with_sampling(full)))
    assert _outcome(whole) == ("taken", "")
    outcomes: Counter[str] = Counter()
    for place in range(len(whole)):
        for value in (0, 1, 0x7F, 0x80, 0xFF, *(whole[place] ^ 1 << bit for bit in range(8))):
            outcome, line = _outcome(whole[:place] + bytes([value]) + whole[place + 1 :])
            outcomes[outcome] += 1
            assert outcome != "refused" or re.fullmatch(r"[a-z_.]+(\[\d+\])?: .+, got .+", line), line
            assert "\n" not in line
    assert min(outcomes[each] for each in ("unread", "refused", "taken")) > len(whole) // 4, outcomes


class Words:
    vocabulary_size = 5

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def token_bytes(self, token_id: int) -> bytes:
        return (b"one ", b"stop", b" now", b"!", b"")[token_id]


@pytest.mark.parametrize(
    ("texts", "tokens", "found"),
    [
        (["never", "op n"], [0, 1, 2, 3], (2, 3)),
        (["stop", "to"], [0, 1], (1, 3)),  # the one that ends first
        (["top", "op"], [0, 1], (1, 2)),  # both end at once: the first in order
        (["op", "top"], [0, 1], (1, 2)),
        (["never"], [0, 3, 1], (1, 1)),
        (["never"], [0, 1], (None, 0)),
        (["e st"], [0, 4, 1], (2, 2)),  # a token without bytes is between
    ],
)
def test_stop_that_is_met_is_named(texts: list[str], tokens: list[int], found: tuple[int | None, int]) -> None:
    stops = Stops(Words(), texts, [3])
    place, stop, tail = stops.find(tokens)
    assert (place, stop) == found
    assert (stops.add(tokens), stops.tail) == (place is not None, tail)


def test_only_the_end_of_the_text_is_kept() -> None:
    stops = Stops(ByteTokenizer(), ["x" * 256], [])
    assert not stops.add([97] * 1000)
    assert len(stops.tail) == 255
    assert [stops.add([ord("x")]) for _ in range(256)] == [False] * 255 + [True]


def test_output_is_as_long_as_asked_for_or_as_fits() -> None:
    for most, room in ((5, 5), (500, 13), (None, 13)):
        sampling: dict[str, Any] = {} if most is None else {"max_tokens": most}
        assert of_bytes(asked(7, "ab", **sampling), context=16).most == room
    assert of_bytes(asked(7, [0] * 7), context=8).most == 1


def test_absent_parameters_have_defaults() -> None:
    first, second = (of_bytes(asked(7, "ab")) for _ in range(2))
    assert (first.temperature, first.top_p, first.top_k, first.is_scored) == (1, 1, 0, False)
    assert first.stops is None
    assert first.seed != second.seed
    assert of_bytes(asked(7, "ab", seed=0)).seed == 0


SIZE = default_tokenizer().vocabulary_size
REFUSED = {
    "text.text: at least 1 token, got none": asked(5, ""),
    "tokens.token_ids: at least 1 token, got none": asked(5, []),
    r"text.text: at most 2047 tokens, got 2400": asked(5, PROMPT * 600),
    "text.text: at most 32752 bytes, got 4000000": asked(5, "x" * 4_000_000),
    r"tokens.token_ids: at most 2047 tokens, got 2048": asked(5, [0] * 2048),
    rf"tokens.token_ids\[1\]: below {SIZE}, got {SIZE}": asked(5, [1, SIZE, 9_999]),
    "request_id: at least 1, got 0": asked(0),
    "request_id: 1 is in use already": asked(1),
    r"sampling.temperature: a finite number of at least 0, got -0.5": asked(5, temperature=-0.5),
    "sampling.temperature: a finite number of at least 0, got nan": asked(5, temperature=math.nan),
    "sampling.temperature: a finite number of at least 0, got inf": asked(5, temperature=math.inf),
    "sampling.top_p: above 0 and at most 1, got 0.0": asked(5, top_p=0),
    "sampling.top_p: above 0 and at most 1, got 1.5": asked(5, top_p=1.5),
    "sampling.top_p: above 0 and at most 1, got nan": asked(5, top_p=math.nan),
    "sampling.max_tokens: at least 1, got 0": asked(5, max_tokens=0),
    r"sampling.stop\[1\]: 1 to 4096 bytes, got 0": asked(5, stop=["a", ""]),
    r"sampling.stop\[0\]: 1 to 4096 bytes, got 4097": asked(5, stop=["x" * 4097]),
    "sampling.stop: at most 16 texts, got 17": asked(5, stop=["a"] * 17),
    "sampling.stop_token_ids: at most 1024 ids, got 1025": asked(5, stop_token_ids=[1] * 1025),
    rf"sampling.stop_token_ids\[0\]: below {SIZE}, got {SIZE}": asked(5, stop_token_ids=[SIZE]),
    "top_logprobs: at most 20, got 21": asked(5, top_logprobs=21),
    "at least 1 token, got none": Generate(request_id=5, sampling=SamplingParameters()),
}


@pytest.mark.parametrize(("message", "request_"), REFUSED.items(), ids=range(len(REFUSED)))
def test_a_wrong_request_is_refused(message: str, request_: Generate) -> None:
    run = ngram([asked(1, max_tokens=2)])
    with pytest.raises(ValueError, match=message) as error:
        run.engine.admit(request_)
    assert "\n" not in str(error.value)
    if request_.request_id == 5:
        run.admit(asked(5, max_tokens=1))
    assert not run.to_the_end().engine.has_work


def test_text_and_tokens_are_the_same_prompt() -> None:
    """A prompt as text goes on as the tokens of it do, and both are as long; token id 0 is one (case 10)."""
    run = ngram()
    ids = default_tokenizer().encode("It is. It was.")
    assert 0 in ids
    assert run.admit(asked(1, "It is. It was.", seed=2, max_tokens=20)) == len(ids)
    assert run.admit(asked(2, ids, seed=2, max_tokens=20)) == len(ids)
    run.to_the_end()
    assert run.got[1].tokens == run.got[2].tokens
    assert b"".join(map(default_tokenizer().token_bytes, ids)) == b"It is. It was."


WRONG_OPTIONS = {
    "role: one of mixed, prefill, decode, got 'both'": {"role": "both"},
    "speculate: 0 to 15, got 16": {"speculate": 16},
    "speculate: 0 to 15, got -1": {"speculate": -1},
    "context: 2 to 1048576, got 1": {"context": 1},
    "max_running: 1 to 1024, got 0": {"max_running": 0},
    "prefill_chunk: 1 to 1048576, got 0": {"prefill_chunk": 0},
    "slice_steps: 0 to 2147483647, got -1": {"slice_steps": -1},
    "max_top_logprobs: 0 to 32, got 33": {"max_top_logprobs": 33},
}


@pytest.mark.parametrize(("message", "options"), WRONG_OPTIONS.items(), ids=range(len(WRONG_OPTIONS)))
def test_wrong_options_are_refused(message: str, options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        NgramOptions(**options)  # type: ignore[arg-type]


def test_many_requests_come_and_go() -> None:
    engine = NgramEngine()
    for begin in range(1, 2_000, 100):
        for key in range(begin, begin + 100):
            engine.admit(asked(key, max_tokens=1))
        while engine.has_work:
            engine.step()
    assert engine._requests.request_ids.size == 128
