"""Calls of functions: what a chat's body makes of the output's form, and what the output's text becomes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tokenizers import AddedToken

from tests.gateway.rendering import Steps, chunks, said, spelled, three_steps
from tests.in_process.builders import settings
from tests.support.model_folder import END, byte_level, write_model
from tokenbus.gateway.buffers import Buffers
from tokenbus.gateway.completion_request import DEFAULT_MODEL, CompletionRequest, Reader
from tokenbus.gateway.openai_format import Envelope
from tokenbus.gateway.output_form import AutoCalls, ForcedCall
from tokenbus.gateway.rendered_step import RenderedStep
from tokenbus.gateway.sse import StreamedAnswer
from tokenbus.gateway.tool_calls import CallWriter
from tokenbus.gateway.vocabulary import Vocabulary, vocabulary_of
from tokenbus.model_files import ModelTokenizer
from tokenbus.testing import RowShape, batch
from tokenbus_contracts import LogprobBatch, RowStatus

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
    return READER.chat(CHAT | fields)


def schema(request: CompletionRequest) -> Any:  # noqa: ANN401 - JSON
    return json.loads(request.generate(0).sampling.structured_output.json_schema.schema)


@pytest.mark.parametrize("choice", [None, "none", "auto"])
def test_output_is_free_unless_a_call_is_forced(choice: str | None) -> None:
    request = read(tools=TOOLS, tool_choice=choice)
    assert request.forced is None
    assert not request.generate(0).sampling.HasField("structured_output")


@pytest.mark.parametrize(
    ("parser", "fields", "auto"),
    [
        ("hermes", {}, None),
        ("hermes", {"tools": TOOLS}, AutoCalls("hermes", is_one=False)),
        ("hermes", {"tools": TOOLS, "parallel_tool_calls": False}, AutoCalls("hermes", is_one=True)),
        ("hermes", {"tools": TOOLS, "tool_choice": "none"}, None),
        ("hermes", {"tools": TOOLS, "tool_choice": "required"}, None),
        ("hermes", {"tools": TOOLS, "tool_choice": {"function": {"name": "now"}}}, None),
        ("pythonic", {"tools": TOOLS, "tool_choice": "auto"}, AutoCalls("pythonic", is_one=False)),
    ],
)
def test_calls_are_looked_for_where_functions_may_be_called(
    parser: str, fields: dict[str, Any], auto: AutoCalls | None
) -> None:
    assert read(**fields).auto is None
    request = Reader(settings({"gateway.tool_call_parser": parser}), vocabulary_of("bytes")).chat(CHAT | fields)
    assert request.auto == auto
    # Some tokenizers have `<tool_call>` as a special token, which texts leave out.
    assert request.stopping.shows_special == (auto is not None and parser == "hermes")


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
    whole = [each["function"] for each in writer.message(text).get("tool_calls", [])]
    assert [(each["name"], json.loads(each["arguments"])) for each in whole] == calls


BEGUN = '[{"name": "f", "parameters": {"a"'


@pytest.mark.parametrize("text", [BEGUN, BEGUN + ": " + "[" * 100_000, "[]", "", "{}", "[1]"])
def test_output_that_was_cut_off_has_no_whole_call(text: str) -> None:
    assert CallWriter(ForcedCall(None, "")).message(text) == {"content": ""}


def test_half_of_a_pair_of_surrogates_stays_escaped() -> None:
    """JSON may name one, UTF-8 has none: an answer with it could not be sent."""
    said = CallWriter(ForcedCall(None, "")).message('[{"name": "f", "parameters": {"a": "\\ud83d é"}}]')
    (call,) = said["tool_calls"]
    assert call["function"]["arguments"] == '{"a": "\\ud83d \\u00e9"}'


def written(text: str, status: RowStatus = RowStatus.FINISHED_STOP, top_k: int = 0) -> tuple[Steps, Vocabulary]:
    steps = three_steps(status, top_k=top_k)
    return steps, spelled(text, steps)


TEXT = '[{"name": "weather", "parameters": {"city": "Bern"}}]'


@pytest.mark.parametrize("status", [RowStatus.FINISHED_STOP, RowStatus.FINISHED_LENGTH])
@pytest.mark.parametrize("name", [None, "weather"])
async def test_answer_has_calls_instead_of_a_text(name: str | None, status: RowStatus) -> None:
    steps, vocabulary = written(TEXT if name is None else '{"city": "Bern"}', status)
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


FOUND = """\
So:
<tool_call>{"name":"weather","arguments":{"city":"Bern"}}</tool_call>
<tool_call>{"name":"now","arguments":{}}</tool_call>"""
CALLS = [("weather", '{"city": "Bern"}'), ("now", "{}")]
CUT = FOUND.removesuffix("}</tool_call>")
AUTO = CompletionRequest(model="m", prompts=[[1]], is_chat=True, auto=AutoCalls("hermes", is_one=False))


async def answered(asked: CompletionRequest, steps: Steps, vocabulary: Vocabulary) -> tuple[Any, list[Any]]:
    (whole,) = json.loads(await said(asked, steps, vocabulary))["choices"]
    streamed = await said(replace(asked, is_streamed=True), steps, vocabulary)
    return whole, [chunk["choices"][0] for chunk in chunks(streamed)]


def calls_in(said: list[dict[str, Any]]) -> list[tuple[str, str]]:
    calls = [call for each in said for call in each.get("tool_calls", ())]
    assert all(call["type"] == "function" and call["id"][:14] == "chatcmpl-tool-" for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    assert [call.get("index", place) for place, call in enumerate(calls)] == list(range(len(calls)))
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


@pytest.mark.parametrize(
    ("text", "is_one", "content", "calls", "reason"),
    [
        (FOUND, False, "So:\n", CALLS, "tool_calls"),
        (FOUND, True, "So:\n", CALLS[:1], "tool_calls"),
        (CUT, False, 'So:\n<tool_call>{"name":"now","arguments":{}', CALLS[:1], "length"),
        ("It rains, I am sure of it.", False, "It rains, I am sure of it.", [], "stop"),
        ("<tool_call>no, not a call</tool_call>", False, "<tool_call>no, not a call</tool_call>", [], "stop"),
    ],
)
async def test_answer_has_the_calls_that_are_in_its_text(
    text: str,
    is_one: bool,  # noqa: FBT001 - a parameter of the test
    content: str,
    calls: list[tuple[str, str]],
    reason: str,
) -> None:
    status = RowStatus.FINISHED_LENGTH if reason == "length" else RowStatus.FINISHED_STOP
    asked = replace(AUTO, auto=AutoCalls("hermes", is_one))
    whole, streamed = await answered(asked, *written(text, status))
    assert (whole["message"]["content"], calls_in([whole["message"]])) == (content, calls)
    assert whole["finish_reason"] == reason
    deltas = [each["delta"] for each in streamed]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert ("".join(each.get("content", "") for each in deltas), calls_in(deltas)) == (content, calls)
    assert all(deltas[:-1])  # nothing is sent of what brings nothing
    assert [each["finish_reason"] for each in streamed] == [None] * (len(streamed) - 1) + [reason]


async def test_spaces_before_calls_are_no_content_of_a_whole_answer() -> None:
    whole, _ = await answered(AUTO, *written(FOUND.removeprefix("So:")))
    assert (whole["message"]["content"], calls_in([whole["message"]])) == (None, CALLS)


async def test_tokens_beside_calls_are_those_beside_a_text() -> None:
    found = replace(AUTO, top_logprobs=2, wants_ids=True)
    told = written(FOUND, top_k=2)
    (plain, chunked), (whole, streamed) = [await answered(asked, *told) for asked in (replace(found, auto=None), found)]
    assert plain["message"]["content"] == FOUND
    assert calls_in([whole["message"]]) == CALLS
    for name in ("logprobs", "token_ids"):
        assert whole[name] == plain[name]
        assert [each.get(name) for each in streamed] == [each.get(name) for each in chunked]


async def test_what_is_held_back_counts_to_what_waits_for_all_clients() -> None:
    steps, vocabulary = written(FOUND.replace("Bern", "B" * 200))
    asked = replace(AUTO, is_streamed=True)
    buffers = Buffers(2**30)
    answer = StreamedAnswer(asked, Envelope(asked, 1), settings().gateway, buffers)
    sizes = []
    for target, _ in steps:
        answer.choices[0].take(RenderedStep(target, vocabulary), 0)
        answer.queue.take(2**30)  # what is not held back is sent
        sizes.append(buffers.size)
    assert max(sizes) > len("weather")
    assert sizes[-1] == 0


@pytest.mark.parametrize("is_special", [False, True])
async def test_marks_may_be_special_tokens(tmp_path: Path, is_special: bool) -> None:  # noqa: FBT001 - a parameter
    """Qwen's tokenizers have `<tool_call>` as a token of the text, others as a special one."""
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken(mark, special=is_special) for mark in ("<tool_call>", "</tool_call>")])
    model = ModelTokenizer(write_model(tmp_path, tokenizer))
    assert len(model.encode("<tool_call>")) == 1
    steps: list[tuple[LogprobBatch, None]] = []
    for place, token in enumerate(ids := model.encode(FOUND + END)):
        status = RowStatus.FINISHED_STOP if place == len(ids) - 1 else RowStatus.ACTIVE
        made = batch([RowShape(3, place, 1, status)], step=place + 1)
        made = LogprobBatch.of_views(made.header, made.columns | {"token_ids": np.array([token], np.uint32)})
        steps.append((made, None))
    reader = Reader(settings({"gateway.tool_call_parser": "hermes"}), vocabulary_of("bytes"))
    whole, streamed = await answered(reader.chat(CHAT | {"tools": TOOLS}), steps, Vocabulary(model))
    assert (whole["message"]["content"], calls_in([whole["message"]])) == ("So:\n", CALLS)
    deltas = [each["delta"] for each in streamed]
    assert ("".join(each.get("content", "") for each in deltas), calls_in(deltas)) == ("So:\n", CALLS)
