"""Bodies of requests: what is accepted, what the bus gets of it, and what the OpenAPI document says of them."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema_rs import Draft202012Validator

from tests.gateway.reading import SMALL, VALID, read, reading
from tests.in_process.builders import settings
from tokenbus.gateway.bodies import Chat, Completion, Detokenization, Inspection, Tokenization
from tokenbus.gateway.completion_request import DEFAULT_MODEL, Reader
from tokenbus.gateway.errors import ApiError
from tokenbus.gateway.generate_body import Generate
from tokenbus.gateway.messages_body import Messages, TokenCount
from tokenbus.gateway.openapi import document
from tokenbus.gateway.output_form import structured_output
from tokenbus.gateway.request_body import RequestTypes, _biases_up_to
from tokenbus.gateway.responses_body import Responses
from tokenbus.gateway.validation import parse_json
from tokenbus.gateway.vocabulary import vocabulary_of
from tokenbus_contracts.generated.client_pb2 import WorkerStatus
from tokenbus_contracts.generated.request_pb2 import PromptScoring, SamplingParameters, TokenBias

READER = reading("numbers")
TYPES = RequestTypes(settings(SMALL))
COMPLETION = VALID["completion"]
TYPE_OF: dict[str, type[Any]] = {
    "completion": Completion, "chat": Chat, "messages": Messages, "token_count": TokenCount, "responses": Responses,
    "generation": Generate, "inspection": Inspection, "tokenization": Tokenization, "detokenization": Detokenization,
}  # fmt: skip
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 11)
    | st.sampled_from([0.0, 0.5, 1.0, 1.5, 3.0, 2**31, 2**63, -(2**64), 1e300])
    | st.text("ab\u00e9", max_size=4)
    | st.sampled_from(["", "user", "text", "x" * 65]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["a", "role", "content", "type", "text", "include_usage"]), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = [(route, name) for route, kind in TYPE_OF.items() for name in (*kind.__struct_fields__, "unknown")]


@given(st.sampled_from(FIELDS), JSON)
def test_what_is_accepted_is_what_the_schema_says(field: tuple[str, str], value: Any) -> None:  # noqa: ANN401 - JSON
    route, name = field
    kind, body = TYPE_OF[route], VALID[route] | {name: value}
    is_left_out = name == "unknown" and value is None
    if is_left_out or Draft202012Validator(msgspec.json.schema(TYPES.bounded[kind])).is_valid(body):
        TYPES.read(kind, body)
    else:
        with pytest.raises(ApiError):
            TYPES.read(kind, body)


def test_schemas_of_the_document_are_schemas() -> None:
    schemas = document(TYPES)["components"]["schemas"]
    assert {"Completion", "Chat", "Inspection", "Error", "Models", "CompletionAnswer", "ChatAnswer"} <= schemas.keys()
    for name in schemas:
        Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": {"schemas": schemas}})


TAG = "structural_tag"
OUTPUTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"json": {"type": "array"}}, {"json_schema": {"schema": '{"type":"array"}'}}),
    ({"json": '{"type": "array"}'}, {"json_schema": {"schema": '{"type": "array"}'}}),
    ({"json_object": True}, {"json_object": {}}),
    ({"regex": "[a-z]"}, {"regex": {"pattern": "[a-z]"}}),
    ({"choice": ["a", "b"]}, {"choice": {"texts": ["a", "b"]}}),
    ({"grammar": "root ::= a"}, {"grammar": {"text": "root ::= a"}}),
    ({TAG: '{"a": 1}'}, {TAG: {"tag": '{"a": 1}'}}),
    ({TAG: {"a": 1}}, {TAG: {"tag": '{"a":1}'}}),
]
FORMATS: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
    ({"type": TAG, "format": {"a": 1}}, {TAG: {"tag": '{"type":"structural_tag","format":{"a":1}}'}}),
    ({"type": TAG, "structures": [], "triggers": []}, {TAG: {"tag": '{"type":"structural_tag","structures":[],"triggers":[]}'}}),  # noqa: E501
    ({"type": "text"}, None),
    ({"type": "json_object"}, {"json_object": {}}),
    ({"type": "json_schema", "json_schema": {"name": "n", "schema": {"a": 1}, "strict": True}}, {"json_schema": {"schema": '{"a":1}'}}),  # noqa: E501
]  # fmt: skip
FORMS = [
    *(({"structured_outputs": wanted}, form) for wanted, form in OUTPUTS),
    *(({"response_format": wanted}, form) for wanted, form in FORMATS),
    ({"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}}, {"regex": {"pattern": "a"}}),
]


@pytest.mark.parametrize("route", ["completion", "chat"])
@pytest.mark.parametrize(("fields", "form"), FORMS)
def test_form_of_an_answer_is_the_contracts(route: str, fields: dict[str, Any], form: dict[str, Any] | None) -> None:
    assert structured_output(TYPES.read(TYPE_OF[route], VALID[route] | fields)) == form


@pytest.mark.parametrize("route", ["completion", "chat"])
def test_every_sampling_parameter_reaches_the_bus(route: str) -> None:
    same: dict[str, Any] = {
        "max_tokens": 5, "temperature": 0.5, "top_p": 0.75, "top_k": 40, "seed": 0, "stop_token_ids": [1],
        "min_p": 0.25, "presence_penalty": -2, "frequency_penalty": 0.5, "repetition_penalty": 1.5, "min_tokens": 2,
        "bad_words": ["b"], "allowed_token_ids": [3, 0], "priority": -7, "cache_salt": "salt",
    }  # fmt: skip
    others = {
        "stop": "a", "ignore_eos": True, "logit_bias": {"5": -100, "0": 1.5}, "include_stop_str_in_output": True,
        "skip_special_tokens": False, "structured_outputs": {"regex": "a"}, "vllm_xargs": {"a": 1, "b": ["c", 0.5]},
    }  # fmt: skip
    sampling = read(READER, route, **same, **others).generate(0).sampling
    assert sampling == SamplingParameters(
        **same,
        stop=["a"],
        ignore_end_token=True,
        logit_bias=[TokenBias(token_id=5, bias=-100), TokenBias(token_id=0, bias=1.5)],
        include_stop_string=True,
        include_special_tokens=True,
        structured_output={"regex": {"pattern": "a"}},
        engine_arguments='{"a":1,"b":["c",0.5]}',
    )
    names = {field.name for field in SamplingParameters.DESCRIPTOR.fields}
    assert names - {field.name for field, _ in sampling.ListFields()} == NOT_IN_THE_API
    plain = read(READER, route).generate(0).sampling
    assert {field.name for field, _ in plain.ListFields()} <= {"max_tokens"}


NOT_IN_THE_API = {
    "lora_adapter",  # in OpenAI's and vLLM's API the model's name says it
}


def test_adapter_is_asked_for_as_a_model() -> None:
    reader = Reader(settings(), vocabulary_of("bytes"))
    reader.learn_models(
        [
            WorkerStatus(model="m", lora_adapters=["ada", "n"], max_model_tokens=90),
            WorkerStatus(model="n", lora_adapters=["bob"], max_model_tokens=70),
            WorkerStatus(lora_adapters=["eve"]),
        ]
    )
    assert reader.models == {"m": 90, "n": 70, "tokenbus": 0, "ada": 90, "bob": 70, "eve": 0}
    assert reader.parents == {"ada": "m", "bob": "n", "eve": "tokenbus"}
    for named, model, adapter in (("ada", "m", "ada"), ("n", "n", ""), ("eve", "", "eve"), ("tokenbus", "", "")):
        for route in ("completion", "chat"):
            generate = read(reader, route, model=named).generate(0)
            assert (generate.model, generate.sampling.lora_adapter) == (model, adapter)


def test_adapters_are_those_of_the_models_that_may_be_named() -> None:
    reader = Reader(settings({"gateway.models": "n"}), vocabulary_of("bytes"))
    reader.learn_models([WorkerStatus(model="m", lora_adapters=["x"]), WorkerStatus(model="n", lora_adapters=["y"])])
    assert reader.models.keys() == {"n", "y"}
    with pytest.raises(ApiError, match="model: one of n, y, got 'x'"):
        reader.completion(COMPLETION | {"model": "x"})


def test_zero_is_said_and_minus_one_is_all() -> None:
    """A penalty of 0 is sent, as the worker may have another default; a top_k of -1 is vLLM's word for all."""
    sampling = read(READER, "completion", presence_penalty=0, min_p=0.0, top_k=-1).generate(0).sampling
    assert sampling.HasField("presence_penalty")
    assert sampling.HasField("min_p")
    assert not sampling.HasField("frequency_penalty")
    assert sampling.top_k == 0


def test_choices_of_each_prompt_begin_with_the_seed() -> None:
    request = read(READER, "completion", prompt=["a", "b"], n=3, seed=-1)
    seeds = [request.generate(index).sampling.seed for index in range(request.choices)]
    assert seeds == [2**64 - 1, 0, 1] * 2


@pytest.mark.parametrize(
    ("route", "field"), [("completion", "max_tokens"), ("chat", "max_tokens"), ("chat", "max_completion_tokens")]
)
def test_answer_may_fill_the_context(route: str, field: str) -> None:
    reader = reading(context=9)
    reader.learn_models([WorkerStatus(model="m", max_model_tokens=9), WorkerStatus(model="unknown")])
    assert read(reader, route, **{field: 9}).sampling["max_tokens"] == 9
    assert read(reader, route, model="unknown", **{field: 10}).sampling["max_tokens"] == 10


def test_body_that_is_no_object_has_no_field_to_name() -> None:
    with pytest.raises(ApiError) as raised:
        TYPES.read(Chat, [1])
    assert (raised.value.message, raised.value.param) == ("the body: expected object, got [1]", None)


def test_null_stands_for_a_field_that_is_left_out() -> None:
    nulls = dict.fromkeys({*TYPES.bounded[Completion].__struct_fields__, "any", "functions"} - COMPLETION.keys())
    assert TYPES.read(Completion, COMPLETION | nulls) == TYPES.read(Completion, COMPLETION)
    assert (TYPES.read(Completion, COMPLETION).n, TYPES.read(Completion, COMPLETION).max_tokens) == (1, 16)


OF_ROUTERS: dict[str, Any] = {
    "no_stop_trim": False, "ignore_eos": False, "skip_special_tokens": True, "separate_reasoning": True,
    "stream_reasoning": True, "return_hidden_states": False, "continue_final_message": False,
}  # fmt: skip
"""What smg, sglang-router and vllm-router add to a body."""
OF_CLIENTS: dict[str, Any] = {
    "user": "u", "metadata": {"a": "b"}, "prompt_cache_key": "k", "safety_identifier": "s", "store": True,
    "verbosity": "low", "use_beam_search": False, "length_penalty": 2.0, "logprob_start_len": False,
    "stream_options": {"include_obfuscation": True},
}  # fmt: skip
"""What OpenAI's and other clients send, and what it is ignored as."""


@pytest.mark.parametrize("route", ["completion", "chat"])
def test_unknown_fields_change_nothing(route: str) -> None:
    """They are named by their paths, but for null, which stands for a field that is left out."""
    extra = OF_ROUTERS | OF_CLIENTS | {"stream": True, "any_other": 1, "nothing": None}
    assert read(READER, route, **extra) == read(READER, route, stream=True)
    read(READER, route, **extra)
    known = {"ignore_eos", "skip_special_tokens", "stream", "nothing", "stream_options"}
    known |= {"continue_final_message"} if route == "chat" else set()
    assert set(READER.types.ignored) == extra.keys() - known | {"stream_options.include_obfuscation"}
    read(READER, route)
    assert READER.types.ignored == []


def test_unknown_fields_of_a_conversation_have_one_name() -> None:
    calls = [{"id": "1", "function": {"name": "f", "arguments": "{}", "parsed_arguments": {}}, "index": 0}] * 2
    read(READER, "chat", messages=[{"role": "assistant", "tool_calls": calls, "a\nb": 1}, {"role": "user"}] * 3)
    names = ["messages.a\\nb", "messages.tool_calls.index", "messages.tool_calls.function.parsed_arguments"]
    assert sorted(READER.types.ignored) == sorted(names)


OTHERS_NAMES = (
    *("return_prompt_token_ids", "truncation", "input_ids", "rid", "sampling_seed", "ignore_eos_token"),
    *("stop_sequences", "stop_reason", "stream_interval", "top_a", "typical_p", "tfs", "prompt_cache_retention"),
    *("service_tier", "prediction", "audio_config", "max_tool_calls", "reasoning", "thinking", "session_id"),
    *("include_reasoning", "mm_processor_kwargs", "media_io_kwargs", "return_token_offsets", "mm_payload", "model_id"),
    *("routed_experts_prompt_start", "spaces_between_special_tokens", "extra_key", "data_parallel_rank", "timeout"),
)
"""Names that other servers have for other things, which none of ours is mistaken for."""


@pytest.mark.parametrize("route", ["completion", "chat"])
def test_request_says_whether_it_goes_on_elsewhere(route: str) -> None:
    for asked, policy in (
        (None, 0),
        ({}, 0),
        ({"continue": None}, 0),
        ({"continue": "any"}, 0),
        ({"continue": "off"}, 1),
        ({"continue": "same_weights"}, 2),
    ):
        assert read(READER, route, **VALID[route], tokenbus=asked).generate(0).continuation_policy == policy
    with pytest.raises(ApiError, match=r"tokenbus.continue: .*never"):
        read(READER, route, **VALID[route], tokenbus={"continue": "never"})


@pytest.mark.parametrize("route", ["completion", "chat", "messages", "responses", "generation", "tokenization"])
def test_names_of_others_are_no_mistakes(route: str) -> None:
    fields = dict.fromkeys(OTHERS_NAMES, 1)
    for name in TYPE_OF[route].__struct_fields__:
        fields.pop(name, None)
    read(READER, route, **fields)
    assert READER.types.ignored == list(fields)


def test_invocation_is_a_chat_or_a_completion() -> None:
    assert READER.invocation(VALID["chat"]) == READER.chat(VALID["chat"])
    assert READER.invocation(COMPLETION) == READER.completion(COMPLETION)


@pytest.mark.parametrize(
    ("fields", "scoring", "echoes"),
    [
        ({"echo": True}, None, ["ab"]),
        ({"echo": True, "logprobs": 3}, {"top_logprobs": 3}, ["ab"]),
        ({"echo": True, "logprobs": 3, "prompt_logprobs": 5}, {"top_logprobs": 5}, ["ab"]),
        ({"echo": True, "max_tokens": 0}, {"without_generation": True}, ["ab"]),
        ({"prompt_logprobs": 0, "max_tokens": 0}, {"top_logprobs": 0, "without_generation": True}, []),
        ({"prompt_logprob_token_ids": [7, 7]}, {"token_ids": [7, 7]}, []),
    ],
)
def test_scores_of_prompts_are_asked_for(fields: dict[str, Any], scoring: Any, echoes: list[str]) -> None:  # noqa: ANN401
    for given_prompt in ("ab", [97, 98]):
        request = READER.completion({"prompt": given_prompt, **fields})
        generate = request.generate(0)
        wanted = PromptScoring(**scoring) if scoring is not None else PromptScoring()
        assert (generate.HasField("prompt_scoring"), generate.prompt_scoring) == (scoring is not None, wanted)
        assert generate.sampling.HasField("max_tokens") == ("max_tokens" not in fields)
        assert len(request.echoes) == len(echoes)
    assert READER.completion({"prompt": "ab", **fields}).echoes == (echoes or ())


def test_bias_beyond_the_bound_is_taken_for_the_bound() -> None:
    biases = {"5": 1e9, "6": -101, "7": 99}
    assert TYPES.read(Completion, COMPLETION | {"logit_bias": biases}).logit_bias == {5: 100, 6: -100, 7: 99}


@given(st.integers(0, 2_500), st.sampled_from([0, 9, 10, 405, 999, 2_039]))
def test_schema_of_biases_knows_the_largest_token(token_id: int, most: int) -> None:
    assert Draft202012Validator(_biases_up_to(most)).is_valid({str(token_id): 1}) == (token_id <= most)


def test_first_model_is_meant_where_none_is_named() -> None:
    reader = Reader(settings(), vocabulary_of("bytes"))
    assert reader.completion({"prompt": "a"}).model == DEFAULT_MODEL
    reader.learn_models([WorkerStatus(model="b"), WorkerStatus(model="a", lora_adapters=["A"])])
    assert reader.completion({"prompt": "a"}).generate(0).model == "a"


@pytest.mark.parametrize(("route", "field"), [("completion", "prompt"), ("chat", "messages")])
def test_prompt_that_is_too_long_has_the_code_that_clients_know(route: str, field: str) -> None:
    reader = reading("numbers", context=9)

    def prompt(size: int) -> dict[str, Any]:
        return {field: "a" * size if field == "prompt" else [{"role": "user", "content": "a" * size}]}

    assert read(reader, route, max_tokens=2, **prompt(8)).prompts == [[97] * 8]
    with pytest.raises(ApiError) as raised:
        read(reader, route, max_tokens=2, **prompt(9))
    error = raised.value
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", field)
    most = "this model's maximum context length is 9 tokens, one of them for the answer"
    assert error.message == f"{field}: {most}; got 9 tokens"


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, b"efg"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, b"efg"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, b"abc"),
        ({"truncate_prompt_tokens": 7}, b"abcdefg"),
        ({"truncate_prompt_tokens": -1}, b"cdefg"),
    ],
)
def test_long_prompt_is_cut_where_that_is_asked_for(fields: dict[str, Any], kept: bytes) -> None:
    reader = reading("numbers", context=9 if len(kept) > 5 else 6)
    for given_prompt in ("abcdefg", list(b"abcdefg")):
        body = {"prompt": given_prompt, "max_tokens": 1, **fields}
        assert reader.completion(body).prompts == [list(kept)]
    chat = {"messages": [{"role": "user", "content": "abcdefg"}], **fields}
    assert reader.chat(chat).prompts == [list(kept)]


def test_whole_numbers_may_be_written_with_a_point() -> None:
    assert TYPES.read(Completion, {"model": "m", "prompt": [[1.0, 2]], "n": 2.0}).prompt == [[1, 2]]


NESTED = (
    ("completion", "logit_bias"),
    ("completion", "no_such_field"),
    ("completion", "structured_outputs.json"),
    ("chat", "chat_template_kwargs.x"),
    ("chat", "response_format.json_schema.schema.x"),
    ("chat", "tools.function.parameters.x"),
    ("chat", "messages"),
    ("inspection", "seed"),
    ("tokenization", "documents"),
    ("detokenization", "tokens"),
)


@pytest.mark.parametrize(("route", "place"), NESTED)
def test_body_nested_too_deep_is_refused_with_its_depth(route: str, place: str) -> None:
    names = place.split(".")
    body = {name: value for name, value in VALID[route].items() if name != names[0]}
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        for depth in (200, 1000, 1025, 5_000):
            inner = opening * depth + "1" + closing * depth
            for name in reversed(names):
                inner = f'{{"{name}":{inner}}}'
            data = json.dumps(body)[:-1] + ("," if body else "") + inner[1:]
            with pytest.raises(ApiError) as raised:
                getattr(READER, route)(parse_json(data.encode()))
            beginning, _, deep = raised.value.message.rpartition(" ")
            assert beginning.endswith(": nested at most 128 deep, got")
            assert depth <= int(deep) <= depth + len(names)
            if depth <= 1000:  # what is nested deeper is not parsed at all
                assert raised.value.param == names[0]


def test_texts_that_are_json_are_not_nested_too_deep_either() -> None:
    """A schema that is sent as a text has the same bound; arguments of a call that are no JSON object are none."""
    deep = '{"a":' * 1000 + "1" + "}" * 1000
    with pytest.raises(ApiError, match=r"structured_outputs\.json: nested at most 128 deep, got 1000"):
        READER.completion({"prompt": "a", "structured_outputs": {"json": deep}})
    calls = [{"function": {"name": "f", "arguments": deep}}]
    called = {"role": "assistant", "content": "a", "tool_calls": calls}
    assert READER.tokenization({"messages": [called]})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 100, "allowed_token_ids": [*range(6000)]}, "allowed_token_ids: at most 2097152 bytes of all choices together, got 2400000 of 100"),  # noqa: E501
        ({"n": 100, "logit_bias": {str(each): 1 for each in range(1024)}}, "logit_bias: at most 2097152 bytes of all choices together, got 6553600 of 100"),  # noqa: E501
        ({"n": 100, "structured_outputs": {"grammar": "a" * 30_000}}, "structured_outputs: at most 2097152 bytes of all choices together, got 3009600 of 100"),  # noqa: E501
        ({"prompt": [1] * 5000, "prompt_logprob_token_ids": [*range(256)]}, "prompt_logprob_token_ids: at most 1048576 logprobs of all choices' prompts together, got 1285000"),  # noqa: E501
        ({"prompt": [1] * 5000, "n": 10, "prompt_logprobs": 20}, "prompt_logprobs: at most 1048576 logprobs of all choices' prompts together, got 1050000 of 50000 tokens"),  # noqa: E501
        ({"prompt": [[1] * 5000] * 40, "echo": True, "logprobs": 20}, "echo: at most 4194304 logprobs of all choices' prompts together, got 4200000 of 200000 tokens"),  # noqa: E501
    ],
)  # fmt: skip
def test_work_of_all_choices_together_is_bounded(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError) as refused:
        READER.completion({"prompt": "a", **fields})
    assert refused.value.status == 400
    assert refused.value.message.startswith(message)


def test_choices_have_the_same_requests_but_for_their_seeds() -> None:
    request = READER.completion({"prompt": ["a", "b"], "n": 3, "seed": 5, "allowed_token_ids": [1, 2], "logprobs": 1})
    assert [*request.generates()] == [request.generate(index) for index in range(6)]


def test_prompt_is_scored_once_where_the_answer_has_its_scores_once() -> None:
    """Each choice of a completion has them; and one that generates nothing does nothing else."""
    wanted = {"n": 3, "prompt_logprobs": 2}
    nothing = wanted | {"max_tokens": 0}
    for request, scored in (
        (READER.chat({"messages": [{"role": "user", "content": "ab"}], **wanted}), 1),
        (READER.generation({"token_ids": [1, 2], "sampling_params": wanted}), 1),
        (READER.generation({"token_ids": [1, 2], "sampling_params": nothing}), 3),
        (READER.completion({"prompt": "ab", **wanted}), 3),
    ):
        generates = [*request.generates()]
        assert [each.HasField("prompt_scoring") for each in generates] == [True] * scored + [False] * (3 - scored)
        assert request.scored_values == 3 * scored * len(request.prompts[0])
