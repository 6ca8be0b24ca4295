"""`tokenbus replay --from`: a worker's latest life in a log is published again; a mistake is one line."""

import asyncio
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.services.cli.helpers import COMMAND, EPOCH, WORKER, addresses, hello, memory_settings, payloads
from tests.services.durable_log.using import Life, filled
from tests.support.nats import NatsServer
from tests.support.processes import run
from tests.support.waiting import MOST, soon
from tokenbus_engines.synthetic import true_tokens
from tokenbus_services.processor import Processor


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tb", dir="/tmp") as made:
        yield Path(made)


def replay(server: NatsServer, folder: Path, *more: str) -> CompletedProcess[str]:
    own = [*addresses(folder)[:2], "--log-format", "json", "--speed", "max"]
    command = [str(COMMAND), "replay", "--from", f"nats://{server.server}", *own, *more]
    return run(command, text=True, timeout=2 * MOST)


@pytest.mark.parametrize("without", [range(0), range(4, 5)])
async def test_log_is_published_again(server: NatsServer, folder: Path, without: range) -> None:
    """The latest life of the worker comes again, whole or with its gap: each request has its tokens, or its end.

    What earlier lives have in the log, also behind it, does not come.
    """
    await filled(server, Life(EPOCH - 1, hello()), Life(EPOCH, hello()), without=without)
    await filled(server, Life(EPOCH - 2, hello()))
    count = sum(sequence not in without for sequence, *_ in payloads())
    settings = memory_settings(bus__workers_address=f"ipc://{folder}/w", bus__clients_address=f"ipc://{folder}/c")
    async with Processor(settings) as processor:
        found: dict[int, list[int]] = {}
        taking = asyncio.create_task(_taken(processor, found))
        ran = await asyncio.to_thread(replay, server, folder, "--worker", WORKER, "--json")
        assert ran.returncode == 0, ran.stderr
        done = json.loads(ran.stdout)
        taking.cancel()
    if not without:
        assert found == {key: true_tokens(key, 0, 9).ids.tolist() for key in (1, 2, 3)}
    assert (done["items"], done["missing_items"], done["unacknowledged"]) == (count, len(without), 0)
    assert (done["worker_id"], done["epoch"]) == (WORKER, str(EPOCH))


async def _taken(processor: Processor, found: dict[int, list[int]]) -> None:
    """Take every step, so that all is acknowledged, and keep each request's tokens."""
    async for step in processor.steps():
        for row in step.rows.rows():
            found.setdefault(row.key, []).extend(row.token_ids.tolist())


async def test_what_cannot_be_replayed_is_one_line(server: NatsServer, folder: Path) -> None:
    ran = await asyncio.to_thread(replay, server, folder)
    assert (ran.returncode, "there is no log: no stream tokenbus-log" in ran.stderr) == (2, True), ran.stderr
    await soon(filled(server, Life(EPOCH, hello()), Life(EPOCH, hello("other"))))
    for arguments, status, line in (
        (["--worker", "nobody"], 1, "nothing to replay of worker nobody"),
        ([], 2, "--worker: the log has items of several workers"),
        (["file"], 2, "one FILE or --from ADDRESS"),
    ):
        ran = await asyncio.to_thread(replay, server, folder, *arguments)
        assert (ran.returncode, line in ran.stderr) == (status, True), ran.stderr
        assert len(ran.stderr.splitlines()) == 1
