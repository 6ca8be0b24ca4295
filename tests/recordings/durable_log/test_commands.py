"""`record --to` and `tap --from`: a log is written and shown."""

import asyncio
import json
from io import BytesIO
from typing import Any

import pytest

from tests.cli.helpers import EPOCH, WORKER, after_hello, hello, memory_settings, payloads, publish, recording, take_all
from tests.recordings.durable_log.using import STREAM, Life, filled
from tests.support.nats import NatsServer
from tests.support.waiting import soon, turns, until
from tokenbus.bus.memory import MemoryTransport
from tokenbus.cli import main
from tokenbus.cli.record import record_to_log
from tokenbus.cli.watching import watched
from tokenbus.engines.synthetic import true_tokens
from tokenbus.processor import Processor
from tokenbus.recordings.items import hello_entry, read_items


async def test_log_ends_while_the_log_is_away_and_its_buffer_is_full(server: NatsServer) -> None:
    settings = memory_settings(
        durable_log__address=server.log_address, processor__drain_timeout_ms=0, durable_log__buffer_bytes=4096,
        limits__max_message_bytes=4096, client__window_frames=64, client__drain_timeout_ms=100,
        bus__heartbeat_timeout_ms=10_000,
    )  # fmt: skip
    transport, stop = MemoryTransport(settings.bus), asyncio.Event()
    async with Processor(settings, transport=transport) as processor:
        steps = asyncio.create_task(take_all(processor))
        writing = asyncio.create_task(record_to_log(watched(settings, WORKER, stop, transport), settings, stop))
        await until(lambda: len(processor.clients.watchers))
        server.kill()
        small = hello()
        small.limits.max_message_bytes = 4096
        data = hello_entry(EPOCH, small, 1) + after_hello(recording(payloads(requests=4, tokens=400)))
        assert len(list(read_items(BytesIO(data)))) > 64
        await publish(data, settings, transport)
        await turns(1000)  # it reads until its buffer and its queue are full
        assert not writing.done()
        stop.set()
        counts, unwritten = await soon(writing)
        steps.cancel()
    assert counts.items == 0
    assert unwritten > 32


def shown(capsys: pytest.CaptureFixture[str], server: NatsServer, *more: str) -> list[dict[str, Any]]:
    assert main(["tap", "--from", server.log_address, "--json", *more]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_request_is_shown_as_the_log_has_it(server: NatsServer, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(filled(server, STREAM))
    values = shown(capsys, server, "--request", "0x2", "--rows")
    rows = [row for value in values for row in value.get("rows", ()) if value["kind"] == "TARGET"]
    true = true_tokens(2, 0, 9)
    assert {row["request_id"] for row in rows} == {f"{2:016x}"}
    assert [token for row in rows for token in row["token_ids"]] == true.ids.tolist()
    assert [logprob for row in rows for logprob in row["logprobs"]] == true.logprobs.tolist()
    assert [value["request_id"] for value in values if value["what"] == "admitted"] == [f"{2:016x}"]
    assert all(value["logged_at"] for value in values)


def test_worker_is_shown_as_the_log_has_it(server: NatsServer, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(filled(server, STREAM, Life(EPOCH, hello("other")), without=range(4, 6)))
    values = shown(capsys, server, "--worker", WORKER)
    assert {value["stream"]["worker_id"] for value in values} == {WORKER}
    (missing,) = [value for value in values if value["what"] == "left_out"]
    assert (missing["first_sequence"], missing["last_sequence"]) == ("4", "5")
    sequences = [int(value["sequence"]) for value in values if value is not missing]
    assert sequences == [sequence for sequence, *_ in payloads() if sequence not in range(4, 6)]
    assert main(["tap", "--from", server.log_address, "--rows", "--count", "7"]) == 0
    printed = capsys.readouterr().out
    assert ", logged 20" in printed
    assert " ago" not in printed


def test_what_cannot_be_shown_is_one_line(server: NatsServer, capsys: pytest.CaptureFixture[str]) -> None:
    at = server.log_address
    for arguments, line in (
        (["--from", at], "there is no log: no stream tokenbus-log"),
        (["--request", "17"], "--request: only with --from ADDRESS"),
        (
            ["--from", at, "--request", "0"],
            "argument --request: a request's id, as 0000000000000011, 0x11 or 17, got '0'",
        ),
    ):
        assert main(["tap", *arguments]) == 2
        assert line in capsys.readouterr().err
