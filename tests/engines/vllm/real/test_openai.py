"""OpenAI's client as it is on PyPI, what it offers one by one: the same from the gateway as from vLLM's own server."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import openai
import pytest
from pydantic import BaseModel

from tests.engines.vllm.real.servers import CONTEXT, Servers

Client = Any  # OpenAI's, whose overloads take no mapping of parameters
TEXT: dict[str, Any] = {"prompt": "the cat sat", "max_tokens": 6, "temperature": 0}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "sat on"}], "max_tokens": 6, "temperature": 0}
ANSWER: dict[str, Any] = {"input": "sat on", "max_output_tokens": 6, "temperature": 0}
NOW = {"type": "function", "function": {"name": "now"}}
CLOCK = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
NO_SPACES = dict.fromkeys(("198", "199", "202", "221"), -100)
"""Without these tokens of white space, the model hardly ever ends an object of JSON."""
LONG = [{"role": "user", "content": "the cat " * CONTEXT}]


class Place(BaseModel):
    """What a model is to write."""

    sea: bool


def text(whole: Any) -> list[tuple[str, str]]:  # noqa: ANN401 - an answer of the client's
    return [(choice.text, choice.finish_reason) for choice in whole.choices]


def said(whole: Any) -> list[tuple[str | None, str]]:  # noqa: ANN401
    return [(choice.message.content, choice.finish_reason) for choice in whole.choices]


def scores(values: Any) -> list[float | None]:  # noqa: ANN401
    """Return logprobs as the numbers of 32 bits that they are."""
    return [None if value is None else float(np.float32(value)) for value in values]


def scored(choice: Any) -> object:  # noqa: ANN401
    found = choice.logprobs
    return (
        found.tokens,
        scores(found.token_logprobs),
        found.text_offset,
        [sorted(top or {}) for top in found.top_logprobs],
    )


def streamed(chunks: Any) -> str:  # noqa: ANN401
    return "".join(choice.text for chunk in chunks for choice in chunk.choices)


def usage_of_stream(client: Client, model: str) -> object:
    *_, last = client.completions.create(model=model, **TEXT, stream=True, stream_options={"include_usage": True})
    return last.choices, last.usage.total_tokens


def chat_stream(client: Client, model: str) -> object:
    form = {"structured_outputs": {"choice": ["by the bus"]}}  # whole: the client refuses what its length ended
    with client.chat.completions.stream(model=model, **CHAT | {"max_tokens": 20}, extra_body=form) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        return "".join(deltas), said(stream.get_final_completion())


def response_stream(client: Client, model: str) -> object:
    given = ANSWER | {"max_output_tokens": 60, "extra_body": {"logit_bias": NO_SPACES}}
    with client.responses.stream(model=model, **given, text_format=Place) as stream:
        kinds = {event.type for event in stream}
        return kinds, stream.get_final_response().output_parsed


def lines_of_stream(client: Client, model: str) -> object:
    with client.completions.with_streaming_response.create(model=model, **TEXT, stream=True) as answer:
        lines = [line for line in answer.iter_lines() if line]
    return answer.status_code, lines[-1]


def several_at_once(client: Client, model: str) -> object:
    async def ask() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key="none") as several:
            prompts = ("the cat", "a mat", "the bus", "words")
            return await asyncio.gather(
                *(several.completions.create(model=model, **TEXT | {"prompt": prompt}) for prompt in prompts)
            )

    return [text(whole) for whole in asyncio.run(ask())]


def refused(ask: Callable[[], object]) -> object:
    with pytest.raises(openai.APIStatusError) as raised:
        ask()
    return type(raised.value), raised.value.status_code


CHECKS: dict[str, Callable[[Client, str], object]] = {
    "models": lambda c, m: [(each.id, each.model_extra["max_model_len"]) for each in c.models.list() if each.id == m],
    "completion": lambda c, m: text(c.completions.create(model=m, **TEXT)),
    "usage": lambda c, m: c.completions.create(model=m, **TEXT).usage.total_tokens,
    "several choices": lambda c, m: text(c.completions.create(model=m, **TEXT | {"temperature": 1, "seed": 3, "n": 3})),
    "several prompts": lambda c, m: text(c.completions.create(model=m, **TEXT | {"prompt": ["a mat", "the bus"]})),
    "token ids": lambda c, m: text(c.completions.create(model=m, **TEXT | {"prompt": [5, 6, 7]})),
    "logprobs": lambda c, m: scored(c.completions.create(model=m, **TEXT, logprobs=3).choices[0]),
    "stop": lambda c, m: text(c.completions.create(model=m, **TEXT | {"max_tokens": 40, "stop": ["e"]})),
    "logit bias": lambda c, m: text(c.completions.create(model=m, **TEXT, logit_bias={"80": 100})),
    "echo": lambda c, m: text(c.completions.create(model=m, **TEXT, echo=True)),
    "scored prompt": lambda c, m: scored(c.completions.create(model=m, **TEXT, echo=True, logprobs=1).choices[0]),
    "prompt logprobs": lambda c, m: [
        sorted((name, float(np.float32(value["logprob"]))) for name, value in (place or {}).items())
        for place in c.completions.create(model=m, **TEXT, extra_body={"prompt_logprobs": 2}).choices[0].prompt_logprobs
    ],
    "tokens named by ids": lambda c, m: (
        c.completions
        .create(model=m, **TEXT, logprobs=0, extra_body={"return_tokens_as_token_ids": True})
        .choices[0].logprobs.tokens
    ),
    "stream": lambda c, m: streamed(c.completions.create(model=m, **TEXT, stream=True)),
    "usage of a stream": usage_of_stream,
    "chat": lambda c, m: said(c.chat.completions.create(model=m, **CHAT)),
    "chat's logprobs": lambda c, m: [
        (each.token, scores([each.logprob]))
        for each in c.chat.completions.create(model=m, **CHAT, logprobs=True).choices[0].logprobs.content
    ],
    "chat's stream": chat_stream,
    "harmless fields": lambda c, m: said(
        c.chat.completions.create(
            model=m, **CHAT, metadata={"a": "b"}, store=True, prompt_cache_key="k", service_tier="auto",
            safety_identifier="s",
        )
    ),
    "parsed": lambda c, m: c.chat.completions.parse(
        model=m, **CHAT | {"max_tokens": 60}, response_format=Place, logit_bias=NO_SPACES
    ).choices[0].message.parsed,
    "forced call": lambda c, m: [
        (call.function.name, call.function.arguments)
        for call in c.chat.completions
        .create(model=m, **CHAT | {"max_tokens": 60}, tools=[CLOCK], tool_choice=NOW, logit_bias=NO_SPACES)
        .choices[0].message.tool_calls
    ],
    "response": lambda c, m: c.responses.create(model=m, **ANSWER).output_text,
    "response's stream": response_stream,
    "raw answer": lambda c, m: text(c.completions.with_raw_response.create(model=m, **TEXT).parse()),
    "lines of a stream": lines_of_stream,
    "several at once": several_at_once,
    "refusals": lambda c, m: [
        refused(lambda: c.completions.create(model="other", prompt="a")),
        refused(lambda: c.completions.create(model=m, prompt="a", max_tokens=-1)),
        refused(lambda: c.chat.completions.create(model=m, messages=LONG)),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", CHECKS)
def test_same_by_openais_client(servers: Servers, name: str) -> None:
    theirs, ours = (CHECKS[name](server.openai, servers.model) for server in servers[:2])
    assert ours == theirs
    assert ours
