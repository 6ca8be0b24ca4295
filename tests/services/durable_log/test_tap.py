"""`tokenbus tap --from`: the items of workers and of requests in a log are shown; a mistake is one line."""

import asyncio
import json
from subprocess import CompletedProcess
from typing import Any

from tests.services.cli.helpers import COMMAND, EPOCH, WORKER, hello, payloads
from tests.services.durable_log.using import STREAM, Life, filled
from tests.support.nats import NatsServer
from tests.support.processes import run
from tests.support.waiting import MOST
from tokenbus_engines.synthetic import true_tokens


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
