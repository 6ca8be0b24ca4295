"""The public names: one import, documented by docstrings whose examples run, and a page made of them."""

import ast
import inspect
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import tokenbus
from schema_tools.api import Documented, page, public_names
from tests.pages import ROOT
from tokenbus import testing

pytestmark = pytest.mark.xdist_group("api")  # what its tests share is made once
NAMES = [each for _, names in public_names() for each in names]
EXAMPLES = [each for each in NAMES if "Example" in each.sections]
MOST_SECONDS = 60
_MY_ENGINE = "from tokenbus_engines.synthetic import SyntheticEngine as MyEngine\n"


def _own(folder: str, *, workers: str, clients: str, **more: str) -> dict[str, str]:
    """Return settings, as variables, of one process of a test's own bus."""
    return {
        "TOKENBUS_BUS_WORKERS_ADDRESS": f"ipc://{folder}/{workers}",
        "TOKENBUS_BUS_CLIENTS_ADDRESS": f"ipc://{folder}/{clients}",
        "TOKENBUS_METRICS_ADDRESS": "",
        "TOKENBUS_WORKER_METRICS_ADDRESS": "",
        "TOKENBUS_DEAD_LETTERS_DIRECTORY": f"{folder}/letters",
        **more,
    }


def _wait_for(process: subprocess.Popen[str], word: str) -> None:
    assert process.stderr is not None
    assert any(word in line for line in process.stderr), f"ended without {word}"


@pytest.fixture(scope="module")
def folder() -> Iterator[str]:
    """Run a processor and a worker in processes of their own, and return the folder of their sockets."""
    with tempfile.TemporaryDirectory(prefix="tb", dir="/tmp") as name:
        command = str(Path(sys.executable).with_name("tokenbus"))
        environment = os.environ | _own(name, workers="w", clients="c")
        started = []
        try:
            for arguments, word in (["processor"], "listening"), (["worker", "--engine", "synthetic"], '"connected"'):
                process = subprocess.Popen([command, *arguments], env=environment, stderr=subprocess.PIPE, text=True)
                started.append(process)
                _wait_for(process, word)
            yield name
        finally:
            for process in started:
                process.kill()
                process.communicate()


@pytest.mark.parametrize("each", EXAMPLES, ids=lambda each: each.name)
async def test_example_runs_as_it_is_written(each: Documented, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example in a public name's docstring runs against a real processor and a real worker."""
    for key, value in _own(folder, workers="mine-w", clients="mine-c").items():
        monkeypatch.setenv(key, value)
    if each.name == "run_engine":  # it stays until a signal comes
        _run_until_stopped(_MY_ENGINE + each.sections["Example"], folder)
        return
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    code = compile(each.sections["Example"], each.name, "exec", flags=flags, dont_inherit=True)
    async with testing.bus() as bus:
        found = eval(code, {"tokenbus": tokenbus, "address": bus.address})  # noqa: S307 - our own docstrings
        if inspect.isawaitable(found):
            await bus.until(found)


def _run_until_stopped(program: str, folder: str) -> None:
    environment = os.environ | _own(folder, workers="w", clients="c", TOKENBUS_WORKER_ID="mine")
    process = subprocess.Popen([sys.executable, "-c", program], env=environment, stderr=subprocess.PIPE, text=True)
    try:
        _wait_for(process, '"connected"')
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=MOST_SECONDS)
        assert process.returncode == 0, rest
    finally:
        process.kill()
        process.communicate()


def test_page_is_what_the_docstrings_say() -> None:
    """docs/api.md is what `python -m schema_tools.api` prints."""
    assert (ROOT / "docs" / "api.md").read_text() == page()


def test_every_public_name_is_on_the_page_and_documented() -> None:
    """The page has each name of the package once; each function and class has an example, each argument a line."""
    tops = [each.name for each in NAMES if "." not in each.name]
    assert sorted(tops) == sorted(tokenbus.__all__)
    for each in NAMES:
        found = getattr(tokenbus, each.name.split(".")[0])
        assert each.text, each.name
        if inspect.isfunction(found):
            assert set(each.sections) >= {"Args", "Raises", "Example"}, each.name
            for parameter in inspect.signature(found).parameters:
                assert f"{parameter}:" in each.sections["Args"], f"{each.name}: {parameter}"
    simple = {"Generate", "Rule"} | {name for name in tops if name.endswith("Error")}
    for name in set(tops) - simple:
        kind = getattr(tokenbus, name)
        is_enum = inspect.isclass(kind) and hasattr(kind, "__members__")
        assert is_enum or "Example" in next(each for each in NAMES if each.name == name).sections, name


def test_import_is_cheap() -> None:
    """Importing the package imports nothing else, and its clients need no GPU framework."""
    program = """
import sys
before = set(sys.modules)
import tokenbus
heavy = {"numpy", "google", "zmq", "tokenbus_contracts", "tokenbus_services"}
assert not heavy & {name.split(".")[0] for name in set(sys.modules) - before}
assert "connect" in dir(tokenbus)
tokenbus.connect, tokenbus.Publisher, tokenbus.token_logprobs
assert not {"torch", "paddle", "cupy", "cuda"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=MOST_SECONDS)


def test_unknown_name_is_an_attribute_error() -> None:
    """A name that the package does not have is Python's own error, with the name."""
    with pytest.raises(AttributeError, match="'tokenbus' has no attribute 'conect'"):
        getattr(tokenbus, "conect")  # noqa: B009 - the mistake is the test
