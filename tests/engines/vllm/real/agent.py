"""An agent that calls a tool, and keeps vLLM's own account of each of its requests."""

import json
from typing import Any, NamedTuple

import httpx2
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from tests.engines.vllm.real.servers import Servers
from tests.engines.vllm.real.test_clients import IDS, matching
from tokenbus.engines.vllm.sessions import SESSION

LABEL = "an agent's run"
CITY = {"type": "object", "properties": {"city": {"enum": ["Bern", "Oslo"]}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "tells it", "parameters": CITY}}
CALL = matching(r"\[weather\(city=\"(Bern|Oslo)\"\)\]")
SUMMARY, LAST_WORD, EARLIER_RESULT, LAST_ANSWER = 6, 9, 12, 16
"""The turns before which the history is edited, by the edited part."""


class Turn(NamedTuple):
    """A request and its answer, by vLLM's own account."""

    prompt: list[int]
    output: list[int]
    logprobs: list[float]
    has_logprobs: bool = True
    """Whether the session has them."""
    is_free: bool = True
    """Whether the answer had no form; with a form, vLLM scores each token among the allowed ones alone."""
    edited: tuple[int, int] | None = None
    """The begin of the first message that was edited since the turn before, and the begin of the next one."""


class Agent:
    """Asks a server with OpenAI's and Anthropic's clients, and edits its history before some turns."""

    def __init__(self, servers: Servers, http: httpx2.AsyncClient, **body: object) -> None:
        """Take a client of the server, and further members of all requests."""
        labelled = {"X-Session-Id": LABEL}
        options: dict[str, Any] = {"http_client": http, "max_retries": 0, "default_headers": labelled}
        self._openai = AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none", **options)
        self._anthropic = AsyncAnthropic(base_url=str(http.base_url), api_key="none", **options)
        self._vllm, self._model, self._body = servers.theirs, servers.model, body
        self._messages: list[Any] = [
            {"role": "system", "content": "the cat"},
            {"role": "user", "content": "sat on a mat"},
        ]

    async def run(self, turns: int) -> list[Turn]:
        # Texts of whole words are tokenized again as they were sampled.
        words = [self._tokens(prompt=f" {word}") for word in ("the", "cat", "sat", "on", "mat", "bus", "word")]
        text = {"allowed_token_ids": [0, *(ids[0] for ids in words if len(ids) == 1)]}
        made = []
        for number in range(turns):
            edited = self._edit(number)
            if number % 5 == 4:
                turn = await self._ask_anthropic()
            else:
                turn = await self._ask_openai(number, CALL if number % 3 == 1 else text)
            made.append(turn._replace(edited=edited))
        return made

    def _edit(self, number: int) -> tuple[int, int] | None:
        """Edit the history before some turns; return the first edited message's begin and end in the prompt."""
        messages = self._messages
        if number == SUMMARY:
            place = 1
            messages[1:-1] = [{"role": "user", "content": "it was round"}]
        elif number == LAST_WORD:
            place = len(messages) - 2
            messages[place] = {**messages[place], "content": messages[place]["content"].rsplit(" ", 1)[0] + " word"}
        elif number == EARLIER_RESULT:
            place = max(place for place, message in enumerate(messages) if message["role"] == "tool")
            messages[place] = {**messages[place], "content": "snow"}
        elif number == LAST_ANSWER:
            del messages[-2:]
            place = len(messages)
        else:
            return None
        before = self._tokens(messages=messages[:place], tools=[TOOL], add_generation_prompt=False)
        return len(before), len(self._tokens(messages=messages[: place + 1], tools=[TOOL]))

    def _tokens(self, **given: object) -> list[int]:
        found: list[int] = self._vllm.plain.post("/tokenize", json={"model": self._model, **given}).json()["tokens"]
        return found

    async def _ask_openai(self, seed: int, form: dict[str, Any]) -> Turn:
        # A label in the request's id does as well as further members.
        headers = {"X-Request-Id": f"{SESSION}:{LABEL}:{seed}"}
        chat, body = self._chat(), IDS | form | (self._body if seed % 2 else {})
        answer = await self._openai.chat.completions.create(
            **chat, seed=seed, max_tokens=30, logit_bias={"0": 3}, extra_body=body, extra_headers=headers
        )
        message = answer.choices[0].message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True)
        self._messages.append(message)
        for call in message.get("tool_calls", ()):
            call["id"] = str(seed)
            self._messages.append({"role": "tool", "tool_call_id": call["id"], "content": "rain"})
        if "tool_calls" not in message:
            self._messages.append({"role": "user", "content": "one more"})
        return _turn_of(answer)._replace(is_free=form is not CALL)

    async def _ask_anthropic(self) -> Turn:
        """Ask for a text. Its ids are those of vLLM's own server, because an answer to this client has none."""
        system, *others = self._messages
        tools: list[Any] = [{"name": "weather", "description": "tells it", "input_schema": CITY}]
        answer = await self._anthropic.messages.create(
            model=self._model,
            system=system["content"],
            messages=[_for_anthropic(message) for message in others],
            tools=tools,
            max_tokens=8,
            extra_body={"temperature": 0} | self._body,
        )
        same = self._vllm.openai.chat.completions.create(**self._chat(), temperature=0, max_tokens=8, extra_body=IDS)
        text = "".join(block.text for block in answer.content if block.type == "text")
        assert text == same.choices[0].message.content
        self._messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "and now"}]
        is_tapped = bool(self._body)
        return _turn_of(same)._replace(has_logprobs=is_tapped)

    def _chat(self) -> dict[str, Any]:
        return {"model": self._model, "messages": self._messages, "tools": [TOOL], "logprobs": True}


def _turn_of(answer: Any) -> Turn:  # noqa: ANN401 - OpenAI's, with members of vLLM
    (choice,) = answer.choices
    return Turn(answer.prompt_token_ids, choice.token_ids, [each.logprob for each in choice.logprobs.content])


def _for_anthropic(message: dict[str, Any]) -> Any:  # noqa: ANN401 - one of Anthropic's types
    if message["role"] == "tool":
        result = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
        return {"role": "user", "content": [result]}
    calls = [
        {"type": "tool_use", "id": call["id"], "name": "weather", "input": json.loads(call["function"]["arguments"])}
        for call in message.get("tool_calls", ())
    ]
    return {"role": message["role"], "content": calls or message["content"]}
