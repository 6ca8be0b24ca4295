"""Calls of functions: what a chat's body makes of the output's form, and what the output's text becomes."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.services.builders import settings
from tests.services.gateway.rendering import chunks, said, spelled
from tokenbus.testing import RowShape, batch
from tokenbus_contracts import RowStatus
from tokenbus_services.gateway.completion_request import DEFAULT_MODEL, CompletionRequest, Reader
from tokenbus_services.gateway.errors import ApiError
from tokenbus_services.gateway.output_form import ForcedCall
from tokenbus_services.gateway.tool_calls import CallWriter
from tokenbus_services.gateway.vocabulary import vocabulary_of

CITY = {"type": "object", "properties": {"city": {"$ref": "#/$defs/City"}}, "$defs": {"City": {"type": "string"}}}
PLACE = {key: value for key, value in CITY.items() if key != "$defs"}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": CITY}},
    {"function": {"name": "now", "strict": True}},
]
CHAT = {"model": DEFAULT_MODEL, "messages": [{"role": "user", "content": "a"}]}
READER = Reader(settings(), vocabulary_of("bytes"))
ARGUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('a"\\{}[],: é', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('a"}', max_size=3), inner, max_size=3),
    max_leaves=8,
)


def read(**fields: Any) -> CompletionRequest:  # noqa: ANN401 - JSON
    """Return what the gateway makes of a chat with these fields."""
    return READER.chat(CHAT | fields)


def schema(request: CompletionRequest) -> Any:  # noqa: ANN401 - JSON
    """Return the JSON Schema that a request's output has to hold."""
    return json.loads(request.generate(0).sampling.structured_output.json_schema.schema)


@pytest.mark.parametrize("choice", [None, "none", "auto"])
def test_output_is_free_unless_a_call_is_forced(choice: str | None) -> None:
    request = read(tools=TOOLS, tool_choice=choice)
    assert request.forced is None
    assert not request.generate(0).sampling.HasField("structured_output")


def test_function_by_its_name_forces_its_arguments() -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    assert schema(read(tools=TOOLS, tool_choice=named)) == CITY
    assert schema(read(tools=TOOLS, tool_choice={"function": {"name": "now"}})) == {"type": "object", "properties": {}}


@pytest.mark.parametrize("is_one", [False, True])
def test_required_forces_a_list_of_calls(is_one: bool) -> None:  # noqa: FBT001 - a parameter of the test
    functions = [("weather", PLACE), ("now", {"type": "object", "properties": {}})]
    assert schema(read(tools=TOOLS, tool_choice="required", parallel_tool_calls=not is_one)) == {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "anyOf": [
                {
                    "properties": {"name": {"type": "string", "enum": [name]}, "parameters": parameters},
                    "required": ["name", "parameters"],
                }
                for name, parameters in functions
            ],
        },
        "$defs": CITY["$defs"],
    } | ({"maxItems": 1} if is_one else {})


def test_forced_call_comes_before_the_form_of_a_text() -> None:
    """`response_format` is about the text of an answer, which a forced call leaves none."""
    request = read(tools=TOOLS, tool_choice="required", response_format={"type": "json_object"})
    assert schema(request)["type"] == "array"


DEEP: dict[str, Any] = {}
for _ in range(300):
    DEEP = {"items": DEEP}


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"tool_choice": "required"}, "tool_choice: only with tools, got it without"),
        ({"tool_choice": "auto"}, "tool_choice: only with tools, got it without"),
        (
            {"tools": TOOLS, "tool_choice": {"function": {"name": "rain"}}},
            "tool_choice.function.name: one of weather, now, got 'rain'",
        ),
        (
            {"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}},
            "structured_outputs: none where tool_choice forces a call, got one",
        ),
        (
            {"tools": [{"function": {"name": "f", "parameters": {"const": "x" * 300_000}}}]},
            "tools: at most 262144 bytes, got 300090",
        ),
        (
            {"tools": [{"function": {"name": "f", "parameters": DEEP}}]},
            "tools: nested at most 128 deep, got 304",
        ),
        (
            {
                "tools": [*TOOLS, {"function": {"name": "g", "parameters": {"$defs": {"City": {"type": "null"}}}}}],
                "tool_choice": "required",
            },
            "tools: one definition of a name in $defs, got two of 'City' that differ",
        ),
        (
            {"tools": [{"function": {"name": "g", "parameters": {"$defs": []}}}], "tool_choice": "required"},
            "tools: objects as the $defs of parameters, got list for 'g'",
        ),
        ({"messages": [{"role": "tool", "tool_call_id": "1"}]}, "messages[0].content: required, got nothing"),
        (
            {"continue_final_message": True},
            "continue_final_message: only where add_generation_prompt is false, got both",
        ),
        (
            {"chat_template_kwargs": {"tools": [], "a": 1}},
            "chat_template_kwargs.tools: no name of a field, a special token or a function of the template, got one",
        ),
        (
            {"chat_template_kwargs": {"a": "x" * 70_000}},
            "chat_template_kwargs: at most 65536 bytes, got 70008",
        ),
    ],
)
def test_chat_that_does_not_fit_is_refused_in_one_line(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(ApiError) as raised:
        read(**fields)
    assert (raised.value.status, raised.value.message, raised.value.param) == (400, line, line.partition(": ")[0])


@given(
    st.lists(st.tuples(st.text('ab"\\é', min_size=1, max_size=4), ARGUMENTS), min_size=1, max_size=3),
    st.sampled_from([None, 1]),
    st.lists(st.integers(1, 9), min_size=1),
)
def test_calls_come_as_their_text_does(calls: list[tuple[str, Any]], indent: int | None, sizes: list[int]) -> None:
    text = json.dumps([{"name": name, "parameters": given} for name, given in calls], indent=indent)
    writer = CallWriter(ForcedCall(None, ""))
    found: list[dict[str, Any]] = []
    place = 0
    while place < len(text):
        size = sizes[place % len(sizes)]
        for piece in json.loads(writer.delta(text[place : place + size])).get("tool_calls", ()):
            if piece["index"] == len(found):
                assert (piece["type"], piece["id"][:14]) == ("function", "chatcmpl-tool-")
                found.append(piece["function"])
            else:
                assert piece.keys() == {"index", "function"}
                found[piece["index"]]["arguments"] += piece["function"]["arguments"]
        place += size
    assert [(each["name"], json.loads(each["arguments"])) for each in found] == calls
    assert all(each["arguments"] in text for each in found)
    whole = [each["function"] for each in writer.calls(text)]
    assert [(each["name"], json.loads(each["arguments"])) for each in whole] == calls


@pytest.mark.parametrize("text", ['[{"name": "f", "parameters": {"a"', "[]", "", "{}", "[1]"])
def test_output_that_was_cut_off_has_no_whole_call(text: str) -> None:
    assert CallWriter(ForcedCall(None, "")).calls(text) == []


TEXT = '[{"name": "weather", "parameters": {"city": "Bern"}}]'


@pytest.mark.parametrize("status", [RowStatus.FINISHED_STOP, RowStatus.FINISHED_LENGTH])
@pytest.mark.parametrize("name", [None, "weather"])
async def test_answer_has_calls_instead_of_a_text(name: str | None, status: RowStatus) -> None:
    steps = [
        (batch([RowShape(3, 0, 2)], step=1), None),
        (batch([RowShape(3, 2, 3)], step=2), None),
        (batch([RowShape(3, 5, 2, status)], step=3), None),
    ]
    vocabulary = spelled(TEXT if name is None else '{"city": "Bern"}', steps)
    asked = CompletionRequest(model="m", prompts=[[1]], is_chat=True, forced=ForcedCall(name, ""))
    (whole,) = json.loads(await said(asked, steps, vocabulary))["choices"]
    assert whole["message"].items() >= {"role": "assistant", "content": ""}.items()
    (call,) = whole["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Bern"}'}
    streamed = list(chunks(await said(replace(asked, is_streamed=True), steps, vocabulary)))
    first, *others = [chunk["choices"][0] for chunk in streamed]
    assert first["delta"] == {"role": "assistant", "content": ""}
    deltas = [each for choice in others for each in choice["delta"].get("tool_calls", ())]
    assert [each["function"].get("name") for each in deltas] == ["weather"] + [None] * (len(deltas) - 1)
    assert "".join(each["function"]["arguments"] for each in deltas) == call["function"]["arguments"]
    assert all("content" not in choice["delta"] for choice in others)
    stopped = "stop" if name is not None else "tool_calls"
    ended = stopped if status is RowStatus.FINISHED_STOP else "length"
    assert (whole["finish_reason"], others[-1]["finish_reason"]) == (ended, ended)
