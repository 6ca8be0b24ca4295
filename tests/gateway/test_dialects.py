"""Anthropic's API on an in-process bus: its own client is told what a chat is told."""

from typing import Any

from tests.gateway.answering import answering
from tokenbus.engines.ngram import NgramEngine
from tokenbus.gateway.vocabulary import vocabulary_of

MODEL = "tokenbus"
PROMPT = "How do you learn a language?"
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0.0}
CHAT: dict[str, Any] = {**GREEDY, "messages": [{"role": "user", "content": PROMPT}]}
MESSAGE: dict[str, Any] = {
    "model": MODEL, "messages": CHAT["messages"], "extra_body": {"temperature": 0.0}
}  # fmt: skip
"""The client has no parameter of that name any more."""
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
