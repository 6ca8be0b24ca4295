"""OpenAI's /v1/responses: the chat that a body is, and the events and answers that its clients read."""

import json
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.gateway.rendering import FORCED_CALLS, FOUND_CALL, Steps, begun, both, named, spelled, three_steps
from tests.in_process.builders import settings
from tokenbus.gateway.completion_request import CompletionRequest, Reader
from tokenbus.gateway.errors import ApiError
from tokenbus.gateway.output_form import AutoCalls, ForcedCall
from tokenbus.gateway.rendered_step import RenderedStep
from tokenbus.gateway.responses_body import Responses, chat_of, typed
from tokenbus.gateway.responses_format import ResponsesFormat
from tokenbus.gateway.vocabulary import vocabulary_of
from tokenbus_contracts import RowStatus

READER = Reader(settings(), vocabulary_of("bytes"))
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "name": "weather", "description": "Tells it.", "parameters": CITY}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": "{}"}
CALLED = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
LOGPROBS = "message.output_text.logprobs"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ASKED = replace(READER.responses({"input": "a", "instructions": "b", "metadata": {"c": "d"}}), model="m")


def told(given: Any, **fields: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - JSON
    body = READER.types.read(Responses, typed({"input": given, **fields}))
    messages = [msgspec.to_builtins(each) for each in chat_of(body).messages]
    return [{name: value for name, value in each.items() if value is not None} for each in messages]


async def _both(asked: CompletionRequest, steps: Steps, output: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    whole, events = await both(asked, steps, output, ResponsesFormat)
    Response.model_validate(whole)
    for event in events:
        EVENT.validate_python(event)
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    return whole, events


def test_instructions_stand_before_a_text() -> None:
    assert told("") == [{"role": "user", "content": ""}]
    assert told("a", instructions="b") == [{"role": "system", "content": "b"}, {"role": "user", "content": "a"}]


def test_what_the_model_thinks_says_and_calls_is_one_message() -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "z"}]}
    said_before = {
        "id": "msg_1", "type": "message", "role": "assistant", "status": "completed",
        "content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}],
    }  # fmt: skip
    results = [{"type": "input_text", "text": "c"}, {"type": "input_text", "text": "d"}]
    given = [
        {"role": "user", "content": "a"},
        *(thought, said_before, CALL, CALL),
        {"type": "function_call_output", "call_id": "c1", "output": results},
        {"role": "user", "content": [{"type": "input_text", "text": "e"}]},
        *(CALL, said_before),
    ]
    assert told(given) == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning": "z", "tool_calls": [CALLED, CALLED]},
        {"role": "tool", "content": "c\nd", "tool_call_id": "c1"},
        {"role": "user", "content": "e"},
        {"role": "assistant", "tool_calls": [CALLED]},
        {"role": "assistant", "content": "b"},
    ]


@pytest.mark.parametrize(("status", "continues"), [(None, False), ("completed", False), ("incomplete", True)])
def test_message_that_is_not_finished_is_continued(status: str | None, continues: bool) -> None:  # noqa: FBT001
    begun = {"type": "message", "role": "assistant", "content": "b", "status": status}
    body = READER.types.read(Responses, {"input": [begun]})
    assert chat_of(body).continue_final_message is continues
    assert chat_of(body).add_generation_prompt is not continues


def test_fields_become_those_of_a_chat() -> None:
    form = {"type": "json_schema", "name": "n", "schema": CITY, "strict": True}
    request = READER.responses({
        "input": "a", "max_output_tokens": 7, "temperature": 0.5, "top_p": 0.5, "seed": 3, "stop": "b", "stream": True,
        "text": {"format": form}, "logit_bias": {"5": 1}, "include": [LOGPROBS], "top_logprobs": 2, "store": True,
    })  # fmt: skip
    sampling = request.generate(0).sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.seed) == (7, 0.5, 0.5, 3)
    assert (list(sampling.stop), sampling.logit_bias[0].token_id) == (["b"], 5)
    assert (request.top_logprobs, request.is_streamed) == (2, True)
    assert json.loads(sampling.structured_output.json_schema.schema) == CITY


@pytest.mark.parametrize(
    ("choice", "forced"),
    [
        *((None, False), ("auto", False), ("none", False), ("required", None)),
        ({"type": "function", "name": "weather"}, "weather"),
    ],
)
def test_choice_of_tools_forces_calls(choice: Any, forced: str | bool | None) -> None:  # noqa: ANN401, FBT001
    request = READER.responses({"input": "a", "tools": [TOOL], "tool_choice": choice})
    assert forced is False if request.forced is None else request.forced.name == forced


@pytest.mark.parametrize("status", [RowStatus.FINISHED_STOP, RowStatus.FINISHED_LENGTH])
@pytest.mark.parametrize("top_logprobs", [None, 2])
async def test_stream_says_what_the_answer_says_at_once(status: RowStatus, top_logprobs: int | None) -> None:
    asked, steps, output = replace(ASKED, top_logprobs=top_logprobs), three_steps(status, top_k=2), "hello world"
    whole, events = await _both(asked, steps, output)
    ended = "completed" if status is RowStatus.FINISHED_STOP else "incomplete"
    (item,) = whole["output"]
    (part,) = item["content"]
    assert (part["text"], whole["status"], item["status"]) == (output, ended, ended)
    assert (whole["instructions"], whole["metadata"], whole["store"]) == ("b", {"c": "d"}, False)
    assert whole["usage"]["total_tokens"] == whole["usage"]["input_tokens"] + 6
    names = [event["type"].removeprefix("response.") for event in events]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert names == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * len(deltas),
        *("output_text.done", "content_part.done", "output_item.done", ended),
    ]
    assert "".join(event["delta"] for event in deltas) == output
    assert [each for event in deltas for each in event["logprobs"]] == part["logprobs"]
    assert len(part["logprobs"]) == (0 if top_logprobs is None else 6)
    last = events[-1]["response"]
    assert last["output"][0]["content"][0]["text"] == output
    whole["created_at"] = last["created_at"]
    part["logprobs"] = []  # a stream does not repeat them
    assert last == whole


@pytest.mark.parametrize(("name", "output", "calls"), FORCED_CALLS)
async def test_forced_calls_are_items_of_their_own(name: str | None, output: str, calls: list[Any]) -> None:
    asked, steps = replace(ASKED, forced=ForcedCall(name, "")), three_steps(RowStatus.FINISHED_STOP)
    whole, events = await _both(asked, steps, output)
    assert [(each["name"], json.loads(each["arguments"])) for each in whole["output"]] == calls
    items = events[-1]["response"]["output"]
    assert [(each["name"], json.loads(each["arguments"])) for each in items] == calls
    for place, item in enumerate(items):
        deltas = [each for each in events if each["type"].endswith("arguments.delta") and each["output_index"] == place]
        assert "".join(each["delta"] for each in deltas) == item["arguments"]
        assert {each["item_id"] for each in deltas} == {item["id"]}


async def test_calls_that_a_parser_finds_stand_behind_the_text() -> None:
    output = FOUND_CALL
    asked, steps = replace(ASKED, auto=AutoCalls("hermes", is_one=False)), three_steps(RowStatus.FINISHED_STOP)
    whole, events = await _both(asked, steps, output)
    message, call = whole["output"]
    text = message["content"][0]["text"]
    assert (text.strip(), call["name"], json.loads(call["arguments"])) == ("So:", "weather", {"city": "Bern"})
    items = events[-1]["response"]["output"]
    assert [each["type"] for each in items] == ["message", "function_call"]
    assert (items[0]["content"][0]["text"], items[1]["arguments"]) == (text, call["arguments"])


async def test_stream_that_breaks_ends_with_its_error() -> None:
    answer, steps = begun(ASKED, ResponsesFormat), three_steps()
    answer.choices[0].take(RenderedStep(steps[0][0], spelled("hello world", steps)), 0)
    answer.end(ApiError(502, "lost", code="worker_lost"))
    last = named(answer.queue.take(2**30).data)[-1]
    EVENT.validate_python(last)
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "server_error", "message": "lost"}


async def test_text_that_a_stream_keeps_for_its_end_is_bounded() -> None:
    answer, steps = begun(ASKED, ResponsesFormat, {"gateway.answer_bytes": 1000}), three_steps()
    answer.choices[0].take(RenderedStep(steps[0][0], spelled("hello" * 500, steps)), 0)
    assert answer.error is not None
    assert answer.error.code == "answer_too_large"


async def test_end_that_has_the_text_again_is_no_overflow() -> None:
    """A client that reads gets all events, although the last ones alone are more than may wait for it."""
    answer, steps = begun(ASKED, ResponsesFormat, {"gateway.stream_buffer_bytes": 8000}), three_steps()
    vocabulary = spelled("\u00e9" * 6000, steps)
    size = 0
    for step, _ in steps:
        answer.choices[0].take(RenderedStep(step, vocabulary), 0)
        size += len(answer.queue.take(2**30).data)
    assert answer.error is None
    assert size > 8000 * 3
