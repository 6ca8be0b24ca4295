"""What a request asks for, as vLLM's sampling parameters; and what the engine cannot do, by its name."""

from typing import Any

import pytest

from tokenbus.engines.vllm.parameters import _PARAMETERS, BESIDE, begin_only, sampling_arguments
from tokenbus.engines.vllm.token_scores import ASKED, GIVEN, Asked, given_ids_of
from tokenbus_contracts.generated.request_pb2 import (
    Continuation,
    Generate,
    PromptScoring,
    SamplingParameters,
    TokenScoring,
)


def arguments(generate: Generate, defaults: dict[str, Any] | None = None, **given: bool) -> dict[str, Any]:
    return sampling_arguments(generate, defaults or {}, vocabulary_size=100, top_logprobs=20, **given)


def test_every_field_has_its_place() -> None:
    same: dict[str, Any] = {"max_tokens": 5, "temperature": 0.5, "top_p": 0.25, "top_k": 7, "seed": 11}
    same |= {"stop": ["a", "b"], "stop_token_ids": [3, 4]}
    sampling = SamplingParameters(**same, ignore_end_token=True)
    found = arguments(Generate(request_id=1, sampling=sampling, top_logprobs=2))
    assert found == same | {"ignore_eos": True, "logprobs": 2}
    assert set(SamplingParameters.DESCRIPTOR.fields_by_name) == set(_PARAMETERS) | BESIDE


def test_what_is_left_open_is_the_models_own() -> None:
    defaults = {"temperature": 0.7, "top_k": 20}
    nothing = Generate(request_id=1, sampling=SamplingParameters())
    assert arguments(nothing, defaults) == {"max_tokens": None, **defaults}
    said = Generate(request_id=1, sampling=SamplingParameters(temperature=0, top_k=0), top_logprobs=0)
    assert arguments(said, defaults) == {"max_tokens": None, "temperature": 0, "top_k": 0, "logprobs": 0}


@pytest.mark.parametrize(("seed", "theirs"), [(0, 0), (42, 42), (2**63 - 1, 2**63 - 1), (2**64 - 1, 2**63 - 1)])
def test_seeds_are_signed_there(seed: int, theirs: int) -> None:
    """Any seed is one for vLLM, whose seeds are signed and where -1 means none."""
    asked = Generate(request_id=1, sampling=SamplingParameters(seed=seed))
    assert arguments(asked)["seed"] == theirs


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ({"request_id": 0}, "request_id: at least 1, got 0"),
        ({"top_logprobs": 21}, "top_logprobs: at most 20, got 21"),
        ({"include_draft_logprobs": True}, "include_draft_logprobs: vLLM has no logprobs of "),
        ({"prompt_scoring": {"token_ids": [1]}}, "prompt_scoring.token_ids: none without --token-scores, got 1"),
        ({"sampling": {"stop_token_ids": [1, 100]}}, r"sampling.stop_token_ids\[1\]: below 100, got 100"),
        ({"sampling": {"engine_arguments": "{"}}, "sampling.engine_arguments: JSON, got an error: "),
        ({"sampling": {"engine_arguments": "[1]"}}, "sampling.engine_arguments: a JSON object, got list"),
        *(({"sampling": {"engine_arguments": f'{{"{name}": [1]}}'}}, f"sampling.engine_arguments.{name}: only the worker may set it") for name in (ASKED, GIVEN, "kv_transfer_params")),  # noqa: E501
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused(asked: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=f"^{line}") as raised:
        arguments(Generate(**{"request_id": 1} | asked))
    assert "\n" not in str(raised.value)


def test_field_without_a_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(_PARAMETERS, "top_k")
    asked = Generate(request_id=1, sampling=SamplingParameters(top_k=3))
    with pytest.raises(ValueError, match=r"sampling\.top_k: not supported by the engine vllm"):
        arguments(asked)


@pytest.mark.parametrize(
    ("form", "theirs"),
    [
        ({"json_schema": {"schema": "{}"}}, {"json": "{}"}),
        ({"json_object": {}}, {"json_object": True}),
        ({"regex": {"pattern": "a+"}}, {"regex": "a+"}),
        ({"choice": {"texts": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"grammar": {"text": "root ::= x"}}, {"grammar": "root ::= x"}),
        ({"structural_tag": {"tag": "{}"}}, {"structural_tag": "{}"}),
    ],
)
def test_form_of_an_output(form: dict[str, Any], theirs: dict[str, Any]) -> None:
    sampling = SamplingParameters(structured_output=form)
    assert arguments(Generate(request_id=1, sampling=sampling))["structured_outputs"] == theirs


def test_what_extensions_take_is_passed_on() -> None:
    sampling = SamplingParameters(engine_arguments='{"a": "b", "c": [1, 0.5, true], "d": {}}')
    with pytest.raises(
        ValueError, match=r"^sampling\.engine_arguments\.d: a text, a number or a list of these, got dict$"
    ):
        arguments(Generate(request_id=1, sampling=sampling))
    sampling.engine_arguments = '{"a": "b", "c": [1, 0.5, true]}'
    assert arguments(Generate(request_id=1, sampling=sampling))["extra_args"] == {"a": "b", "c": [1, 0.5, True]}


def test_what_our_sampler_is_asked_for_is_beside_it() -> None:
    asked = Generate(
        request_id=1,
        sampling=SamplingParameters(engine_arguments='{"a": "b"}'),
        top_logprobs=0,
        token_scoring=TokenScoring(other_logprobs=True, mask_bound=8, token_ids=[3, 1]),
        prompt_scoring=PromptScoring(token_ids=[5]),
    )
    extra = arguments(asked, has_token_scores=True)["extra_args"]
    assert extra.keys() == {"a", ASKED, GIVEN}
    assert Asked.of(extra) == Asked(other_logprobs=True, mask_bound=8, token_ids=(3, 1))
    assert given_ids_of(extra) == [5]
    assert Asked.of(None) == Asked.of({"a": "b"}) == Asked()
    assert given_ids_of(None) == ()


def test_connector_is_told_what_to_do_with_the_cache() -> None:
    """A prefill worker keeps it, and a decode worker is told where it is, if the prefill worker said so."""
    given = arguments(Generate(request_id=1, sampling=SamplingParameters(min_tokens=3)))
    assert begin_only(given)
    assert (given["max_tokens"], given["min_tokens"]) == (1, 1)
    assert given["extra_args"] == {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
    assert not begin_only(arguments(Generate(request_id=1, sampling=SamplingParameters(max_tokens=1))))
    asked = Generate(request_id=1, continuation=Continuation(token_ids=[4], transfer_state=b'{"a": [1]}'))
    assert arguments(asked)["extra_args"] == {"kv_transfer_params": {"a": [1]}}
    asked.continuation.transfer_state = b"a"
    with pytest.raises(ValueError, match=r"^continuation\.transfer_state: JSON, got an error: "):
        arguments(asked)
