"""Second turns: what clients send back of the first, as their SDKs have it, and what others add to it."""

from typing import Any

import pytest
from anthropic.types import Message
from anthropic.types.parsed_message import ParsedMessage
from openai.types.chat import ChatCompletionMessage, ParsedChatCompletionMessage
from openai.types.responses import ParsedResponse
from pydantic import BaseModel

from tests.gateway.answering import answering
from tests.gateway.reading import read, reading
from tokenbus.engines.ngram import NgramEngine

READER = reading("numbers")
MODEL = "tokenbus"
ASK = {"role": "user", "content": "How?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "1"}
TEXT: dict[str, Any] = {"gateway__tokenizer": "ngram"}


def said(content: Any = "b", role: str = "assistant", **fields: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    return {"role": role, "content": content, **fields}


def called(*calls: dict[str, Any], **fields: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    return {"role": "assistant", "tool_calls": list(calls), **fields}


def function(**fields: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    return CALL | {"function": {"name": "f", "arguments": "{}", **fields}}


MESSAGES: dict[str, tuple[dict[str, Any], str]] = {
    "refusal": (said(refusal="no"), "b"),
    "null refusal": (said(refusal=None, annotations=None, audio=None, function_call=None, tool_calls=None), "b"),
    "annotations": (said(annotations=[]), "b"),
    "audio": (said(audio={"id": "a"}), "b"),
    "no content": ({"role": "assistant"}, ""),
    "null content": (said(None), ""),
    "null content of a user": (said(None, "user"), ""),
    "null content of a tool": (said(None, "tool", tool_call_id="c1"), ""),
    "no parts": (said([]), ""),
    "no parts of a user": (said([], "user"), ""),
    "parts": (said([{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]), "b\nc"),
    "plain texts as parts": (said(["b", "c"], "user"), "b\nc"),
    "cache_control of a part": (said([{"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]), "b"),
    "annotations of a part": (said([{"type": "text", "text": "b", "annotations": []}]), "b"),
    "input_text": (said([{"type": "input_text", "text": "b"}], "user"), "b"),
    "output_text": (said([{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}]), "b"),
    "part that is a refusal": (said([{"type": "refusal", "refusal": "b"}]), "b"),
    "part that is a thought": (said([{"type": "thinking", "thinking": "b", "signature": "s"}]), "b"),
    "reasoning": (said(reasoning="r"), "b"),
    "reasoning_content": (said(reasoning_content="r"), "b"),
    "cache_control": (said(role="user", cache_control={"type": "ephemeral"}), "b"),
    "name": (said(role="user", name="ada"), "b"),
    "developer": (said(role="developer"), "b"),
    "no calls": (said(tool_calls=[]), "b"),
    "call": (called(CALL), ""),
    "calls beside a text": (called(CALL, CALL | {"id": "c2"}, content="b"), "b"),
    "index of a call": (called(CALL | {"index": 0}), ""),
    "parsed arguments": (called(function(parsed_arguments={"a": 1})), ""),
    "null for parsed arguments": (called(function(parsed_arguments=None)), ""),
    "strict": (called(function(strict=None)), ""),
    "arguments that are an object": (called(function(arguments={"a": 1})), ""),
    "arguments that are no JSON": (called(function(arguments="{")), ""),
    "empty arguments": (called(function(arguments="")), ""),
    "null for arguments": (called(function(arguments=None)), ""),
    "call without a type": (called({"id": "c1", "function": {"name": "f", "arguments": "{}"}}), ""),
    "call without an id": (called({"function": {"name": "f", "arguments": "{}"}}), ""),
    "caller": (called(CALL | {"caller": None}), ""),
    "result": (said("1", "tool", tool_call_id="c1"), "1"),
    "result with a name": (said("1", "tool", tool_call_id="c1", name="f"), "1"),
    "result in parts": (said([{"type": "text", "text": "1"}], "tool", tool_call_id="c1"), "1"),
    "result without an id": (said("1", "tool"), "1"),
    "is_error of a result": (said("1", "tool", tool_call_id="c1", is_error=True), "1"),
    "function": (said("1", "function", name="f"), "1"),
    "function_call": (said(None, function_call={"name": "f", "arguments": "{}"}), ""),
    "id of a message": (said(id="m1", created=5), "b"),
}
"""Messages of a history, and the text that each is."""


@pytest.mark.parametrize("kind", MESSAGES)
def test_histories_are_taken(kind: str) -> None:
    message, text = MESSAGES[kind]
    request = read(READER, "chat", messages=[ASK, message, ASK])
    assert bytes(request.prompts[0]).decode() == f"How?\n{text}\nHow?"


@pytest.mark.parametrize(
    "fields",
    [
        {"top_logprobs": 0},
        {"logprobs": False, "top_logprobs": 0},
        {"functions": []},
        {"functions": [{"name": "f", "parameters": {}}]},
        {"functions": [{"name": "f"}], "function_call": "auto"},
        {"functions": [{"name": "f"}], "function_call": "none"},
        {"tools": []},
        {"tools": [{"type": "function", "function": {"name": "f"}, "cache_control": {"type": "ephemeral"}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "cache_control": {"type": "ephemeral"}}}]},
    ],
)
def test_requests_with_a_history_are_taken(fields: dict[str, Any]) -> None:
    assert read(READER, "chat", messages=[ASK, CALLED, RESULT], **fields).top_logprobs is None


def test_functions_are_tools_under_an_older_name() -> None:
    functions = [{"name": "f", "parameters": {"type": "object"}}, {"name": "g"}]
    older = read(READER, "chat", functions=functions, function_call={"name": "f"})
    tools = [{"type": "function", "function": each} for each in functions]
    choice = {"type": "function", "function": {"name": "f"}}
    assert older == read(READER, "chat", tools=tools, tool_choice=choice)


class Form(BaseModel):
    """What OpenAI's client parses an answer as."""

    a: int


async def test_openai_objects_are_sent_back() -> None:
    """Messages as create, parse and the accumulator of a stream return them, and with calls that were parsed."""
    chat: dict[str, Any] = {"model": MODEL, "max_completion_tokens": 400, "stop": " "}
    arguments = {"name": "f", "arguments": "{}", "parsed_arguments": {"a": 1}}
    calls = [CALL | {"index": 0, "function": arguments}]
    members: dict[str, Any] = {"role": "assistant", "tool_calls": calls, "parsed": {"a": 1}, "annotations": []}
    parsed = ParsedChatCompletionMessage[Form].model_validate(members)
    plain = ChatCompletionMessage.model_validate({**CALLED, "function_call": {"name": "f", "arguments": "{}"}})
    async with answering(NgramEngine(), **TEXT) as app, app.openai() as client:
        ask: list[Any] = [ASK]
        whole = await client.chat.completions.create(messages=ask, **chat)
        parse = await client.chat.completions.parse(messages=ask, **chat)
        async with client.chat.completions.stream(messages=ask, **chat) as stream:
            final = await (await stream.until_done()).get_final_completion()
        for message in (*(each.choices[0].message for each in (whole, parse, final)), parsed, plain):
            for sent in (message, message.model_dump()):
                again: list[Any] = [ASK, sent, *([RESULT] if message.tool_calls else []), ASK]
                assert (await client.chat.completions.create(messages=again, **chat)).choices
        response = await client.responses.parse(model=MODEL, input="How?", max_output_tokens=8)
        assert isinstance(response, ParsedResponse)
        call: Any = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}", "parsed_arguments": {}}
        output: Any = {"type": "function_call_output", "call_id": "c1", "output": "1"}
        thought: Any = {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "e"}
        for items in (response.output, [each.model_dump() for each in response.output], [thought, call, output]):
            conversation: Any = [ASK, *items, ASK]
            assert (await client.responses.create(model=MODEL, input=conversation, max_output_tokens=8)).output


async def test_anthropic_objects_are_sent_back() -> None:
    """Messages as create and the accumulator of a stream return them, and with thoughts and calls."""
    ask: list[Any] = [{"role": "user", "content": "How?"}]
    thought = {"type": "thinking", "thinking": "t", "signature": "s"}
    use = {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}, "caller": {"type": "direct"}}
    text = {"type": "text", "text": "b", "citations": None, "parsed_output": {"a": 1}}
    usage = {"input_tokens": 1, "output_tokens": 1}
    members = {"id": "m", "type": "message", "role": "assistant", "model": MODEL, "content": [thought, text, use]}
    made = [kind.model_validate(members | {"usage": usage}) for kind in (Message, ParsedMessage[Form])]
    result: Any = {"type": "tool_result", "tool_use_id": "c1", "content": [], "is_error": False}
    async with answering(NgramEngine(), **TEXT) as app:
        client = app.anthropic()
        whole = await client.messages.create(model=MODEL, messages=ask, max_tokens=8)
        async with client.messages.stream(model=MODEL, messages=ask, max_tokens=8) as stream:
            final = await stream.get_final_message()
        for message in (whole, final, *made):
            for content in (message.content, [each.model_dump() for each in message.content]):
                back: Any = [result] if message in made else "More."
                messages: list[Any] = [
                    *ask,
                    {"role": "assistant", "content": content},
                    {"role": "user", "content": back},
                ]
                assert (await client.messages.create(model=MODEL, messages=messages, max_tokens=8)).content
