"""Bodies of requests: what is accepted, how a refusal is worded, and what the OpenAPI document says of them."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema_rs import Draft202012Validator

from tests.services.builders import settings
from tokenbus_services.gateway.errors import ApiError
from tokenbus_services.gateway.openapi import document
from tokenbus_services.gateway.request_body import RequestTypes

SMALL = {"max_tokens": 5, "max_prompt_tokens": 3, "max_choices": 2}
TYPES = RequestTypes(settings({f"gateway.{name}": value for name, value in SMALL.items()}))
COMPLETION = {"model": "m", "prompt": "a"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
VALID: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "completion": (TYPES.completion, COMPLETION),
    "chat": (TYPES.chat, CHAT),
    "inspection": (TYPES.inspection, {"prompt": "a"}),
    "tokenization": (TYPES.tokenization, {"prompt": "a"}),
    "detokenization": (TYPES.detokenization, {"tokens": [1]}),
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
    if Draft202012Validator(msgspec.json.schema(kind)).is_valid(body):
        TYPES.read(kind, body)
    else:
        with pytest.raises(ApiError):
            TYPES.read(kind, body)


def test_schemas_of_the_document_are_schemas() -> None:
    """Each schema of the OpenAPI document holds by JSON Schema's own."""
    schemas = document(TYPES)["components"]["schemas"]
    assert {"Completion", "Chat", "Inspection", "Error", "Models", "CompletionAnswer", "ChatAnswer"} <= schemas.keys()
    for name in schemas:
        Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": {"schemas": schemas}})


@pytest.mark.parametrize(
    ("route", "fields", "line"),
    [
        ("completion", {"n": 6}, "n: expected int <= 2, got 6"),
        ("completion", {"n": True}, "n: expected int | null, got True"),
        ("completion", {"n": 1.5}, "n: expected int | null, got 1.5"),
        ("completion", {"seed": 2**64}, "seed: expected int <= 9223372036854775807, got 18446744073709551616"),
        ("completion", {"top_p": 0}, "top_p: expected float > 0.0, got 0"),
        ("completion", {"stop": ""}, "stop: expected str of length >= 1, got a length of 0"),
        ("completion", {"stop": ["a", ""]}, "stop[1]: expected str of length >= 1, got a length of 0"),
        ("completion", {"stop": 5}, "stop: expected str | array | null, got 5"),
        ("completion", {"frequency_penalty": 0.5}, "frequency_penalty: only 0, got 0.5"),
        ("completion", {"frequency_penalty": False}, "frequency_penalty: only 0, got False"),
        ("completion", {"prompt": [1, -1]}, "prompt[1]: expected int >= 0, got -1"),
        ("completion", {"prompt": [4294967296]}, "prompt[0]: expected int <= 2147483646, got 4294967296"),
        ("completion", {"prompt": [1, 2, 3, 4]}, "prompt: expected array of length <= 3, got a length of 4"),
        ("completion", {"prompt": [[1], [2, -10]]}, "prompt[1][1]: expected int >= 0, got -10"),
        ("completion", {"prompt": ["a", ""]}, "prompt[1]: expected str of length >= 1, got a length of 0"),
        ("completion", {"prompt": ["a", 5]}, "prompt[1]: expected str, got 5"),
        ("completion", {"prompt": ["a", "b", "c"]}, "prompt: expected array of length <= 2, got a length of 3"),
        ("completion", {"b": 1}, "b: no such field, got 1"),
        ("completion", {"b - at `$.n`": None}, "b - at `$.n`: no such field, got None"),
        ("completion", {"stream_options": {"x": 1}}, "stream_options.x: no such field, got 1"),
        ("completion", {"prompt": None}, "prompt: required, got nothing"),
        (
            "chat",
            {"messages": [{"role": "king", "content": "a"}]},
            "messages[0].role: one of 'system', 'developer', 'user', 'assistant', got 'king'",
        ),
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text: required, got nothing",
        ),
        (
            "chat",
            {"messages": [{"role": "user", "content": "a", "audio": 1}]},
            "messages[0].audio: expected null, got 1",
        ),
    ],
)
def test_refusals_name_the_field_the_limit_and_the_value(route: str, fields: dict[str, Any], line: str) -> None:
    """One line says where, what may be there, and what was; its beginning is the error's `param`."""
    kind, valid = VALID[route]
    with pytest.raises(ApiError) as raised:
        TYPES.read(kind, valid | fields)
    assert raised.value.message == line
    assert raised.value.param == line.rpartition(": ")[0]


def test_body_that_is_no_object_has_no_field_to_name() -> None:
    """What is no object at all is refused without a `param`."""
    with pytest.raises(ApiError) as raised:
        TYPES.read(TYPES.chat, [1])
    assert (raised.value.message, raised.value.param) == ("the body: expected object, got [1]", None)


def test_null_stands_for_a_field_that_is_left_out() -> None:
    """What is null, as clients write of options that were not given, has its default."""
    nulls = dict.fromkeys(set(TYPES.completion.__struct_fields__) - COMPLETION.keys())
    assert TYPES.read(TYPES.completion, COMPLETION | nulls) == TYPES.read(TYPES.completion, COMPLETION)
    assert (TYPES.read(TYPES.completion, COMPLETION).n, TYPES.read(TYPES.completion, COMPLETION).max_tokens) == (1, 16)


def test_whole_numbers_may_be_written_with_a_point() -> None:
    """5.0 is an integer, in a field as in a list, as JSON Schema has it."""
    assert TYPES.read(TYPES.completion, {"model": "m", "prompt": [[1.0, 2]], "n": 2.0}).prompt == [[1, 2]]
