"""The options by which services take their settings."""

import argparse
import sys
from pathlib import Path

import pytest

from tokenbus.cli import main
from tokenbus.cli.arguments import Parser
from tokenbus.cli.configuration import declare_settings, load_settings
from tokenbus.settings import Settings

SERVICES = ["processor", "worker", "tap", "record"]


def loaded(*arguments: str) -> Settings:
    parser = Parser()
    declare_settings(parser, {"--id": "worker.id", "--role": "worker.role"})
    options: argparse.Namespace = parser.options(arguments)
    return load_settings(options)


def test_options_count_more_than_variables_and_those_more_than_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "tokenbus.toml"
    file.write_text('[worker]\nid = "file"\nmodel = "file"\ntop_logprobs = 1\nmax_requests = 1\n')
    for name in ("ID", "MODEL", "MAX_REQUESTS"):
        monkeypatch.setenv(f"TOKENBUS_WORKER_{name}", "2")
    given = ["--settings", str(file), "--set", "worker.id=set", "--set", "worker.model=set", "--id", "option"]
    worker = loaded(*given).worker
    assert (worker.id, worker.model, worker.max_requests, worker.top_logprobs) == ("option", "set", 2, 1)
    assert worker.role == "mixed"


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert not captured.out
    line, *others = captured.err.splitlines()
    assert not others
    return line


@pytest.mark.parametrize("command", SERVICES)
def test_setting_that_cannot_be_used_is_one_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = ["steps.tokenbus"] if command == "record" else []
    line = refusal(capsys, command, *file, "--set", "processor.max_workers=many")
    assert line == "tokenbus: processor.max_workers: 1 to 65536 workers, got 'many'"
    line = refusal(capsys, command, *file, "--set", "bus.workers_adress=x")
    assert line == "tokenbus: bus.workers_adress: no such setting; did you mean bus.workers_address?"


def test_gateway_without_its_libraries(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delitem(sys.modules, "tokenbus.gateway.server", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["gateway"]) == 1
    line = "tokenbus: the gateway needs uvicorn: pip install 'tokenbus[gateway]', or in a clone '.[gateway]'"
    assert capsys.readouterr().err.splitlines()[-1] == line


@pytest.mark.parametrize("pair", ["worker.id", "=x", ""])
def test_what_is_no_pair_is_a_wrong_use(pair: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["worker", "--set", pair]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"argument --set: KEY=VALUE, got {pair!r}")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["processor", "--workers-address", "tcp://192.0.2.1:5", "--metrics-address", ""], "tcp://192.0.2.1:5: "),
        (["processor", "--metrics-address", "192.0.2.1:5"], "processor.metrics_address: 192.0.2.1:5: "),
        (["worker", "--workers-address", "tcp://127.0.0.1:0"], "tcp://127.0.0.1:0: a host and a port are needed"),
        (["worker", "--metrics-address", "192.0.2.1:5"], "worker.metrics_address: 192.0.2.1:5: "),
        (["tap", "--clients-address", "tcp://127.0.0.1:0"], "tcp://127.0.0.1:0: a host and a port are needed"),
        (["record", "x", "--clients-address", "tcp://127.0.0.1:0"], "tcp://127.0.0.1:0: a host and a port are needed"),
    ],
)
def test_address_that_cannot_be_used_is_one_line(
    arguments: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refusal(capsys, *arguments, "--log-level", "error").startswith(f"tokenbus: {line}")
