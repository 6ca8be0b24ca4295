"""`tokenbus log`, `tap --from` and `replay --from`: a log is written, shown and published again."""

import asyncio
import json
import tempfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from tests.services.cli.helpers import (
    COMMAND,
    EPOCH,
    WORKER,
    addresses,
    after_hello,
    hello,
    memory_settings,
    payloads,
    recording,
    take_all,
)
from tests.services.durable_log.using import STREAM, Life, filled
from tests.support.nats import NatsServer
from tests.support.processes import run
from tests.support.waiting import MOST, soon, turns, until
from tokenbus_engines.synthetic import true_tokens
from tokenbus_services.bus.memory import MemoryTransport
from tokenbus_services.cli.log import log
from tokenbus_services.items import hello_entry, read_items
from tokenbus_services.processor import Processor
from tokenbus_services.worker.replay import Replay


async def test_log_ends_while_the_log_is_away_and_its_buffer_is_full(server: NatsServer) -> None:
    settings = memory_settings(
        durable_log__address=f"nats://{server.server}",
        durable_log__buffer_bytes=4096,
        limits__max_message_bytes=4096,
        client__window_frames=512,
        client__drain_timeout_ms=100,
        bus__heartbeat_timeout_ms=10_000,
    )
    transport, stop = MemoryTransport(settings.bus), asyncio.Event()
    async with Processor(settings, transport=transport) as processor:
        steps = asyncio.create_task(take_all(processor))
        writing = asyncio.create_task(log(settings, stop, worker_id=WORKER, transport=transport))
        await until(lambda: len(processor.clients.watchers))
        server.kill()
        small = hello()
        small.limits.max_message_bytes = 4096
        data = hello_entry(EPOCH, small, 1) + after_hello(recording(payloads(requests=4, tokens=3000)))
        replay = Replay(read_items(BytesIO(data)), settings, speed=0, transport=transport)
        await asyncio.wait_for(replay.run(asyncio.Event()), MOST)
        assert replay.done.items > 512
        await turns(1000)  # it reads until its buffer and its queue are full
        assert not writing.done()
        stop.set()
        counts, unwritten = await soon(writing)
        steps.cancel()
    assert counts.items == 0
    assert unwritten > 256


def tap(*arguments: str) -> CompletedProcess[str]:
    return run([COMMAND, "tap", *arguments], text=True, timeout=MOST)


async def shown(server: NatsServer, *more: str) -> list[dict[str, Any]]:
    ran = await asyncio.to_thread(tap, "--from", f"nats://{server.server}", "--json", *more)
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


async def test_request_is_shown_as_the_log_has_it(server: NatsServer) -> None:
    await filled(server, STREAM)
    values = await shown(server, "--request", "0x2", "--rows")
    rows = [row for value in values for row in value.get("rows", ()) if value["kind"] == "TARGET"]
    true = true_tokens(2, 0, 9)
    assert {row["request_key"] for row in rows} == {"2"}
    assert [token for row in rows for token in row["token_ids"]] == true.ids.tolist()
    assert [logprob for row in rows for logprob in row["logprobs"]] == true.logprobs.tolist()
    assert [value["request_key"] for value in values if value["what"] == "admitted"] == ["2"]
    assert all(value["logged_at"] for value in values)


async def test_worker_is_shown_as_the_log_has_it(server: NatsServer) -> None:
    await filled(server, STREAM, Life(EPOCH, hello("other")), without=range(4, 6))
    values = await shown(server, "--worker", WORKER)
    assert {value["stream"]["worker_id"] for value in values} == {WORKER}
    (missing,) = [value for value in values if value["what"] == "left_out"]
    assert (missing["first_sequence"], missing["last_sequence"]) == ("4", "5")
    sequences = [int(value["sequence"]) for value in values if value is not missing]
    assert sequences == [sequence for sequence, *_ in payloads() if sequence not in range(4, 6)]
    assert len(await shown(server, "--count", "2")) == 2
    ran = await asyncio.to_thread(tap, "--from", f"nats://{server.server}", "--worker", WORKER, "--rows")
    assert ", logged 20" in ran.stdout
    assert " ago" not in ran.stdout


async def test_what_cannot_be_shown_is_one_line(server: NatsServer) -> None:
    at = f"nats://{server.server}"
    for arguments, line in (
        (["--from", at], "there is no log: no stream tokenbus-log"),
        (["--request", "17"], "--request: with --from ADDRESS, the log that has it"),
        (["--from", at, "--request", "0"], "argument --request: a request's id, as 17 or 0x11, got '0'"),
    ):
        ran = await asyncio.to_thread(tap, *arguments)
        assert (ran.returncode, line in ran.stderr) == (2, True), ran.stderr


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
