"""The gateway's other APIs in front of a running system: Anthropic's and OpenAI's own clients use them."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
import pytest
from anthropic import AsyncAnthropic

from tests.support.waiting import MOST
from tests.system.serving import Served, asking, plainly, served
from tokenbus.gateway.vocabulary import vocabulary_of

pytestmark = pytest.mark.xdist_group("gateway")
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
SCHEMA = {"type": "object", "properties": {}}


@pytest.fixture(scope="module")
def text() -> Iterator[Served]:
    """Run a system whose engine writes text."""
    with served(gateway__tokenizer="ngram") as system:
        system.deployment.start_worker("worker-0", "--engine", "ngram", "--steps-per-second", "0")
        yield system


@asynccontextmanager
async def messaging(url: str) -> AsyncIterator[AsyncAnthropic]:
    """Return Anthropic's client, which tries nothing twice."""
    async with AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=MOST) as client:
        yield client


async def test_message_is_what_a_chat_says(text: Served) -> None:
    async with messaging(text.url) as client, asking(text.url) as chats:
        chat = await chats.chat.completions.create(**CHAT, max_completion_tokens=24)
        whole = await client.messages.create(**MESSAGE, max_tokens=24)
        async with client.messages.stream(**MESSAGE, max_tokens=24) as stream:
            said = [piece async for piece in stream.text_stream]
            last = await stream.get_final_message()
    (block,) = whole.content
    assert block.type == "text"
    assert block.text == chat.choices[0].message.content == "".join(said)
    assert (whole.role, whole.stop_reason, whole.stop_sequence) == ("assistant", "max_tokens", None)
    assert chat.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (chat.usage.prompt_tokens, 24)
    assert last.model_dump(exclude={"id"}) == whole.model_dump(exclude={"id"})
    assert len(said) > 1


async def test_message_ends_before_its_stop_sequence(text: Served) -> None:
    async with messaging(text.url) as client:
        full = (await client.messages.create(**MESSAGE, max_tokens=60)).content[0]
        assert full.type == "text"
        stop = full.text[20:24]
        async with client.messages.stream(**MESSAGE, max_tokens=60, stop_sequences=[stop, "never this"]) as stream:
            found = await stream.get_final_message()
    (block,) = found.content
    assert block.type == "text"
    assert block.text == full.text[: full.text.find(stop)]
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop)


async def test_messages_tokens_are_counted(text: Served) -> None:
    given: dict[str, Any] = {"model": MODEL, "messages": CHAT["messages"], "system": "Answer."}
    async with messaging(text.url) as client:
        counted = await client.messages.count_tokens(**given)
        whole = await client.messages.create(**given, max_tokens=1)
    assert counted.input_tokens == whole.usage.input_tokens == len(vocabulary_of("ngram").encode(f"Answer.\n{PROMPT}"))


async def test_long_conversation_with_tools_is_read(text: Served) -> None:
    """What an agent sends after a call: its own answer with a call, and the result; long enough for an encoder."""
    answer: list[Any] = [
        {"type": "text", "text": PROMPT * 100}, {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    ]  # fmt: skip
    result: list[Any] = [{"type": "tool_result", "tool_use_id": "t", "content": "7"}]
    messages: list[Any] = [
        *CHAT["messages"], {"role": "assistant", "content": answer}, {"role": "user", "content": result}
    ]  # fmt: skip
    tools: list[Any] = [{"name": "f", "description": "Tells it." * 2000, "input_schema": SCHEMA}]
    async with messaging(text.url) as client:
        given: dict[str, Any] = {"model": MODEL, "messages": messages, "tools": tools}
        whole = await client.messages.create(**given, max_tokens=2)
        assert (await client.messages.count_tokens(**given)).input_tokens == whole.usage.input_tokens > 100


async def test_messages_errors_are_anthropics(text: Served) -> None:
    async with messaging(text.url) as client:
        with pytest.raises(anthropic.BadRequestError, match="stop_sequences") as raised:
            await client.messages.create(**MESSAGE, max_tokens=1, stop_sequences=[""])
        assert raised.value.body == {
            "type": "error",
            "error": {
                "type": "invalid_request_error",
                "message": "stop_sequences[0]: expected str of length >= 1, got a length of 0",
            },
        }
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(**MESSAGE | {"model": "none"}, max_tokens=1)
        with pytest.raises(anthropic.BadRequestError, match="tool_choice: "):  # its engine has no forms
            await client.messages.create(
                **MESSAGE,
                max_tokens=1,
                tools=[{"name": "f", "input_schema": {"type": "object"}}],
                tool_choice={"type": "any"},
            )
    async with plainly(text.url) as plain:
        answer = await plain.post("/v1/messages", content=b"{", headers={"content-type": "text/plain"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (415, "invalid_request_error")
        answer = await plain.get("/v1/messages")
        assert (answer.status_code, answer.json()["type"]) == (405, "error")


async def test_response_is_what_a_chat_says(text: Served) -> None:
    async with asking(text.url) as client:
        chat = await client.chat.completions.create(
            **CHAT, max_completion_tokens=24, logprobs=True, top_logprobs=2
        )  # fmt: skip
        given: dict[str, Any] = {**ASKED, "max_output_tokens": 24, "include": [LOGPROBS], "top_logprobs": 2}
        whole = await client.responses.create(**given)
        async with client.responses.stream(**given) as stream:
            events = [event async for event in stream]
        last = events[-1]
        assert last.type == "response.incomplete"
        tools: list[Any] = [{"type": "function", "name": "f", "description": "Tells it." * 2000, "strict": False}]
        again = await client.responses.create(  # long enough for an encoder
            **GREEDY,
            tools=tools,
            input=[{"role": "user", "content": PROMPT}, *whole.output, {"role": "user", "content": "More."}],
        )
    choice = chat.choices[0]
    assert whole.output_text == choice.message.content == last.response.output_text
    assert whole.usage is not None
    assert chat.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (chat.usage.prompt_tokens, 24)
    assert (whole.status, whole.incomplete_details and whole.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
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


async def test_nothing_is_stored(text: Served) -> None:
    async with asking(text.url) as client:
        made = await client.responses.create(**ASKED, max_output_tokens=1, store=True, metadata={"a": "b"})
        assert made.metadata == {"a": "b"}
        for refused in ({"previous_response_id": made.id}, {"conversation": "c"}, {"background": True}):
            (name,) = refused
            with pytest.raises(openai.BadRequestError, match=f"{name}: ") as raised:
                await client.responses.create(**ASKED, **refused)
            assert raised.value.param == name
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id)


async def test_function_that_an_engine_cannot_force_is_refused_by_its_field(text: Served) -> None:
    tools: list[Any] = [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}]
    async with asking(text.url) as client:
        with pytest.raises(openai.BadRequestError) as raised:
            await client.responses.create(
                **ASKED,
                tools=tools,
                tool_choice="required",
            )
    assert raised.value.param == "tool_choice"
