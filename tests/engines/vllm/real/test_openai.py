"""What OpenAI's client, as it is on PyPI, has beside plain calls: the same from the gateway as from vLLM's own server.

Plain calls of it, with all their parameters, are in test_clients.py.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.engines.vllm.real.servers import Servers

Client = Any  # OpenAI's, whose overloads take no mapping of parameters
TEXT: dict[str, Any] = {"prompt": "the cat sat", "max_tokens": 6, "temperature": 0}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "sat on"}], "max_tokens": 60, "temperature": 0}
ANSWER: dict[str, Any] = {"input": "sat on", "max_output_tokens": 60, "temperature": 0}
NO_SPACES = dict.fromkeys(("198", "199", "202", "221"), -100)
"""Without these tokens of white space, the model hardly ever ends an object of JSON."""


class Place(BaseModel):
    """What a model is to write."""

    sea: bool


def text(whole: Any) -> list[tuple[str, str]]:  # noqa: ANN401 - an answer of the client's
    return [(choice.text, choice.finish_reason) for choice in whole.choices]


def chat_stream(client: Client, model: str) -> object:
    form = {"structured_outputs": {"choice": ["by the bus"]}}  # whole: the client refuses what its length ended
    with client.chat.completions.stream(model=model, **CHAT, extra_body=form) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        (choice,) = stream.get_final_completion().choices
        return "".join(deltas), choice.message.content, choice.finish_reason


def response_stream(client: Client, model: str) -> object:
    bias = {"logit_bias": NO_SPACES}
    with client.responses.stream(model=model, **ANSWER, text_format=Place, extra_body=bias) as stream:
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


CHECKS: dict[str, Callable[[Client, str], object]] = {
    "chat's stream": chat_stream,
    "parsed": lambda c, m: c.chat.completions.parse(
        model=m, **CHAT, response_format=Place, logit_bias=NO_SPACES
    ).choices[0].message.parsed,
    "response": lambda c, m: c.responses.create(model=m, **ANSWER).output_text,
    "response's stream": response_stream,
    "raw answer": lambda c, m: text(c.completions.with_raw_response.create(model=m, **TEXT).parse()),
    "lines of a stream": lines_of_stream,
    "several at once": several_at_once,
}  # fmt: skip


@pytest.mark.parametrize("name", CHECKS)
def test_same_by_openais_client(servers: Servers, name: str) -> None:
    theirs, ours = (CHECKS[name](server.openai, servers.model) for server in servers[:2])
    assert ours == theirs
    assert ours
