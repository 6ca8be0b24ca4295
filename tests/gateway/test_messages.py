"""Anthropic's /v1/messages: the chat that a body is, and the events and answers that its clients read."""

import json
from typing import Any

import msgspec
import pytest
from anthropic.types import Message as Answer
from anthropic.types import RawMessageStreamEvent
from msgspec.structs import replace
from pydantic import TypeAdapter

from tests.gateway.rendering import FORCED_CALLS, FOUND_CALL, Steps, begun, both, named, three_steps
from tests.in_process.builders import settings
from tokenbus.gateway.completion_request import CompletionRequest, Reader
from tokenbus.gateway.errors import ApiError
from tokenbus.gateway.messages_body import Messages, chat_of
from tokenbus.gateway.messages_format import MessagesFormat, message_error
from tokenbus.gateway.output_form import AutoCalls, ForcedCall
from tokenbus.gateway.vocabulary import vocabulary_of
from tokenbus_contracts import RowStatus

READER = Reader(settings(), vocabulary_of("bytes"))
USER = {"role": "user", "content": "a"}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "weather", "description": "Tells it.", "input_schema": CITY}
CALL = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Bern"}}
CALLED = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Bern"}'}}
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
ASKED = CompletionRequest(model="m", prompts=[[1, 2]], is_chat=True)


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


def chat(*messages: dict[str, Any], **fields: Any) -> Any:  # noqa: ANN401 - JSON
    body = {"max_tokens": 5, "messages": list(messages) or [USER], **fields}
    return chat_of(READER.types.read(Messages, body))


def told(*messages: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - JSON
    made = [msgspec.to_builtins(each) for each in chat(*messages, **fields).messages]
    return [{name: value for name, value in each.items() if value is not None} for each in made]


async def _both(asked: CompletionRequest, steps: Steps, output: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    whole, events = await both(asked, steps, output, MessagesFormat)
    Answer.model_validate(whole)
    for event in events:
        EVENT.validate_python(event)
    return whole, events


def test_system_prompt_comes_first_and_its_blocks_are_one_text() -> None:
    system = {"role": "system", "content": "bc"}
    assert told(system="bc") == [system, USER]
    assert told(system=[text("b"), text("x-anthropic-billing-header: 7"), text("c")]) == [system, USER]
    assert told({"role": "system", "content": "b"}, USER) == [{"role": "system", "content": "b"}, USER]


def test_results_of_tools_are_messages_before_the_text_beside_them() -> None:
    results = [
        {"type": "tool_result", "tool_use_id": "t1", "content": [text("b"), text("c")], "is_error": False},
        text("d"),
        {"type": "tool_result", "tool_use_id": "t2", "content": "e", "cache_control": {"type": "ephemeral"}},
    ]
    assistant = [{"type": "thinking", "thinking": "z", "signature": "s"}, text("f"), CALL]
    assert told(USER, {"role": "assistant", "content": assistant}, {"role": "user", "content": results}) == [
        USER,
        {"role": "assistant", "content": "f", "reasoning": "z", "tool_calls": [CALLED]},
        {"role": "tool", "content": "b\nc", "tool_call_id": "t1"},
        {"role": "tool", "content": "e", "tool_call_id": "t2"},
        {"role": "user", "content": "d"},
    ]


@pytest.mark.parametrize(("content", "continues"), [("b", True), ([text("b")], True), ([text("b"), CALL], False)])
def test_assistants_last_text_is_continued(content: Any, continues: bool) -> None:  # noqa: ANN401, FBT001
    found = chat(USER, {"role": "assistant", "content": content})
    assert (found.continue_final_message, found.add_generation_prompt) == (continues, not continues)


def test_fields_become_those_of_a_chat() -> None:
    given = {"max_tokens": 7, "temperature": 0.5, "top_p": 0.5, "top_k": 3, "stop_sequences": ["b"], "stream": True}
    form = {"type": "json_schema", "schema": CITY}
    request = READER.messages({
        **given, "messages": [USER], "metadata": {"user_id": "u"}, "output_config": {"format": form}, "cache_salt": "s",
    })  # fmt: skip
    sampling = request.generate(0).sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (7, 0.5, 0.5, 3)
    assert (list(sampling.stop), sampling.cache_salt, request.is_streamed) == (["b"], "s", True)
    assert json.loads(sampling.structured_output.json_schema.schema) == CITY


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, "none"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, None),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}, "high"),
    ],
)
def test_thinking_is_an_effort(fields: dict[str, Any], effort: str | None) -> None:
    assert chat(**fields).reasoning_effort == effort


@pytest.mark.parametrize(
    ("choice", "forced"),
    [
        ({"type": "auto"}, False),
        ({"type": "none"}, False),
        ({"type": "any"}, None),
        ({"type": "tool", "name": "weather"}, "weather"),
    ],
)
def test_choice_of_tools_forces_calls(choice: dict[str, Any], forced: str | bool | None) -> None:  # noqa: FBT001
    request = READER.messages({"max_tokens": 5, "messages": [USER], "tools": [TOOL], "tool_choice": choice})
    assert forced is False if request.forced is None else request.forced.name == forced


def test_any_is_one_call_where_parallel_ones_are_disabled() -> None:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    request = READER.messages({"max_tokens": 5, "messages": [USER], "tools": [TOOL], "tool_choice": choice})
    assert request.forced is not None
    assert json.loads(request.forced.schema)["maxItems"] == 1


def test_tokens_of_a_chat_are_counted_as_its_prompt_has_them() -> None:
    given = {"messages": [USER, {"role": "assistant", "content": "bcd"}], "system": "ef"}
    counted = json.loads(READER.token_count(given))
    assert counted == {"input_tokens": READER.messages({"max_tokens": 5, **given}).prompt_tokens}


@pytest.mark.parametrize(
    ("status", "stops", "reason", "stop"),
    [
        (RowStatus.FINISHED_LENGTH, (), "max_tokens", None),
        (RowStatus.FINISHED_STOP, (), "end_turn", None),
        (RowStatus.FINISHED_LENGTH, ("ld",), "stop_sequence", "ld"),
    ],
)
async def test_stream_says_what_the_answer_says_at_once(
    status: RowStatus, stops: tuple[str, ...], reason: str, stop: str | None
) -> None:
    asked = replace(ASKED, sampling={"stop": stops} if stops else {})
    steps, output = three_steps(status), "hello world"
    whole, events = await _both(asked, steps, output)
    content = output if stop is None else output.partition(stop)[0]
    assert whole["content"] == [text(content)]
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, stop)
    assert whole["usage"] == {"input_tokens": 2, "output_tokens": 6}
    first, begun, *deltas, ended, message, last = events
    assert first["message"] == whole | {
        "content": [], "stop_reason": None, "stop_sequence": None, "usage": {"input_tokens": 2, "output_tokens": 0},
    }  # fmt: skip
    assert begun == {"type": "content_block_start", "index": 0, "content_block": text("")}
    assert {each["delta"]["type"] for each in deltas} == {"text_delta"}
    assert "".join(each["delta"]["text"] for each in deltas) == content
    assert ended == {"type": "content_block_stop", "index": 0}
    assert message["delta"] == {"stop_reason": reason, "stop_sequence": stop}
    assert message["usage"] == whole["usage"]
    assert last == {"type": "message_stop"}


async def test_cached_tokens_are_not_among_the_input_tokens() -> None:
    whole, events = await both(ASKED, three_steps(), "hello world", MessagesFormat, cached=1)
    assert whole["usage"] == {"input_tokens": 1, "cache_read_input_tokens": 1, "output_tokens": 6}
    assert events[0]["message"]["usage"] == {"input_tokens": 2, "output_tokens": 0}  # nobody knows yet
    assert events[-2]["usage"] == whole["usage"]


@pytest.mark.parametrize(("name", "output", "calls"), FORCED_CALLS)
async def test_forced_calls_are_blocks_of_their_own(name: str | None, output: str, calls: list[Any]) -> None:
    asked, steps = replace(ASKED, forced=ForcedCall(name, "")), three_steps(RowStatus.FINISHED_STOP)
    whole, events = await _both(asked, steps, output)
    assert [(each["name"], each["input"]) for each in whole["content"]] == calls
    assert {each["id"][:6] for each in whole["content"]} == {"toolu_"}
    assert whole["stop_reason"] == "tool_use"
    begun = [each for each in events if each["type"] == "content_block_start"]
    assert [(each["index"], each["content_block"]["name"]) for each in begun] == [
        (place, called) for place, (called, _) in enumerate(calls)
    ]
    for place, (_, arguments) in enumerate(calls):
        deltas = [each["delta"] for each in events if each["type"] == "content_block_delta" and each["index"] == place]
        assert json.loads("".join(each["partial_json"] for each in deltas)) == arguments
    assert [each["index"] for each in events if each["type"] == "content_block_stop"] == list(range(len(calls)))
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


async def test_calls_that_a_parser_finds_stand_behind_the_text() -> None:
    output = FOUND_CALL
    asked, steps = replace(ASKED, auto=AutoCalls("hermes", is_one=False)), three_steps(RowStatus.FINISHED_STOP)
    whole, events = await _both(asked, steps, output)
    said_first, call = whole["content"]
    assert (said_first["text"].strip(), call["name"], call["input"]) == ("So:", "weather", {"city": "Bern"})
    assert whole["stop_reason"] == "tool_use"
    begun = [each["content_block"]["type"] for each in events if each["type"] == "content_block_start"]
    ended = [each["index"] for each in events if each["type"] == "content_block_stop"]
    assert (begun, ended) == (["text", "tool_use"], [0, 1])
    deltas = [(each["index"], each["delta"]) for each in events if each["type"] == "content_block_delta"]
    assert "".join(each["text"] for index, each in deltas if not index) == said_first["text"]
    assert json.loads("".join(each["partial_json"] for index, each in deltas if index)) == call["input"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


async def test_call_that_was_cut_off_is_in_no_whole_answer() -> None:
    asked = replace(ASKED, forced=ForcedCall("weather", ""))
    whole, _ = await _both(asked, three_steps(), '{"city": "B')
    assert (whole["content"], whole["stop_reason"]) == ([], "max_tokens")


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *((400, "invalid_request_error"), (401, "authentication_error"), (404, "not_found_error")),
        *((429, "rate_limit_error"), (415, "invalid_request_error"), (502, "api_error"), (503, "overloaded_error")),
    ],
)
def test_errors_have_anthropics_shape(status: int, kind: str) -> None:
    error = ApiError(status, "a: b", param="a", code="c")
    assert message_error(error) == {"type": "error", "error": {"type": kind, "message": "a: b"}}


async def test_stream_that_breaks_ends_with_its_error() -> None:
    answer = begun(ASKED, MessagesFormat)
    answer.put_events(b"", 1)
    answer.end(ApiError(502, "lost", code="worker_lost"))
    assert named(answer.queue.take().data)[-1] == message_error(ApiError(502, "lost"))
