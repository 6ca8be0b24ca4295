"""uvloop: applications that use it, and a whole system under it."""

import asyncio
from signal import SIGTERM

import httpx
import pytest
import uvloop

from tests.cli.local import FEW, Command, environment
from tests.cli.test_up import pids
from tests.support.waiting import MOST, soon
from tests.system.asking import all_exact, ask, wanted
from tests.system.deployment import Deployment
from tests.system.inprocess import trio
from tokenbus.client import RequestEnd, StepRows
from tokenbus.engines.synthetic import true_tokens

_LOOPS = """
import asyncio, os, uvloop

class Policy(uvloop.EventLoopPolicy):
    def new_event_loop(self):
        open(os.path.join({folder!r}, str(os.getpid())), "w").close()
        return super().new_event_loop()

asyncio.set_event_loop_policy(Policy())
"""
"""Run by each Python process that has it in its path: gives it uvloop, and notes that it was asked for a loop."""


def test_application_may_run_under_uvloop(deployment: Deployment) -> None:
    """A processor, a publisher and a client of many tasks on uvloop: rows, tokens, columns, an abort, an end."""

    async def run() -> None:
        """Run all three until everything has come."""
        async with trio(deployment) as made:
            await all_exact(ask(made.client, 64, 40), 40)
            generation = made.client.generate(wanted(20, key=9))
            tokens = [token.id async for token in generation]
            assert tokens == true_tokens(generation.request_id, 0, 20).ids.tolist()
            async with made.client.generate(wanted(None)) as endless:
                await soon(anext(endless))
                made.client.abort(endless.request_id)
                assert [token async for token in endless]
            async with made.client.steps() as steps:
                made.client.submit(wanted(5, key=10))
                items = [await soon(anext(steps))]
                while not isinstance(items[-1], RequestEnd):
                    items.append(await soon(anext(steps)))
            ids = [id_ for item in items if isinstance(item, StepRows) for id_ in item.target.token_ids.tolist()]
            assert ids == true_tokens(10, 0, 5).ids.tolist()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


@pytest.mark.nightly
def test_whole_system_runs_under_uvloop(deployment: Deployment) -> None:
    """`tokenbus up` and all that it starts run where uvloop is the loop, answer requests, and stop with status 0."""
    folder = deployment.folder
    (folder / "sitecustomize.py").write_text(_LOOPS.format(folder=str(folder)))
    variables = environment(folder) | {"PYTHONPATH": str(folder)}
    with Command(["up", *FEW, "--json"], variables) as command:
        up = command.event("up")
        body = {"prompt": "a", "max_tokens": 4, "stream": True, "logprobs": 2, "model": "tokenbus"}
        answer = httpx.post(f"{up['gateway']}/v1/completions", json=body, timeout=MOST)
        assert answer.status_code == 200
        assert answer.text.endswith("data: [DONE]\n\n")
        command.signal(SIGTERM)
        assert command.event("down")["died"] == []
        assert command.end() == (0, "", "")
    processes = {up["pid"], *pids(up).values()}
    assert processes <= {int(path.name) for path in folder.iterdir() if path.name.isdecimal()}
