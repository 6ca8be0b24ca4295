"""The other APIs on an in-process bus: Anthropic's and OpenAI's own clients are told what a chat is told."""

from typing import Any

import anthropic
import openai
import pytest

from tests.gateway.answering import answering
from tokenbus.engines.ngram import NgramEngine
from tokenbus.gateway.vocabulary import vocabulary_of

MODEL = "tokenbus"
PROMPT = "How do you learn a language?"
LOGPROBS: Any = "message.output_text.logprobs"
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0.0}
CHAT: dict[str, Any] = {**GREEDY, "messages": [{"role": "user", "content": PROMPT}]}
MESSAGE: dict[str, Any] = {
    "model": MODEL, "messages": CHAT["messages"], "extra_body": {"temperature": 0.0}
}  # fmt: skip
"""The client has no parameter of that name any more."""
ASKED: dict[str, Any] = {**GREEDY, "input": PROMPT}
TEXT: dict[str, Any] = {"gateway__tokenizer": "ngram"}


async def test_message_is_what_a_chat_says() -> None:
    async with answering(NgramEngine(), **TEXT) as app:
        client = app.anthropic()
        chat = await app.openai().chat.completions.create(**CHAT, max_completion_tokens=24)
        whole = await client.messages.create(**MESSAGE, max_tokens=24)
        async with client.messages.stream(**MESSAGE, max_tokens=24) as stream:
            said = [piece async for piece in stream.text_stream]
            last = await stream.get_final_message()
        (block,) = whole.content
        assert block.type == "text"
        stop = block.text[10:14]
        stopped = await client.messages.create(**MESSAGE, max_tokens=24, stop_sequences=[stop, "never this"])
        counted = await client.messages.count_tokens(model=MODEL, messages=CHAT["messages"], system="Answer.")
    assert block.text == chat.choices[0].message.content == "".join(said)
    assert (whole.role, whole.stop_reason, whole.stop_sequence) == ("assistant", "max_tokens", None)
    assert chat.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (chat.usage.prompt_tokens, 24)
    assert last.model_dump(exclude={"id"}) == whole.model_dump(exclude={"id"})
    assert len(said) > 1
    (cut,) = stopped.content
    assert cut.type == "text"
    assert cut.text == block.text[: block.text.find(stop)]
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert counted.input_tokens == len(vocabulary_of("ngram").encode(f"Answer.\n{PROMPT}"))


async def test_messages_errors_are_anthropics() -> None:
    tools: list[Any] = [{"name": "f", "input_schema": {"type": "object"}}]
    async with answering(NgramEngine(), **TEXT) as app:
        client = app.anthropic()
        with pytest.raises(anthropic.BadRequestError, match="stop_sequences") as raised:
            await client.messages.create(**MESSAGE, max_tokens=1, stop_sequences=[""])
        message = "stop_sequences[0]: expected str of length >= 1, got a length of 0"
        assert raised.value.body == {
            "type": "error",
            "error": {"type": "invalid_request_error", "message": message},
        }
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(**MESSAGE | {"model": "none"}, max_tokens=1)
        with pytest.raises(anthropic.BadRequestError, match="tool_choice: "):  # its engine has no forms
            await client.messages.create(**MESSAGE, max_tokens=1, tools=tools, tool_choice={"type": "any"})
        answer = await app.client().post("/v1/messages", content=b"{", headers={"content-type": "text/plain"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (415, "invalid_request_error")


async def test_response_is_what_a_chat_says() -> None:
    given: dict[str, Any] = {**ASKED, "max_output_tokens": 24, "include": [LOGPROBS], "top_logprobs": 2}
    tools: list[Any] = [{"type": "function", "name": "f", "description": "Tells it.", "strict": False}]
    async with answering(NgramEngine(), **TEXT) as app, app.openai() as client:
        chat = await client.chat.completions.create(**CHAT, max_completion_tokens=24, logprobs=True, top_logprobs=2)
        whole = await client.responses.create(**given)
        async with client.responses.stream(**given) as stream:
            events = [event async for event in stream]
        more: list[Any] = [{"role": "user", "content": PROMPT}, *whole.output, {"role": "user", "content": "More."}]
        again = await client.responses.create(**GREEDY, tools=tools, input=more)
    last, choice = events[-1], chat.choices[0]
    assert last.type == "response.incomplete"
    assert whole.output_text == choice.message.content == last.response.output_text
    assert whole.usage is not None
    assert chat.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (chat.usage.prompt_tokens, 24)
    assert whole.incomplete_details is not None
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    (item,) = whole.output
    assert item.type == "message"
    (part,) = item.content
    assert part.type == "output_text"
    assert choice.logprobs is not None
    assert [each.model_dump() for each in part.logprobs or ()] == [
        each.model_dump() for each in choice.logprobs.content or ()
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert again.tools[0].model_dump(exclude_none=True) == tools[0]
    assert again.usage is not None
    assert again.usage.input_tokens == len(vocabulary_of("ngram").encode(f"{PROMPT}\n{whole.output_text}\nMore."))


async def test_nothing_is_stored() -> None:
    tools: list[Any] = [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}]
    refused: tuple[dict[str, Any], ...] = (
        {"previous_response_id": "r"}, {"conversation": "c"}, {"background": True},
        {"tool_choice": "required", "tools": tools},  # its engine has no forms
    )  # fmt: skip
    async with answering(NgramEngine(), **TEXT) as app, app.openai() as client:
        made = await client.responses.create(**ASKED, max_output_tokens=1, store=True, metadata={"a": "b"})
        assert made.metadata == {"a": "b"}
        for fields in refused:
            with pytest.raises(openai.BadRequestError) as raised:
                await client.responses.create(**ASKED, **fields)
            assert raised.value.param == next(iter(fields))
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id)
