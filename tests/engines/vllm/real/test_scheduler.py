"""The scheduler of a vLLM that is deployed already: its answers as without it, and every token's columns on the bus."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from signal import SIGKILL
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from tests.engines.vllm.real.hosts import Host
from tests.engines.vllm.real.runs import ENDS, SHARED, Answer, Case, add, arguments, check, reference, stop_of
from tests.engines.vllm.real.servers import MOST, below, deployed
from tests.engines.vllm.real.test_engine import GREEDY, LONG, SEEDED, SHORT, SPECULATION
from tests.support import waiting
from tests.support.waiting import soon, until
from tests.system.deployment import Deployment
from tests.system.programs import Program
from tokenbus.client import Client
from tokenbus.delivery import Step
from tokenbus.engines.vllm.published import own_class
from tokenbus.engines.vllm.request_ids import ARGUMENT, request_id
from tokenbus.engines.vllm.sessions import PARENT, SESSION
from tokenbus.processor import Processor
from tokenbus.recordings.session_turns import TurnReader
from tokenbus.recordings.sessions import Span, sessions_of
from tokenbus_contracts import PromptScores, RowStatus

OURS = "tokenbus.engines.vllm.scheduler"
TOP_K = 5
"""As many alternatives are published."""


class Audit:
    """What a reader of all steps has seen of each request."""

    def __init__(self) -> None:
        self.answers: dict[int, Answer] = {}

    async def read(self, steps: AsyncIterator[Step]) -> None:
        async for step in steps:
            for row in step.rows.rows():
                add(self.answers.setdefault(row.request_id, Answer()), row)

    def ended(self, key: int) -> bool:
        return key in self.answers and self.answers[key].status in {*ENDS.values(), RowStatus.ABORTED}


@pytest.fixture
def deployment(monkeypatch: pytest.MonkeyPatch) -> Iterator[Deployment]:
    monkeypatch.setattr(waiting, "MOST", MOST)
    with deployed(worker__top_logprobs=TOP_K, bus__heartbeat_timeout_ms=60_000) as made:
        monkeypatch.delenv("TOKENBUS_NEEDS_VLLM", raising=False)  # it would be a setting that there is not
        monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")  # serves the routes of a trainer
        for name, value in made.environment().items():
            monkeypatch.setenv(name, value)
        yield made


@asynccontextmanager
async def audited(deployment: Deployment) -> AsyncIterator[Audit]:
    audit = Audit()
    async with Processor(deployment.settings()) as processor:
        reading = asyncio.create_task(audit.read(processor.steps()))
        yield audit
    await reading


def named(cases: Sequence[Case], first_key: int) -> list[Case]:
    return [
        replace(case, theirs={**case.theirs, "extra_args": {ARGUMENT: key}})
        for key, case in enumerate(cases, first_key)
    ]


async def compared(model: Path, deployment: Deployment, options: Mapping[str, Any], *groups: list[Case]) -> Audit:
    """Run requests in vLLM with and without the scheduler, and hold its answers and the columns to vLLM's own.

    Those of the first group come with stop tokens and stop strings, too.
    """
    options = {**options, "enable_prefix_caching": False}  # no answer is to depend on the group before it
    scored = [[replace(case, top_logprobs=TOP_K) for case in group] for group in groups]
    found = await asyncio.to_thread(reference, model, options, *groups, *scored, stops_of=len(groups))
    plain, columns = found[: len(groups)] + found[-1:], found[len(groups) :]
    keyed = [named(cases, 100 * number) for number, (cases, _) in enumerate(plain, 1)]
    async with audited(deployment) as audit:
        published = await asyncio.to_thread(reference, model, {**options, "scheduler_cls": OURS}, *keyed)
    for (cases, answers), (_, plainly), (_, all_scored) in zip(published, plain, columns, strict=True):
        for case, answer, without, with_columns in zip(cases, answers, plainly, all_scored, strict=True):
            check(case, answer, without)
            assert answer.text == without.text
            seen = audit.answers[case.theirs["extra_args"][ARGUMENT]]
            seen.stop = stop_of(case, seen)
            check(replace(case, top_logprobs=TOP_K), seen, with_columns)
    return audit


async def test_same_columns_and_answers(model: Path, deployment: Deployment) -> None:
    plain = [
        Case(prompt, {**sampling, "max_tokens": 12}, k)
        for prompt, k in zip(SHORT, (None, 0, 3, 20), strict=True)
        for sampling in (GREEDY, SEEDED)
    ]
    chunked = [Case(LONG, {**GREEDY, "max_tokens": 8}, k) for k in (2, None)]
    await compared(model, deployment, SHARED, plain, chunked)


async def test_same_with_drafts_and_preemption(model: Path, deployment: Deployment) -> None:
    options = {**SHARED, "num_gpu_blocks_override": 10, "speculative_config": SPECULATION}
    cases = [
        Case([place, *[7, 8, 9] * 10], {**GREEDY, "max_tokens": 90}, k) for place, k in enumerate((None, 2, None, 20))
    ]
    audit = await compared(model, deployment, options, cases)
    assert any(answer.drafts > 0 for answer in audit.answers.values())
    assert any(answer.was_preempted for answer in audit.answers.values())


@pytest.fixture
def server(deployment: Deployment, model: Path) -> Iterator[Program]:
    """Start vLLM's own server with the scheduler, and wait until it serves; there is no processor."""
    command = [sys.executable, "-m", "tests.engines.vllm.real.api_server", "--model", str(model)]
    command += arguments({**SHARED, "dtype": "float32", "scheduler_cls": OURS, "uds": f"{deployment.folder}/http"})
    started = deployment.start("vllm", command)
    started.wait_for("Application startup complete")
    yield started
    for pid in below(started.pid):  # as in servers.py
        os.kill(pid, SIGKILL)


@pytest.mark.parametrize(("is_async", "name"), [(True, "AsyncScheduler"), (False, "Scheduler")])
def test_base_is_what_vllm_would_choose(host: Host, is_async: bool, name: str) -> None:  # noqa: FBT001 - a parameter
    assert host(base_of, is_async) == (name, OURS)


def base_of(is_async: bool) -> tuple[str, str]:  # noqa: FBT001 - as above
    from vllm.config import SchedulerConfig

    config = SchedulerConfig.default_factory(async_scheduling=is_async, scheduler_cls=OURS)
    return own_class(SimpleNamespace(scheduler_config=config)).__name__, config.scheduler_cls


class Http:
    """Asks vLLM's server for completions."""

    def __init__(self, client: httpx.AsyncClient, model: str) -> None:
        self.client = client
        self._asked = {"model": model, "temperature": 0, "ignore_eos": True, "return_token_ids": True}

    def body(self, **parameters: object) -> dict[str, Any]:
        return {**self._asked, "prompt": "the cat", **parameters}

    async def completion(self, headers: Mapping[str, str] | None = None, **parameters: object) -> list[dict[str, Any]]:
        answer = await self.client.post("/v1/completions", json=self.body(**parameters), headers=headers)
        assert answer.status_code == 200, answer.text
        choices: list[dict[str, Any]] = answer.json()["choices"]
        return choices


@pytest.fixture
async def http(deployment: Deployment, model: Path) -> AsyncIterator[Http]:
    transport = httpx.AsyncHTTPTransport(uds=f"{deployment.folder}/http")
    async with httpx.AsyncClient(transport=transport, base_url="http://vllm", timeout=waiting.MOST) as client:
        yield Http(client, str(model))


@pytest.mark.usefixtures("server")
async def test_deployed_server(http: Http, deployment: Deployment) -> None:
    """A server serves without a processor, and one that comes, is killed and comes again misses no token."""
    (before,) = await http.completion(max_tokens=9, vllm_xargs={ARGUMENT: 7})
    (scored,) = await http.completion(max_tokens=9, logprobs=2, return_tokens_as_token_ids=True, stop=["never"])
    assert scored["token_ids"] == before["token_ids"]
    async with audited(deployment) as audit:
        await until(lambda: len(audit.answers) == 2 and all(map(audit.ended, audit.answers)))
        assert audit.answers[7].tokens == before["token_ids"]
        (other,) = (answer for key, answer in audit.answers.items() if key != 7)
        assert other.logprobs == scored["logprobs"]["token_logprobs"]
        tops = [{f"token_id:{token}": value for token, value in each.items()} for each in other.alternatives]
        for mine, theirs in zip(tops, scored["logprobs"]["top_logprobs"], strict=True):
            assert len(theirs) in {2, 3}, "what was asked for, and the token itself"
            assert theirs.items() <= mine.items()

        choices = await http.completion({"X-Request-Id": "x"}, max_tokens=5, n=2, temperature=1, seed=1)
        keys = [request_id(f"{number}_cmpl-x-0") for number in range(2)]
        await until(lambda: all(map(audit.ended, keys)))
        assert [audit.answers[key].tokens for key in keys] == [choice["token_ids"] for choice in choices]

        stop = before["text"][4:7]
        (stopped,) = await http.completion({"X-Request-Id": "y"}, max_tokens=9, stop=[stop])
        await until(lambda: audit.ended(request_id("cmpl-y-0")))
        seen = audit.answers[request_id("cmpl-y-0")]
        assert (seen.status, seen.tokens) == (RowStatus.FINISHED_STOP, stopped["token_ids"])

        body = http.body(max_tokens=200, stream=True, vllm_xargs={ARGUMENT: 8})
        async with http.client.stream("POST", "/v1/completions", json=body) as stream:
            await anext(stream.aiter_lines())
        await until(lambda: audit.ended(8))
        assert audit.answers[8].status is RowStatus.ABORTED

    processor = deployment.start_processor()
    async with Client(deployment.settings()) as client:
        asked = asyncio.create_task(http.completion(max_tokens=200, vllm_xargs={ARGUMENT: 9}))
        generation = client.resume(9, 0)
        tokens = [await soon(anext(generation))]
        processor.kill()
        deployment.start_processor()
        tokens += [token async for token in generation]
        (choice,) = await asked
    assert [token.id for token in tokens] == choice["token_ids"]
    assert generation.status is RowStatus.FINISHED_LENGTH
    assert all(len(token.alternatives) == TOP_K for token in tokens)


@pytest.mark.usefixtures("server")
async def test_session_and_weight_versions_arrive(http: Http, deployment: Deployment) -> None:
    """An agent's turns are one sequence; readers have the scores of a prompt, and the weights of each token."""
    deployment.start_processor()
    scores: list[PromptScores] = []
    with TurnReader("run 7") as reader:
        async with Client(deployment.settings()) as client, client.watch() as items:
            (first,) = await http.completion(max_tokens=5, vllm_xargs={ARGUMENT: 1, SESSION: "run 7"})
            answer = await http.client.post("/update_weight_version", json={"new_version": "3"})
            assert answer.status_code == 200, answer.text
            prompt = [*first["prompt_token_ids"], *first["token_ids"]]
            arguments = {ARGUMENT: 2, SESSION: "run 7", PARENT: f"{1:016x}"}
            (second,) = await http.completion(prompt=prompt, max_tokens=6, prompt_logprobs=2, vllm_xargs=arguments)
            last = RowStatus.ACTIVE
            while last is RowStatus.ACTIVE:
                item = await soon(anext(items))
                reader.add(item)
                if item.event is not None and item.event.HasField("prompt_scores"):
                    scores.append(PromptScores.of(item.event.prompt_scores))
                for row in item.batch.rows() if item.batch is not None else ():
                    last = row.status if row.request_id == 2 else last
        (session,) = sessions_of(reader)
    assert session.is_complete, session.missing
    (branch,) = session.branches
    begin = len(first["prompt_token_ids"])
    assert branch.token_ids.tolist() == [*prompt, *second["token_ids"]]
    assert np.flatnonzero(branch.is_output).tolist() == list(range(begin, branch.token_ids.size))
    assert branch.weight_versions == [Span(begin, 0), Span(len(prompt), 3)]
    assert [(each.request_id, each.parent) for each in session.requests] == [(1, 0), (2, 1)]

    (scored,) = scores
    assert (scored.request_id, scored.token_ids.tolist()) == (2, prompt[1:])
    for place, (token_id, found) in enumerate(zip(prompt[1:], second["prompt_logprobs"][1:], strict=True)):
        assert np.float32(found[str(token_id)]["logprob"]) == scored.logprobs[place]
        assert found[str(token_id)]["rank"] == scored.ranks[place]
        tops = zip(scored.alternative_token_ids[place], scored.alternative_logprobs[place], strict=True)
        for top, value in tops:
            assert np.float32(found[str(top)]["logprob"]) == value
