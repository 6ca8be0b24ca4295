"""Bodies of requests: what is accepted, how a refusal is worded, and what the OpenAPI document says of them."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema_rs import Draft202012Validator

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

SMALL = {"max_tokens": 5, "max_prompt_tokens": 3, "max_choices": 2}
TYPES = RequestTypes(settings({f"gateway.{name}": value for name, value in SMALL.items()}))
COMPLETION = {"model": "m", "prompt": "a"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
TOOL: dict[str, Any] = {"function": {"name": "f"}}
VALID: dict[str, tuple[Any, dict[str, Any]]] = {
    "completion": (Completion, COMPLETION),
    "chat": (Chat, CHAT),
    "messages": (Messages, CHAT | {"max_tokens": 1}),
    "token_count": (TokenCount, CHAT),
    "responses": (Responses, {"input": "a"}),
    "generation": (Generate, {"token_ids": [1], "sampling_params": {}}),
    "inspection": (Inspection, {"prompt": "a"}),
    "tokenization": (Tokenization, {"prompt": "a"}),
    "detokenization": (Detokenization, {"tokens": [1]}),
}
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
FIELDS = [
    (route, name) for route, (kind, _) in VALID.items() for name in (*kind.__struct_fields__, "unknown")
]  # fmt: skip


@given(st.sampled_from(FIELDS), JSON)
def test_what_is_accepted_is_what_the_schema_says(field: tuple[str, str], value: Any) -> None:  # noqa: ANN401 - JSON
    """A field's value is refused if and only if the type's JSON Schema refuses it."""
    route, name = field
    kind, valid = VALID[route]
    body = valid | {name: value}
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


@pytest.mark.parametrize(
    ("route", "fields", "line"),
    [
        ("completion", {"n": 6}, "n: expected int <= 2, got 6"),
        ("completion", {"n": True}, "n: expected int | null, got True"),
        ("completion", {"seed": 2**64}, "seed: expected int <= 9223372036854775807, got 18446744073709551616"),
        ("completion", {"top_p": 0}, "top_p: expected float > 0.0, got 0"),
        ("completion", {"stop": ""}, "stop: expected str of length >= 1, got a length of 0"),
        ("completion", {"stop": ["a", ""]}, "stop[1]: expected str of length >= 1, got a length of 0"),
        ("completion", {"stop": 5}, "stop: expected str | array | null, got 5"),
        ("completion", {"min_tokens": 6}, "min_tokens: expected int <= 5, got 6"),
        ("completion", {"stop_token_ids": [-1]}, "stop_token_ids[0]: expected int >= 0, got -1"),
        ("completion", {"logit_bias": [1]}, "logit_bias: expected object | null, got [1]"),
        ("completion", {"logit_bias": {"a": 1}}, "logit_bias: expected token ids in digits, got 'a'"),
        ("completion", {"logit_bias": {"9999999999": 1}}, "logit_bias: expected int <= 2147483646, got 9999999999"),
        ("completion", {"logit_bias": {"7": "a"}}, "logit_bias.7: expected float, got 'a'"),
        (
            "completion",
            {"logit_bias": {str(each): 0 for each in range(1025)}},
            "logit_bias: expected object of length <= 1024, got a length of 1025",
        ),
        (
            "chat",
            {"response_format": {"type": "xml"}},
            "response_format.type: one of 'text', 'json_object', 'json_schema', 'structural_tag', got 'xml'",
        ),
        ("completion", {"prompt": [1, -1]}, "prompt[1]: expected int >= 0, got -1"),
        ("completion", {"prompt": [1, 2, 3, 4]}, "prompt: expected array of length <= 3, got a length of 4"),
        ("completion", {"prompt": [[1], [2, -10]]}, "prompt[1][1]: expected int >= 0, got -10"),
        ("completion", {"prompt": ["a", ""]}, "prompt[1]: expected str of length >= 1, got a length of 0"),
        ("completion", {"prompt": ["a", "b", "c"]}, "prompt: expected array of length <= 2, got a length of 3"),
        ("completion", {"b": 1}, "b: no such field, got 1"),
        ("completion", {"b - at `$.n`": 1}, "b - at `$.n`: no such field, got 1"),
        ("completion", {"stop": "\u00e9" * 2049}, "stop: at most 4096 bytes, got 4098"),
        ("completion", {"bad_words": ["a", "\u00e9" * 129]}, "bad_words[1]: at most 256 bytes, got 258"),
        ("completion", {"vllm_xargs": {"a": [None]}}, "vllm_xargs: expected int | float | str, got {'a': [None]}"),
        ("completion", {"prompt_logprobs": 21}, "prompt_logprobs: expected int <= 20, got 21"),
        (
            "completion",
            {"prompt_logprob_token_ids": []},
            "prompt_logprob_token_ids: expected array of length >= 1, got a length of 0",
        ),
        ("completion", {"length_penalty": 2}, "length_penalty: only 1, got 2"),
        ("completion", {"use_beam_search": True}, "use_beam_search: only False, got True"),
        ("chat", {"modalities": ["text", "audio"]}, "modalities: only ['text'], got ['text', 'audio']"),
        ("chat", {"truncation_side": "middle"}, "truncation_side: one of 'left', 'right', got 'middle'"),
        ("chat", {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens: expected int >= -1, got -2"),
        ("chat", {"functions": []}, "functions: no such field, got []"),
        ("completion", {"stream_options": {"x": 1}}, "stream_options.x: no such field, got 1"),
        ("completion", {"prompt": None}, "prompt: required, got nothing"),
        (
            "chat",
            {"messages": [{"role": "king", "content": "a"}]},
            "messages[0].role: one of 'system', 'developer', 'user', 'assistant', 'tool', got 'king'",
        ),
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text: required, got nothing",
        ),
        ("chat", {"tools": [{"function": {}}]}, "tools[0].function.name: required, got nothing"),
        ("chat", {"tools": [TOOL | {"type": "custom"}]}, "tools[0].type: one of 'function', got 'custom'"),
        ("chat", {"tools": [TOOL] * 129}, "tools: expected array of length <= 128, got a length of 129"),
        ("chat", {"tool_choice": "some"}, "tool_choice: one of 'none', 'auto', 'required', got 'some'"),
        ("chat", {"tool_choice": {"function": {}}}, "tool_choice.function.name: required, got nothing"),
        ("messages", {"max_tokens": None}, "max_tokens: required, got nothing"),
        ("messages", {"max_tokens": 6}, "max_tokens: expected int <= 5, got 6"),
        (
            "messages",
            {"messages": [{"role": "tool", "content": "a"}]},
            "messages[0].role: one of 'user', 'assistant', 'system', got 'tool'",
        ),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0].type: one of 'text', 'tool_use', 'tool_result', 'thinking', 'redacted_thinking', got 'image'",  # noqa: E501
        ),
        ("messages", {"tools": [{"name": "f"}]}, "tools[0].input_schema: required, got nothing"),
        (
            "messages",
            {"tool_choice": {"type": "some"}},
            "tool_choice.type: one of 'auto', 'any', 'tool', 'none', got 'some'",
        ),
        ("messages", {"thinking": {"type": "x"}}, "thinking.type: one of 'enabled', 'disabled', 'adaptive', got 'x'"),
        ("messages", {"container": "c"}, "container: no such field, got 'c'"),
        ("token_count", {"max_tokens": 1}, "max_tokens: no such field, got 1"),
        ("responses", {"max_output_tokens": 6}, "max_output_tokens: expected int <= 5, got 6"),
        ("responses", {"background": True}, "background: only False, got True"),
        ("responses", {"previous_response_id": "r"}, "previous_response_id: expected null, got 'r'"),
        ("responses", {"conversation": "c"}, "conversation: expected null, got 'c'"),
        ("responses", {"input": []}, "input: expected array of length >= 1, got a length of 0"),
        (
            "responses",
            {"input": [{"type": "item_reference", "id": "a"}]},
            "input[0].type: one of 'message', 'function_call', 'function_call_output', 'reasoning', got 'item_reference'",  # noqa: E501
        ),
        ("responses", {"tools": [{"type": "web_search"}]}, "tools[0].type: one of 'function', got 'web_search'"),
        (
            "responses",
            {"input": [{"type": "message", "role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type: one of 'input_text', 'output_text', 'reasoning_text', got 'input_image'",
        ),
        (
            "responses",
            {"text": {"format": {"type": "x"}}},
            "text.format.type: one of 'text', 'json_object', 'json_schema', got 'x'",
        ),
        ("tokenization", {"chat_template_kwargs": 1}, "chat_template_kwargs: expected object | null, got 1"),
        ("chat", {"documents": [{"title": 1}]}, "documents[0]: expected str, got {'title': 1}"),
        (
            "chat",
            {"messages": [{"role": "user", "content": "a", "audio": 1}]},
            "messages[0].audio: expected null, got 1",
        ),
    ],
)
def test_refusals_name_the_field_the_limit_and_the_value(route: str, fields: dict[str, Any], line: str) -> None:
    kind, valid = VALID[route]
    with pytest.raises(ApiError) as raised:
        TYPES.read(kind, valid | fields)
    assert raised.value.message == line
    assert raised.value.param == line.partition(": ")[0]


FORMS = [
    ({"structured_outputs": {"json": {"type": "array"}}}, {"json_schema": {"schema": '{"type":"array"}'}}),
    ({"structured_outputs": {"json": '{"type": "array"}'}}, {"json_schema": {"schema": '{"type": "array"}'}}),
    ({"structured_outputs": {"json_object": True}}, {"json_object": {}}),
    ({"structured_outputs": {"regex": "[a-z]"}}, {"regex": {"pattern": "[a-z]"}}),
    ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": {"texts": ["a", "b"]}}),
    ({"structured_outputs": {"grammar": "root ::= a"}}, {"grammar": {"text": "root ::= a"}}),
    ({"structured_outputs": {"structural_tag": '{"a": 1}'}}, {"structural_tag": {"tag": '{"a": 1}'}}),
    ({"structured_outputs": {"structural_tag": {"a": 1}}}, {"structural_tag": {"tag": '{"a":1}'}}),
    (
        {"response_format": {"type": "structural_tag", "format": {"a": 1}}},
        {"structural_tag": {"tag": '{"type":"structural_tag","format":{"a":1}}'}},
    ),
    (
        {"response_format": {"type": "structural_tag", "structures": [], "triggers": ["a"]}},
        {"structural_tag": {"tag": '{"type":"structural_tag","structures":[],"triggers":["a"]}'}},
    ),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}}, {"regex": {"pattern": "a"}}),
    ({"response_format": {"type": "json_object"}}, {"json_object": {}}),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"a": 1}, "strict": True}}},
        {"json_schema": {"schema": '{"a":1}'}},
    ),
]


@pytest.mark.parametrize("route", ["completion", "chat"])
@pytest.mark.parametrize(("fields", "form"), FORMS)
def test_form_of_an_answer_is_the_contracts(route: str, fields: dict[str, Any], form: dict[str, Any] | None) -> None:
    kind, valid = VALID[route]
    assert structured_output(TYPES.read(kind, valid | fields)) == form


NAMES = "json, json_object, regex, choice, grammar, structural_tag"
PARTS = "a structural_tag has a format, or structures and triggers"
DEEP: dict[str, Any] = {}
for _ in range(300):
    DEEP = {"items": DEEP}


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"structured_outputs": {}}, f"structured_outputs: one of {NAMES}, got none"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            f"structured_outputs: one of {NAMES}, got regex, choice",
        ),
        (
            {"structured_outputs": {"json_object": False}},
            f"structured_outputs: one of {NAMES}, got json_object: False",
        ),
        ({"response_format": {"type": "structural_tag"}}, f"response_format: {PARTS}, got neither"),
        ({"response_format": {"type": "structural_tag", "triggers": ["a"]}}, f"response_format: {PARTS}, got triggers"),
        (
            {"response_format": {"type": "text", "format": {}}},
            "response_format.format: only where the type is structural_tag, got it with text",
        ),
        (
            {"structured_outputs": {"json": "{"}},
            "structured_outputs.json: JSON, got an error: unexpected end of data: line 1 column 2 (char 1)",
        ),
        (
            {"structured_outputs": {"json": {"const": "x" * 300_000}}},
            "structured_outputs.json: at most 262144 bytes, got 300012",
        ),
        (
            {"structured_outputs": {"json": DEEP}},
            "structured_outputs: nested at most 128 deep, got 302",
        ),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "response_format: none beside structured_outputs, got json_object",
        ),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema: required where the type is json_schema, got nothing",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema: required where the type is json_schema, got nothing",
        ),
        (
            {"response_format": {"type": "json_object", "json_schema": {"name": "n"}}},
            "response_format.json_schema: only where the type is json_schema, got it with json_object",
        ),
        (
            {"response_format": {"type": "text", "json_schema": {"name": "n"}}},
            "response_format.json_schema: only where the type is json_schema, got it with text",
        ),
    ],
)
def test_wrong_form_is_refused_in_one_line(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(ApiError) as raised:
        structured_output(TYPES.read(Completion, COMPLETION | fields))
    assert (raised.value.message, raised.value.param) == (line, line.partition(": ")[0])


@pytest.mark.parametrize("route", ["completion", "chat"])
def test_every_sampling_parameter_reaches_the_bus(route: str) -> None:
    fields: dict[str, Any] = {
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 40,
        "seed": 0,
        "stop": "a",
        "stop_token_ids": [1],
        "ignore_eos": True,
        "min_p": 0.25,
        "presence_penalty": -2,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {"5": -100, "0": 1.5},
        "min_tokens": 2,
        "bad_words": ["b"],
        "allowed_token_ids": [3, 0],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "structured_outputs": {"regex": "a"},
        "vllm_xargs": {"a": 1, "b": ["c", 0.5]},
        "priority": -7,
        "cache_salt": "salt",
    }
    reader = Reader(settings(), vocabulary_of("bytes"))
    body = VALID[route][1] | {"model": DEFAULT_MODEL} | fields
    sampling = getattr(reader, route)(body).generate(0).sampling
    assert sampling == SamplingParameters(
        max_tokens=5,
        temperature=0.5,
        top_p=0.75,
        top_k=40,
        seed=0,
        stop=["a"],
        stop_token_ids=[1],
        ignore_end_token=True,
        min_p=0.25,
        presence_penalty=-2,
        frequency_penalty=0.5,
        repetition_penalty=1.5,
        logit_bias=[TokenBias(token_id=5, bias=-100), TokenBias(token_id=0, bias=1.5)],
        min_tokens=2,
        bad_words=["b"],
        allowed_token_ids=[3, 0],
        include_stop_string=True,
        include_special_tokens=True,
        structured_output={"regex": {"pattern": "a"}},
        engine_arguments='{"a":1,"b":["c",0.5]}',
        priority=-7,
        cache_salt="salt",
    )
    names = {field.name for field in SamplingParameters.DESCRIPTOR.fields}
    assert names - {field.name for field, _ in sampling.ListFields()} == NOT_IN_THE_API
    plain = getattr(reader, route)(VALID[route][1] | {"model": DEFAULT_MODEL}).generate(0).sampling
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
            generate = getattr(reader, route)(VALID[route][1] | {"model": named}).generate(0)
            assert (generate.model, generate.sampling.lora_adapter) == (model, adapter)


def test_adapters_are_those_of_the_models_that_may_be_named() -> None:
    reader = Reader(settings({"gateway.models": "n"}), vocabulary_of("bytes"))
    reader.learn_models([WorkerStatus(model="m", lora_adapters=["x"]), WorkerStatus(model="n", lora_adapters=["y"])])
    assert reader.models.keys() == {"n", "y"}
    with pytest.raises(ApiError, match="model: one of n, y, got 'x'"):
        reader.completion(COMPLETION | {"model": "x"})


def test_zero_is_said_and_minus_one_is_all() -> None:
    """A penalty of 0 is sent, as the worker may have another default; a top_k of -1 is vLLM's word for all."""
    reader = Reader(settings(), vocabulary_of("bytes"))
    fields = {"model": DEFAULT_MODEL, "prompt": "a", "presence_penalty": 0, "min_p": 0.0, "top_k": -1}
    sampling = reader.completion(fields).generate(0).sampling
    assert sampling.HasField("presence_penalty")
    assert sampling.HasField("min_p")
    assert not sampling.HasField("frequency_penalty")
    assert sampling.top_k == 0


def test_choices_of_each_prompt_begin_with_the_seed() -> None:
    reader = Reader(settings(), vocabulary_of("bytes"))
    request = reader.completion({"model": DEFAULT_MODEL, "prompt": ["a", "b"], "n": 3, "seed": -1})
    seeds = [request.generate(index).sampling.seed for index in range(request.choices)]
    assert seeds == [2**64 - 1, 0, 1] * 2


@pytest.mark.parametrize(
    ("route", "fields", "line"),
    [
        ("completion", {"max_tokens": 10}, "max_tokens: at most 9, the model's context, got 10"),
        ("chat", {"max_tokens": 10}, "max_tokens: at most 9, the model's context, got 10"),
        ("chat", {"max_completion_tokens": 10}, "max_completion_tokens: at most 9, the model's context, got 10"),
    ],
)
def test_answer_must_fit_into_the_context(route: str, fields: dict[str, Any], line: str) -> None:
    reader = Reader(settings(), vocabulary_of("bytes"))
    reader.learn_models([WorkerStatus(model="m", max_model_tokens=9), WorkerStatus(model="unknown")])
    with pytest.raises(ApiError) as raised:
        getattr(reader, route)(VALID[route][1] | fields)
    assert (raised.value.message, raised.value.param) == (line, line.partition(":")[0])
    assert getattr(reader, route)(VALID[route][1] | dict.fromkeys(fields, 9)).sampling["max_tokens"] == 9
    assert getattr(reader, route)(VALID[route][1] | fields | {"model": "unknown"}).sampling["max_tokens"] == 10


def test_body_that_is_no_object_has_no_field_to_name() -> None:
    with pytest.raises(ApiError) as raised:
        TYPES.read(Chat, [1])
    assert (raised.value.message, raised.value.param) == ("the body: expected object, got [1]", None)


def test_null_stands_for_a_field_that_is_left_out() -> None:
    nulls = dict.fromkeys({*TYPES.bounded[Completion].__struct_fields__, "any", "functions"} - COMPLETION.keys())
    assert TYPES.read(Completion, COMPLETION | nulls) == TYPES.read(Completion, COMPLETION)
    assert (TYPES.read(Completion, COMPLETION).n, TYPES.read(Completion, COMPLETION).max_tokens) == (1, 16)


HARMLESS: dict[str, Any] = {
    "user": "u",
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "safety_identifier": "s",
    "session_id": "s",
    "store": True,
    "return_token_offsets": True,
    "mm_payload": "none",
    "use_beam_search": False,
    "length_penalty": 1.0,
    "watermarking": False,
    "spaces_between_special_tokens": True,
    "echo": False,
    "n": 2,
}
OF_COMPLETIONS = {"suffix": "", "best_of": 2}
OF_CHATS = {"verbosity": "low", "prediction": {"type": "content"}, "modalities": ["text"], "include_reasoning": True}


@pytest.mark.parametrize(("route", "fields"), [("completion", OF_COMPLETIONS), ("chat", OF_CHATS)])
def test_harmless_fields_change_nothing(route: str, fields: dict[str, Any]) -> None:
    reader = Reader(settings(), vocabulary_of("bytes"))
    body = VALID[route][1] | {"model": DEFAULT_MODEL, "n": 2}
    assert getattr(reader, route)(body | HARMLESS | fields) == getattr(reader, route)(body)


def test_more_choices_than_are_returned_are_refused() -> None:
    reader = Reader(settings(), vocabulary_of("bytes"))
    with pytest.raises(ApiError, match="best_of: at most n, 2, as choices are not selected, got 3"):
        reader.completion({"prompt": "a", "n": 2, "best_of": 3})


@pytest.mark.parametrize(
    ("route", "fields", "line"),
    [
        ("completion", {"max_tokens": 0}, "max_tokens: at least 1 without echo and prompt_logprobs, got 0"),
        ("completion", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs: only without stream, got it with"),
        (
            "chat",
            {"prompt_logprobs": 1, "prompt_logprob_token_ids": [1]},
            "prompt_logprobs: 0 or absent beside prompt_logprob_token_ids, got 1",
        ),
        ("chat", {"echo": True}, "echo: only false for chats, got true"),
    ],
)
def test_scores_of_prompts_have_their_place(route: str, fields: dict[str, Any], line: str) -> None:
    reader = Reader(settings(), vocabulary_of("bytes"))
    with pytest.raises(ApiError) as raised:
        getattr(reader, route)(VALID[route][1] | {"model": DEFAULT_MODEL} | fields)
    assert (raised.value.message, raised.value.param) == (line, line.partition(":")[0])


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
    reader = Reader(settings(), vocabulary_of("numbers"))
    for given_prompt in ("ab", [97, 98]):
        request = reader.completion({"prompt": given_prompt, **fields})
        generate = request.generate(0)
        wanted = PromptScoring(**scoring) if scoring is not None else PromptScoring()
        assert (generate.HasField("prompt_scoring"), generate.prompt_scoring) == (scoring is not None, wanted)
        assert generate.sampling.HasField("max_tokens") == ("max_tokens" not in fields)
        assert len(request.echoes) == len(echoes)
    assert reader.completion({"prompt": "ab", **fields}).echoes == (echoes or ())


def test_obfuscation_is_refused() -> None:
    reader = Reader(settings(), vocabulary_of("bytes"))
    fields: dict[str, Any] = {"prompt": "a", "stream": True, "stream_options": {"include_obfuscation": False}}
    assert reader.completion(fields).is_streamed
    fields["stream_options"]["include_obfuscation"] = True
    with pytest.raises(ApiError, match=r"stream_options\.include_obfuscation: only false, got true"):
        reader.completion(fields)


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
    reader = Reader(settings(), vocabulary_of("numbers"))
    reader.learn_models([WorkerStatus(model="m", max_model_tokens=9)])
    body = VALID[route][1] | {"max_tokens": 2}

    def prompt(size: int) -> Any:  # noqa: ANN401 - JSON
        return "a" * size if route == "completion" else [{"role": "user", "content": "a" * size}]

    assert getattr(reader, route)(body | {field: prompt(8)}).prompts == [[97] * 8]
    with pytest.raises(ApiError) as raised:
        getattr(reader, route)(body | {field: prompt(9)})
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
    reader = Reader(settings(), vocabulary_of("numbers"))
    reader.learn_models([WorkerStatus(model="m", max_model_tokens=9 if len(kept) > 5 else 6)])
    for given_prompt in ("abcdefg", list(b"abcdefg")):
        body = {"prompt": given_prompt, "max_tokens": 1, **fields}
        assert reader.completion(body).prompts == [list(kept)]
    chat = {"messages": [{"role": "user", "content": "abcdefg"}], **fields}
    assert reader.chat(chat).prompts == [list(kept)]


@pytest.mark.parametrize(
    ("most", "line"),
    [
        (0, "truncate_prompt_tokens: -1 or at least 1, got 0"),
        (10, "truncate_prompt_tokens: at most 9, the model's context, got 10"),
    ],
)
def test_length_to_cut_at_is_bounded(most: int, line: str) -> None:
    reader = Reader(settings(), vocabulary_of("bytes"))
    reader.learn_models([WorkerStatus(model="m", max_model_tokens=9)])
    with pytest.raises(ApiError) as raised:
        reader.completion({"prompt": "a", "truncate_prompt_tokens": most, "max_tokens": 1})
    assert raised.value.message == line


def test_whole_numbers_may_be_written_with_a_point() -> None:
    assert TYPES.read(Completion, {"model": "m", "prompt": [[1.0, 2]], "n": 2.0}).prompt == [[1, 2]]


READER = Reader(settings(), vocabulary_of("numbers"))
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
    """Lists or objects nested too deep are refused with the field and the depth, on every route and in every field."""
    names = place.split(".")
    body = {name: value for name, value in VALID[route][1].items() if name != names[0]}
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
