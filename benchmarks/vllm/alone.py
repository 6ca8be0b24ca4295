"""The engine stepped alone, in one thread: what a server would make if everything around its engine cost nothing."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import count as counting
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.http_clients import Answer
from tokenbus_contracts import RowStatus
from tokenbus_contracts.generated.request_pb2 import Generate
from tokenbus_services.model_files import ModelTokenizer
from tokenbus_services.settings import Settings
from tokenbus_services.worker import Engine

READY = "ready"
_OPEN = (RowStatus.ACTIVE, RowStatus.IDLE, RowStatus.PREFILLING, RowStatus.PREEMPTED)


@dataclass
class _Asked:
    """A request that the engine has, and the requests that follow it on the same stream."""

    following: Iterator[Generate]
    written: float
    first: float = 0.0
    tokens: int = 0
    events: int = 0


def step_alone(connection: Connection, model: Path, options: Sequence[str], settings: Settings) -> None:
    """Make vLLM's engine and send READY; then answer each list of bodies with what its requests saw, until None comes.

    This is a task of a `Child`: the engine belongs to that process's main thread.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")  # its log is the benchmark's own
    from tokenbus_engines.vllm import VllmEngine  # noqa: PLC0415 - vLLM is imported in this process alone

    tokenizer, keys = ModelTokenizer(model), counting(1)
    with closing(VllmEngine(model, options, settings)) as engine:
        connection.send(READY)
        while (bodies := connection.recv()) is not None:
            requests = [[_generate(next(keys), body, tokenizer) for body in own] for own in bodies]
            connection.send(answered(engine, requests))


def answered(engine: Engine, requests: Sequence[Sequence[Generate]]) -> list[Answer]:
    """Step an engine until it has answered each stream's requests, which it has one after the other."""
    asked: dict[int, _Asked] = {}
    answers: list[Answer] = []

    def ask(own: Iterator[Generate]) -> None:
        if (request := next(own, None)) is not None:
            asked[request.request_key] = _Asked(own, time.monotonic())
            engine.admit(request)

    for own in requests:
        ask(iter(own))
    while asked:
        for step in engine.step():
            now = time.monotonic()
            columns = (step.request_keys, step.token_counts, step.statuses)
            for key, count, status in zip(*(np.asarray(each).tolist() for each in columns), strict=True):
                request = asked[key]
                if count:
                    request.first = request.first or now
                    request.tokens += count
                    request.events += 1
                if status not in _OPEN:
                    del asked[key]
                    answers.append(Answer(request.written, request.first, now, request.tokens, request.events, 0))
                    ask(request.following)
    return answers


def _generate(key: int, body: dict[str, Any], tokenizer: ModelTokenizer) -> Generate:
    """Return a request's body as an engine has it: with its prompt's token ids, as a gateway sends them."""
    names = {"max_tokens": "max_tokens", "temperature": "temperature", "seed": "seed", "ignore_eos": "ignore_end_token"}
    text = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
    return Generate(
        request_key=key,
        tokens={"token_ids": tokenizer.encode(text)},
        sampling={ours: body[theirs] for theirs, ours in names.items()},
        top_logprobs=body.get("top_logprobs", body.get("logprobs")),
    )
