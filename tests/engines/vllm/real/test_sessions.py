"""An agent's session has the ids that the real vLLM sampled; scored as a prompt, they have the same logprobs."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from signal import SIGKILL
from typing import Any

import httpx2
import numpy as np
import pytest

from tests.engines.vllm.real.agent import LABEL, Agent, Turn
from tests.engines.vllm.real.runs import ENDS, arguments
from tests.engines.vllm.real.servers import MOST, OPTIONS, PARSER, Servers, below, deployed
from tests.support.waiting import until
from tests.system.deployment import Deployment
from tokenbus.client import Client
from tokenbus.engines.vllm.sessions import SESSION
from tokenbus.recordings.items import StreamItem
from tokenbus.recordings.session_turns import TurnReader
from tokenbus.recordings.sessions import Session, sessions_of
from tokenbus.settings import Settings

TURNS = 20
CLOSE = 1e-3


@asynccontextmanager
async def recorded(settings: Settings) -> AsyncIterator[list[Session]]:
    """Record until all turns have ended; then the list has all sessions."""
    items: list[StreamItem] = []
    sessions: list[Session] = []

    def ended() -> int:
        rows = [row for item in items if item.batch is not None for row in item.batch.rows()]
        return sum(row.status in ENDS.values() for row in rows)

    async with Client(settings) as client, client.watch() as watched:

        async def collect() -> None:
            async for item in watched:
                items.append(item)  # noqa: PERF401 - it is cancelled

        collecting = asyncio.create_task(collect())
        await client.status()  # now the processor knows who watches
        yield sessions
        await until(lambda: ended() == TURNS)
        collecting.cancel()
    with TurnReader() as reader:
        for item in items:
            reader.add(item)
        sessions += sessions_of(reader)


def check(session: Session, turns: Sequence[Turn]) -> None:
    """Compare a session with the answers, and its branches with those that follow from the answers' ids."""
    assert session.name.label == LABEL
    assert session.missing == []
    sequences: list[list[int]] = []
    last_turns: list[int] = []
    """The last turn of each branch so far."""
    masks: list[list[bool]] = []
    """Whether the model wrote each token, for each branch."""
    for number, (request, turn) in enumerate(zip(session.requests, turns, strict=True)):
        shared = [_shared(sequence, turn.prompt) for sequence in sequences]
        continued = [branch for branch, last in enumerate(last_turns) if shared[last] == len(sequences[last])]
        branch = session.branches[request.branch]
        if continued:
            assert request.branch in continued
            assert turn.edited is None
        else:
            assert request.branch == len(last_turns)
            last_turns.append(number)
            masks.append([])
        if branch.divergence is not None and not continued:
            assert branch.divergence.position == max(shared)
            masks[-1] += masks[branch.divergence.branch][: max(shared)]
        if turn.edited is not None:
            begin, end = turn.edited
            assert begin <= max(shared) <= end
        last_turns[request.branch] = number
        sequences.append(turn.prompt + turn.output)
        mask = masks[request.branch]
        mask += [False] * (len(turn.prompt) - len(mask)) + [True] * len(turn.output)

        assert request.begin == len(turn.prompt)
        end = request.begin + request.output_tokens
        assert branch.token_ids[:end].tolist() == sequences[-1]
        logprobs = np.array(turn.logprobs, np.float32) if turn.has_logprobs else np.full(len(turn.output), np.nan)
        assert np.array_equal(branch.logprobs[request.begin : end], logprobs, equal_nan=True)
    assert [branch.is_output.tolist() for branch in session.branches] == masks
    assert max(len(branch.requests) for branch in session.branches) > 2


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of leading ids that two sequences have in common."""
    differing = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, min(len(one), len(other)))


async def check_replayed(http: httpx2.AsyncClient, model: str, session: Session, turns: Sequence[Turn]) -> None:
    """Compare the logprobs with those of the same ids in prompts."""
    body: dict[str, Any] = {"model": model, "max_tokens": 1, "prompt_logprobs": 0}
    body["prompt"] = [branch.token_ids.tolist() for branch in session.branches]
    choices = (await http.post("/v1/completions", json=body)).json()["choices"]
    replays = [_logprobs(choice["prompt_logprobs"]) for choice in choices]
    for request, turn in zip(session.requests, turns, strict=True):
        logprobs = np.array(turn.logprobs)
        replayed = replays[request.branch][request.begin : request.begin + logprobs.size]
        assert np.all(replayed <= logprobs + CLOSE)
        if turn.is_free:
            assert np.all(replayed >= logprobs - CLOSE)


def _logprobs(of_prompt: Sequence[Any]) -> np.ndarray:
    """Return the logprob of each token of a prompt; its first token has none."""
    return np.array([np.nan, *(score["logprob"] for scores in of_prompt[1:] for score in scores.values())])


async def prove(servers: Servers, settings: Settings, http: httpx2.AsyncClient, **body: object) -> None:
    async with http:
        async with recorded(settings) as sessions:
            turns = await Agent(servers, http, **body).run(TURNS)
        (session,) = sessions
        check(session, turns)
        await check_replayed(http, servers.model, session, turns)


async def test_session_through_the_gateway(servers: Servers) -> None:
    await prove(servers, servers.settings, httpx2.AsyncClient(base_url=servers.ours.url, timeout=MOST))


@pytest.fixture
def tapped(servers: Servers) -> Iterator[Deployment]:
    """Run a processor and vLLM's own server with the scheduler; its socket is in the deployment's folder."""
    with deployed() as deployment:
        deployment.start_processor()
        command = [sys.executable, "-m", "tests.engines.vllm.real.api_server", "--model", str(servers.folder)]
        command += ["--served-model-name", servers.model, "--enable-auto-tool-choice", "--tool-call-parser", PARSER]
        command += ["--uds", f"{deployment.folder}/http", "--scheduler-cls", "tokenbus.engines.vllm.scheduler"]
        program = deployment.start("vllm", [*command, *arguments(OPTIONS)])
        program.wait_for("Application startup complete")
        yield deployment
        for pid in below(program.pid):  # as in servers.py
            os.kill(pid, SIGKILL)


async def test_session_of_a_deployed_server(servers: Servers, tapped: Deployment) -> None:
    transport = httpx2.AsyncHTTPTransport(uds=f"{tapped.folder}/http")
    http = httpx2.AsyncClient(transport=transport, base_url="http://vllm", timeout=MOST)
    await prove(servers, tapped.settings(), http, vllm_xargs={SESSION: LABEL})
