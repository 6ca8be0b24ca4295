"""Sampling parameters: each one that an engine does not offer is refused by its name, unless it changes nothing."""

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from tests.services.builders import generate_of
from tokenbus_contracts import ContractError
from tokenbus_contracts.frames import read_frame, write_frame
from tokenbus_contracts.generated.client_pb2 import ClientFrame
from tokenbus_contracts.generated.request_pb2 import Generate, SamplingParameters
from tokenbus_engines.admission import OFFERED, Stops, parameters_of
from tokenbus_engines.ngram import NgramEngine
from tokenbus_engines.paddle import ByteTokenizer, PaddleOptions
from tokenbus_engines.requests import Request
from tokenbus_engines.synthetic import SyntheticEngine

FIELDS = cast("Descriptor", SamplingParameters.DESCRIPTOR).fields_by_name
ENGINES: dict[str, Callable[[Generate], object]] = {
    "ngram": NgramEngine().admit,
    "paddle": lambda generate: parameters_of(generate, PaddleOptions(), ByteTokenizer(), Request),
    "synthetic": SyntheticEngine().admit,
}
PROMPT_TOKENS = 3
_KEYS = iter(range(1, 10_000))


def asked(sampling: SamplingParameters) -> Generate:
    """Return a request of its own with these parameters."""
    return generate_of(next(_KEYS), sampling=sampling)


def effective(name: str) -> SamplingParameters:
    """Return parameters of which one is set to what changes something."""
    sampling: Any = SamplingParameters()
    field = FIELDS[name]
    if field.message_type is not None and field.is_repeated:
        getattr(sampling, name).add()
    elif field.message_type is not None:
        getattr(sampling, name).SetInParent()
        sampling.structured_output.regex.pattern = "a"
    elif field.is_repeated:
        getattr(sampling, name).append("a" if field.type == FieldDescriptor.TYPE_STRING else 1)
    else:
        values = {FieldDescriptor.TYPE_STRING: "a", FieldDescriptor.TYPE_BOOL: True, FieldDescriptor.TYPE_FLOAT: 0.5}
        setattr(sampling, name, values.get(field.type, 2))
    return cast("SamplingParameters", sampling)


@pytest.mark.parametrize("admit", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("name", FIELDS)
def test_every_parameter_is_offered_or_refused(name: str, admit: Callable[[Generate], object]) -> None:
    """Each parameter of the schema, also of a schema to come, is taken by an engine that has it, or refused by name."""
    if name in OFFERED:
        admit(asked(effective(name)))
        return
    with pytest.raises(ValueError, match=rf"^sampling\.{name}: (only|none|no element) .*with this engine, got .+$"):
        admit(asked(effective(name)))


@pytest.mark.parametrize("engine", ENGINES)
def test_value_that_changes_nothing_is_taken(engine: str) -> None:
    """A client that writes every default out is not refused, and gets what one gets that writes none."""
    admit = ENGINES[engine]
    neutral = SamplingParameters(
        seed=7,
        min_p=0,
        presence_penalty=0,
        frequency_penalty=0,
        repetition_penalty=1,
        min_tokens=0,
        include_special_tokens=False,
        lora_adapter="",
        priority=0,
    )
    taken, expected = admit(asked(neutral)), admit(asked(SamplingParameters(seed=7)))
    if isinstance(taken, Request) and isinstance(expected, Request):
        assert replace(taken, key=1) == replace(expected, key=1)
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
        taken = parameters_of(frame.generate, PaddleOptions(), ByteTokenizer(), Request)
    except ValueError as error:
        return "refused", str(error)
    sampling = frame.generate.sampling
    assert (taken.key, taken.top_k) == (frame.generate.request_key, sampling.top_k)
    assert taken.is_seeded == sampling.HasField("seed")
    assert taken.seed == sampling.seed or not taken.is_seeded
    assert 0 < taken.top_p <= 1
    assert 0 <= taken.temperature < math.inf
    assert 1 <= taken.most <= PaddleOptions().context
    return "taken", ""


def test_damaged_request_is_read_and_refused_or_taken() -> None:
    """A request with every parameter and one wrong byte is a ContractError, refused in one line, or taken as it is."""
    full = SamplingParameters(seed=7)
    for name in OFFERED:
        full.MergeFrom(effective(name))
    whole = write_frame(ClientFrame(generate=asked(full)))
    assert _outcome(whole) == ("taken", "")
    outcomes: Counter[str] = Counter()
    for place in range(len(whole)):
        for value in (0, 1, 0x7F, 0x80, 0xFF, *(whole[place] ^ 1 << bit for bit in range(8))):
            outcome, line = _outcome(whole[:place] + bytes([value]) + whole[place + 1 :])
            outcomes[outcome] += 1
            assert outcome != "refused" or re.fullmatch(r"[a-z_.]+(\[\d+\])?: .+, got .+", line), line
            assert "\n" not in line
    assert min(outcomes[each] for each in ("unread", "refused", "taken")) > len(whole) // 4, outcomes


@pytest.mark.parametrize(
    ("sampling", "line"),
    [
        (SamplingParameters(min_p=0.25), "sampling.min_p: only 0 with this engine, got 0.25"),
        (SamplingParameters(presence_penalty=-2), "sampling.presence_penalty: only 0 with this engine, got -2"),
        (SamplingParameters(repetition_penalty=1.5), "sampling.repetition_penalty: only 1 with this engine, got 1.5"),
        (SamplingParameters(priority=-1), "sampling.priority: only 0 with this engine, got -1"),
        (SamplingParameters(bad_words=["a", "b"]), "sampling.bad_words: no element with this engine, got 2"),
        (SamplingParameters(lora_adapter="a\nb"), r"sampling.lora_adapter: none with this engine, got 'a\nb'"),
        (
            SamplingParameters(structured_output={"regex": {"pattern": "a"}}),
            "sampling.structured_output: none with this engine, got regex",
        ),
    ],
)
def test_refusal_is_one_line_with_what_is_taken(sampling: SamplingParameters, line: str) -> None:
    """The line has the field, what the engine takes of it, and what it got."""
    with pytest.raises(ValueError, match=r"^sampling\.") as refused:
        SyntheticEngine().admit(asked(sampling))
    assert str(refused.value) == line


class Words:
    """A tokenizer whose tokens are words."""

    vocabulary_size = 4

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def token_bytes(self, token_id: int) -> bytes:
        """Return one of a few words."""
        return (b"one ", b"stop", b" now", b"!")[token_id]


@pytest.mark.parametrize(
    ("texts", "tokens", "found"),
    [
        (["never", "op n"], [0, 1, 2, 3], (2, 3)),
        (["stop", "to"], [0, 1], (1, 3)),  # the one that ends first
        (["top", "op"], [0, 1], (1, 2)),  # both end at once: the first in order
        (["op", "top"], [0, 1], (1, 2)),
        (["never"], [0, 3, 1], (1, 1)),
        (["never"], [0, 1], (None, 0)),
    ],
)
def test_stop_that_is_met_is_told(texts: list[str], tokens: list[int], found: tuple[int | None, int]) -> None:
    """Of the stops the one that is complete first ends a request: which token completes it, and which one it is."""
    stops = Stops(Words(), texts, [3])
    place, stop, tail = stops.find(tokens)
    assert (place, stop) == found
    assert (stops.take(tokens), stops.tail) == (place, tail)
