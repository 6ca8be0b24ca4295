"""tokenbus up: a whole system as child processes, and that nothing of it is left behind."""

import asyncio
import os
import re
import select
import shlex
import signal
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM
from socket import create_server
from typing import Any

import httpx
import pytest

from tests.cli.helpers import COMMAND, generate
from tests.cli.local import FEW, Command, children_of, environment, is_running, python
from tests.support.waiting import MOST, wait_until
from tokenbus.cli import main
from tokenbus.client import Client
from tokenbus.engines.synthetic import true_tokens
from tokenbus.settings import Settings


def pids(up: dict[str, Any]) -> dict[str, int]:
    return {service["name"]: service["pid"] for service in up["services"]}


def none_runs(processes: dict[str, int]) -> bool:
    return not any(map(is_running, processes.values()))


def left_in(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("tokenbus-*")]


def is_well(url: str) -> bool:
    """Return whether a page is answered with status 200; a busy machine's gateway may need a moment."""
    try:
        with urllib.request.urlopen(url, timeout=MOST) as answer:  # noqa: S310 - of a test's own gateway
            return bool(answer.status == 200)
    except urllib.error.HTTPError as error:
        error.close()
        return False


async def test_every_role_takes_part_and_a_signal_leaves_nothing(folder: Path) -> None:
    with Command(["up", "--engine", "synthetic", "--json"], environment(folder)) as command:
        up = command.event("up")
        names = ["processor", "mixed-0", "decode-0", "prefill-0", "gateway"]
        assert [service["name"] for service in up["services"]] == names
        assert all(service["state"] == "ready" for service in up["services"])
        await asyncio.to_thread(command.wait_until, lambda: is_well(f"{up['gateway']}/readyz"))
        settings = Settings.load(environment={}, overrides={"bus.clients_address": up["clients_address"]})
        async with Client(settings) as client:
            asked = [client.generate(generate(20, key)) for key in range(1, 9)]
            ids = [[token.id async for token in tokens] for tokens in asked]
        assert ids == [true_tokens(key, 0, 20).ids.tolist() for key in range(1, 9)]
        command.signal(SIGTERM)
        assert command.event("down")["died"] == []
        assert command.end() == (0, "", "")
    assert none_runs(pids(up))
    assert left_in(folder) == []


@pytest.mark.nightly
def test_people_are_told_where_to_look(folder: Path) -> None:
    with Command(["up", *FEW, "--set", "worker.model=books"], environment(folder)) as command:
        command.line("stop    Ctrl-C")
        text = command.output
        (curl,) = re.findall(r"  HTTP    (.*)\\\n(.*)", text)
        _, url, _, header, _, body = shlex.split(" ".join(curl))
        name, _, value = header.partition(": ")
        assert httpx.post(url, content=body, headers={name: value}, timeout=MOST).json()["model"] == "books"
        (ask,) = re.findall("  ask     tokenbus (.*)", text)
        assert main(shlex.split(ask)) == 0
        (add,) = re.findall("  add     tokenbus (.*)", text)
        with Command(shlex.split(add), environment(folder)) as worker:
            worker.complaint("connected")
            worker.signal(SIGINT)
            worker.end()
        command.signal(SIGINT)
        _, output, complaints = command.end()
    assert "Tokenbus is up" in text
    assert "mixed-0     ready" in text
    assert re.search(r"look    http://127.0.0.1:\d+/\n", text)
    assert "tokenbus tap --rows --clients-address ipc://" in text
    assert output.endswith("everything has stopped\n")
    assert "\x1b" not in text + output + complaints


@pytest.mark.nightly
def test_terminal_sees_the_state_and_takes_all_with_it(folder: Path) -> None:
    """On a terminal the lines have styles; when the terminal dies nothing lives on."""
    ours, theirs = os.openpty()
    program = python(
        "import os, signal, sys; os.setsid()\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # the tests may run under nohup
        "terminal = os.open(sys.argv[1], os.O_RDWR)\n"  # the first that a session opens is its own
        "[os.dup2(terminal, number) for number in range(3)]\n"
        "os.execv(sys.argv[2], sys.argv[2:])"
    )
    variables = environment(folder) | {"TERM": "xterm", "NO_COLOR": ""}
    with Command([os.ttyname(theirs), str(COMMAND), "up", *FEW], variables, program) as command:
        seen = b""
        while b"stop    Ctrl-C" not in seen:
            assert select.select([ours], [], [], MOST)[0], seen
            seen += os.read(ours, 65_536)
        children = {words: pid for pid, words in children_of(command.pid)}
        assert len(children) == 3
        os.close(theirs)
        os.close(ours)
        assert command.wait() in (0, 1)
    assert b"\x1b[1mTokenbus is up" in seen
    assert not any(map(is_running, children.values()))
    assert left_in(folder) == []


def test_death_is_told_and_without_a_processor_all_ends(folder: Path) -> None:
    """A killed worker is a line with how it ended; the others go on, also after a hangup under nohup.

    Where no request can be answered any more, one line says so and the rest is stopped, with status 1.
    """
    code = "import signal, sys; from tokenbus.cli import main; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    program = python(f"{code}; sys.exit(main(sys.argv[1:]))")
    given = ["up", *FEW, "--gateways", "0", "--workers", "2", "--json"]
    with Command(given, environment(folder), program) as command:
        processes = pids(command.event("up"))
        command.signal(SIGHUP)
        os.kill(processes["mixed-0"], SIGKILL)
        ended = command.event("ended")
        assert (ended["service"], ended["status"], ended["text"]) == ("mixed-0", -SIGKILL, "ended with SIGKILL")
        assert is_running(processes["mixed-1"])
        os.kill(processes["processor"], SIGKILL)
        assert command.event("ended")["service"] == "processor"
        assert "no request can be answered" in command.event("useless")["text"]
        assert command.event("down")["died"] == ["processor", "mixed-0"]
        assert command.end()[0] == 1
    assert none_runs(processes)
    assert left_in(folder) == []


def test_children_end_with_a_killed_parent(folder: Path) -> None:
    with Command(["up", *FEW, "--gateways", "0", "--json"], environment(folder)) as command:
        processes = pids(command.event("up"))
        command.signal(SIGKILL)
        assert command.end()[0] == -SIGKILL
    wait_until(lambda: none_runs(processes))
    assert left_in(folder) == []


@pytest.mark.nightly
@pytest.mark.parametrize(("more_signals", "drain_ms"), [(1, 3_600_000), (0, 1)])
def test_service_that_does_not_stop_is_killed(folder: Path, more_signals: int, drain_ms: int) -> None:
    """A second signal kills it; without one the settings say how long a service may take to leave."""
    with Command(["up", *FEW, "--json"], environment(folder, worker__drain_timeout_ms=drain_ms)) as command:
        processes = pids(command.event("up"))
        os.kill(processes["mixed-0"], signal.SIGSTOP)  # it can hear nothing
        command.signal(SIGTERM)
        command.event("stopping")
        for _ in range(more_signals):
            command.signal(SIGTERM)
        died = command.event("down")["died"]
        assert "mixed-0" in died
        assert more_signals or died == ["mixed-0"]  # else beside those that had not left yet
        assert command.end()[0] == 1
    assert none_runs(processes)
    assert left_in(folder) == []


def test_service_that_cannot_start_says_why(folder: Path) -> None:
    with closing(create_server(("127.0.0.1", 0))) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with Command(["up", *FEW, "--metrics-address", address], environment(folder)) as command:
            status, _, complaints = command.end()
    assert status == 2
    (line,) = complaints.splitlines()
    before = "tokenbus: processor: ended with status 2 before it was ready: "
    assert line.startswith(f"{before}processor.metrics_address: {address}")
    assert left_in(folder) == []


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--prefill", "1", "--decode", "0"], "some of both, or neither, got --prefill 1 and --decode 0"),
        (
            ["--workers", "0", "--prefill", "0", "--decode", "0"],
            "workers: 1 to 64 in all (processor.max_workers), got 0",
        ),
        (["--workers", "63"], "workers: 1 to 64 in all (processor.max_workers), got 65"),
        (["--workers", "-1"], "argument --workers: a whole number from 0 to 1000000, got '-1'"),
        (["--workers", "9" * 99], "argument --workers: a whole number from 0 to 1000000"),
        (["--start-seconds", "0"], "argument --start-seconds: a whole number from 1 to 86400, got '0'"),
        (["--port", "65536"], "argument --port: a whole number from 1 to 65535, got '65536'"),
        (["--gateways", "0", "--port", "1"], "--port: only with a gateway, got --gateways 0"),
        (["--engine", "steam"], "argument --engine: invalid choice: 'steam'"),
        (
            ["--model", "m"],
            "--model: the engine ngram reads no model folder; to name the model for clients, use --set ",
        ),
        (["--engine", "vllm"], "--model: the folder of the model, got none"),
        (["--engine", "vllm", "--model", "/nowhere"], "--model: the folder of the model, got /nowhere"),
        (["--engine", "vllm", "--model", "/", "--prefill", "1"], "prefill and decode workers: some of both"),
        (["--engine", "vllm", "--model", "/", "--", "--data-parallel-size", "100"], "(processor.max_workers), got 100"),
        (["--engine", "ngram", "--", "--max-model-len", "64"], "error: unrecognized arguments: "),
        (["--set", "worker.policies=x"], "worker.policies: no such setting"),
    ],
)
def test_wrong_use(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be done is refused with status 2 and a line that says what and why, before anything starts."""
    assert main(["up", *arguments]) == 2
    said = capsys.readouterr()
    assert why in said.err.splitlines()[-1]
    assert said.out == ""


@pytest.mark.nightly
def test_signal_while_it_starts_stops_what_is_there(folder: Path) -> None:
    with Command(["up", *FEW, "--json"], environment(folder)) as command:
        first = command.event("started")
        command.signal(SIGTERM)
        assert command.event("down")["died"] == []
        assert command.end()[0] == 0
    assert not is_running(first["pid"])
    assert left_in(folder) == []


def test_file_that_fails_is_not_taken_for_the_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill(*_: object) -> int:
        raise OSError(28, "No space left on device", "/somewhere/lock")

    monkeypatch.setattr("tokenbus.cli.up.run", fill)
    assert main(["up"]) == 1
    assert capsys.readouterr().err == "tokenbus: /somewhere/lock: no space left on device\n"
