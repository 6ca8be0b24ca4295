"""Data-parallel ranks of the real vLLM: a worker for each, which answers as `LLM.generate`."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.vllm.real.runs import WHOLE, Answer, Case, add, arguments, check, reference, stop_of
from tests.engines.vllm.real.servers import MOST, deployed
from tests.system.deployment import COMMAND, Deployment
from tokenbus.client import Client, RequestEnd
from tokenbus.worker import engine_kind

CASES = [
    Case("the cat", {"temperature": 0.0, "max_tokens": 12}, top_logprobs=5),
    Case([5, 6, 7], {"temperature": 0.8, "seed": 7, "max_tokens": 12, "ignore_end_token": True}, top_logprobs=0),
    Case(list(range(3, 50)), {"temperature": 1.0, "top_p": 0.9, "seed": 3, "max_tokens": 12}),
]
UNSEEDED = Case([5, 6, 7], {"temperature": 1.0, "max_tokens": 12, "ignore_end_token": True})


@pytest.fixture
def deployment() -> Iterator[Deployment]:
    with deployed(worker__drain_timeout_ms=10_000) as made:
        yield made


async def answered(client: Client, cases: list[Case]) -> list[tuple[str, int, Answer]]:
    found: list[tuple[str, int, Answer]] = []
    async with client.steps() as steps:
        for case in cases:
            key, answer = len(found) + 1, Answer()
            client.submit(case.generate(key))
            while not isinstance(item := await asyncio.wait_for(anext(steps), MOST), RequestEnd):
                header = item.target.header
                for row in item.target.rows():
                    add(answer, row)
            assert item.error is None
            answer.stop = stop_of(case, answer)
            found.append((header.worker_id, header.dp_rank, answer))
    return found


async def test_each_rank_answers_as_vllm_itself(deployment: Deployment, model: Path) -> None:
    """Requests go to the ranks in turn; either answers bit by bit as vLLM, and without a seed draws by itself."""
    options = arguments({**WHOLE, "data_parallel_size": 2})
    deployment.start_processor()
    workers = [
        deployment.start(
            f"mixed-{number}",
            [COMMAND, "worker", "--id", f"mixed-{number}", "--engine", "vllm", "--model", str(model), "--", *given],
        )
        for number, given in enumerate(engine_kind("vllm").ranks(options))
    ]
    # One at a time, as the ranks have them: a sum may depend on how many requests are in a step.
    expected = [answer for _, (answer,) in reference(model, WHOLE, *([case] for case in CASES))]
    assert len([each.wait_for('"connected"') for each in workers]) == 2
    async with Client(deployment.settings()) as client:
        found = await answered(client, [case for case in [*CASES, UNSEEDED] for _ in range(2)])
    ranks = [(worker, rank) for worker, rank, _ in found]
    assert sorted(ranks[:2]) == [("mixed-0", 0), ("mixed-1", 1)]
    assert ranks == ranks[:2] * len(found[::2])
    for case, theirs, *both in zip(CASES, expected, found[::2], found[1::2], strict=False):
        for _, _, mine in both:
            check(case, mine, theirs)
    assert found[-1][2].tokens != found[-2][2].tokens
