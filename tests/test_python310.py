"""FastDeploy's images have Python 3.10: the contract, workers and FastDeploy's ops run on it, and all else says so.

`make check` has mypy look for what 3.10 lacks; here an interpreter of that version runs it, where one is found.
"""

import asyncio
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import tokenbus
from tests.engines.fastdeploy import stand_in
from tests.pages import ROOT, blocks
from tests.support.waiting import until
from tokenbus.settings import Settings

pytestmark = pytest.mark.xdist_group("python310")  # its packages are installed once
LOCK = ROOT / "requirements" / "python310.txt"
SOURCES = ("contracts", "gpu_ops", "services", "")
(ENGINE,) = [each.text for each in blocks("python", of="docs/extending.md") if "class WordEngine" in each.text]
SECONDS = 60
ELSEWHERE = tuple(
    f"tests/{name}.py"
    for name in (
        *(f"worker/test_{name}" for name in ("deadlines", "engine_thread", "states")),
        "worker/process/test_apart",
        "bus/test_link",
    )
)
"""Tests of the bus and of workers that need a processor, or an engine or a package that is not there on 3.10."""
NEED_NEWER = (
    *(f"tokenbus.{name}" for name in ("client", "recordings", "gateway", "model_files", "processor")),
    *(f"tokenbus.engines.{name}" for name in ("ngram", "paddle", "vllm")),
)


def _interpreter() -> str | None:
    found = [shutil.which("python3.10"), *sorted(map(str, Path.home().glob(".pyenv/versions/3.10.*/bin/python3.10")))]
    for each in filter(None, found):
        run = subprocess.run([each, "-c", "import ensurepip, venv"], capture_output=True, check=False)
        if not run.returncode:
            return each
    return None


@pytest.fixture(scope="module")
def python() -> Iterator[str]:
    """A Python 3.10 with what Tokenbus depends on, which is kept for all clones, and with this clone's own packages."""
    interpreter = _interpreter()
    if interpreter is None:
        pytest.skip("no Python 3.10 is on the path, nor among pyenv's")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "tokenbus")
    packages = cache / f"python310-{hashlib.sha256(LOCK.read_bytes()).hexdigest()[:16]}"
    with tempfile.TemporaryDirectory(prefix="tb") as folder:
        subprocess.run([interpreter, "-m", "venv", "--without-pip", folder], check=True)
        made = f"{folder}/bin/python"
        if not packages.exists():
            subprocess.run([made, "-m", "ensurepip"], check=True, capture_output=True)
            part = cache / f"{packages.name}.{os.getpid()}"
            pip = [made, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--require-hashes"]
            run = subprocess.run(
                [*pip, "--target", str(part), "--requirement", str(LOCK)], capture_output=True, text=True, check=False
            )
            if run.returncode:
                pytest.skip(f"requirements/python310.txt cannot be installed: {run.stderr.strip()[-200:]}")
            try:
                part.rename(packages)
            except OSError:  # another process of this run has made it meanwhile
                shutil.rmtree(part)
            assert packages.exists()
        (site,) = Path(folder).glob("lib/python3.10/site-packages")
        (site / "tokenbus.pth").write_text("\n".join([str(packages), *(str(ROOT / each) for each in SOURCES)]))
        yield made


def _run(python: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([python, *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=900)


def test_what_needs_a_newer_python_says_so_in_one_line(python: str) -> None:
    program = (
        "import sys, importlib, tokenbus\n"
        "tokenbus.Publisher, tokenbus.run_engine, tokenbus.StepArrays, tokenbus.encode, tokenbus.token_logprobs\n"
        "from tokenbus.engines import fastdeploy, fastdeploy_switch\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n"
        "        importlib.import_module(name)\n"
        "    except ImportError as error:\n"
        "        print(error)\n"
    )
    run = _run(python, "-c", program, *NEED_NEWER)
    version = _run(python, "-c", "import platform; print(platform.python_version())").stdout.strip()
    assert run.stdout.splitlines() == [f"{name} needs Python 3.11 or newer; this is {version}" for name in NEED_NEWER]
    assert not run.stderr


def test_command_that_needs_a_newer_python_says_so_in_one_line(python: str) -> None:
    """`tokenbus` runs on it, as FastDeploy's images need, and a command that cannot ends with one line and status 1."""
    commands = ["up", "processor", "tap", "keys", "demo"]
    program = "import sys; from tokenbus.cli import main; print(*(main([each]) for each in sys.argv[1:]))"
    run = _run(python, "-c", program, *commands)
    assert run.stdout.split() == ["1"] * len(commands)
    lines = run.stderr.splitlines()
    assert len(lines) == len(commands)
    for line in lines:
        assert re.fullmatch(r"tokenbus: .* needs Python 3\.11 or newer; this is 3\.10\..*", line)


@pytest.mark.nightly
def test_broken_package_is_not_taken_for_an_old_python(python: str) -> None:
    hidden = "import sys; sys.modules['numpy'] = None; from tokenbus.cli import main; main(['worker'])"
    run = _run(python, "-c", hidden)
    assert run.returncode
    assert "needs Python" not in run.stderr
    assert "numpy" in run.stderr


@pytest.mark.nightly
def test_ops_and_contract_pass_their_tests(python: str) -> None:
    """The tests of FastDeploy's ops, and of messages both ways, pass on it."""
    ops = [
        f"tests/engines/fastdeploy/test_{name}.py"
        for name in ("differential", "environment", "errors", "processes", "queue", "ranks")
    ]
    codec = [f"tests/contracts/test_{name}.py" for name in ("encode", "batch", "limits")]
    run = _run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not random_steps", *ops, *codec)
    assert run.returncode == 0, run.stdout[-2000:]
    assert " passed" in run.stdout


@pytest.mark.nightly
def test_script_of_the_engine_is_switched(python: str, tmp_path: Path) -> None:
    """`tokenbus fastdeploy --` starts FastDeploy's programs, with the ops replaced in each of their processes."""
    stand_in.install(tmp_path)
    program = tmp_path / "serve"
    program.write_text(
        f"#!{python}\nimport runpy; runpy.run_module('fastdeploy.entrypoints.api_server', run_name='__main__')\n"
    )
    program.chmod(0o755)
    command = (
        "import sys\n"
        "from tokenbus.engines.fastdeploy_switch.command import declare, run\n"
        "from tokenbus.cli.arguments import Parser\n"
        "parser = Parser(prog='tokenbus fastdeploy')\n"
        "declare(parser)\n"
        "run(parser.options(sys.argv[1:]))\n"
    )
    with tempfile.TemporaryDirectory(prefix="tb") as folder:
        environment = os.environ | {"PYTHONPATH": str(tmp_path), "TMPDIR": folder}
        run = subprocess.run(
            [python, "-c", command, "--", str(program), "thread", "2", "0"],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
        )
    assert (run.returncode, run.stdout) == (0, f"tokens {list(range(8))}\n"), run.stderr


@pytest.mark.nightly
def test_workers_and_the_bus_pass_their_tests(python: str) -> None:
    """The tests of workers and of each transport pass on it, but for those that start processes or take long."""
    options = ("-q", "-p", "no:cacheprovider", "-m", "not process and not long", *map("--ignore={}".format, ELSEWHERE))
    places = ("tests/worker", "tests/bus", "tests/test_clock.py")
    run = _run(python, "-m", "pytest", *options, *places)
    assert run.returncode == 0, run.stdout[-2000:]
    assert " passed" in run.stdout


@pytest.fixture
async def processor() -> AsyncIterator[tokenbus.Processor]:
    with tempfile.TemporaryDirectory(prefix="tb") as folder:
        overrides: dict[str, object] = {
            "bus.workers_address": f"ipc://{folder}/w",
            "bus.clients_address": f"ipc://{folder}/c",
            "processor.metrics_address": "",
        }
        async with tokenbus.Processor(Settings.load(environment={}, overrides=overrides)) as running:
            yield running


async def test_worker_serves_a_client_of_a_newer_python(python: str, processor: tokenbus.Processor) -> None:
    """The engine of docs/extending.md runs on it, and a client beyond its processor has its token."""
    bus = processor.settings.bus
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TOKENBUS_")} | {
        "TOKENBUS_BUS_WORKERS_ADDRESS": bus.workers_address,
        "TOKENBUS_PROCESSOR_METRICS_ADDRESS": "",
    }
    worker = subprocess.Popen([python, "-c", ENGINE], env=environment, stderr=subprocess.PIPE)  # noqa: ASYNC220
    try:
        await until(lambda: processor.workers.by_id)
        async with tokenbus.connect(bus.clients_address) as client:
            tokens = [token.id async for token in client.generate([5, 6, 7], max_tokens=1)]
        assert len(tokens) == 1
    finally:
        worker.terminate()
        _, errors = await asyncio.to_thread(worker.communicate, timeout=SECONDS)  # the processor hears its goodbye
    assert b"Traceback" not in errors
    assert sys.version_info >= (3, 11)
