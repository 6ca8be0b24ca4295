"""The public names: one import, documented by docstrings whose examples run, and a page made of them."""

import ast
import inspect
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

import tokenbus
from schema_tools.api import INTERNAL, Documented, documented, page, public_names
from tests.pages import ROOT
from tokenbus import testing

NAMES = [each for _, names in public_names() for each in names]
EXAMPLES = [
    each
    for each in [*NAMES, *(documented(f"testing.{name}", getattr(testing, name)) for name in testing.__all__)]
    if "Example" in each.sections and each.name != "run_engine"  # tests/test_readme.py has a process run it
]
MOST_SECONDS = 60


def _own(folder: str) -> dict[str, str]:
    return {
        "TOKENBUS_BUS_WORKERS_ADDRESS": f"ipc://{folder}/w",
        "TOKENBUS_BUS_CLIENTS_ADDRESS": f"ipc://{folder}/c",
        "TOKENBUS_PROCESSOR_METRICS_ADDRESS": "",
        "TOKENBUS_WORKER_METRICS_ADDRESS": "",
    }


@pytest.fixture
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="tb") as name:
        yield name


@pytest.mark.parametrize("each", EXAMPLES, ids=lambda each: each.name)
async def test_example_runs_as_it_is_written(each: Documented, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in _own(folder).items():
        monkeypatch.setenv(key, value)
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    code = compile(each.sections["Example"], each.name, "exec", flags=flags, dont_inherit=True)
    async with testing.bus() as bus:
        found = eval(code, {"tokenbus": tokenbus, "address": bus.address})  # noqa: S307 - our own docstrings
        if inspect.isawaitable(found):
            await bus.until(found)


def test_page_is_what_the_docstrings_say() -> None:
    assert (ROOT / "docs" / "api.md").read_text() == page()


def test_every_public_name_is_on_the_page_and_documented() -> None:
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


def test_members_that_the_page_leaves_out_exist() -> None:
    for name, members in INTERNAL.items():
        assert set(members.split()) <= vars(getattr(tokenbus, name)).keys(), name


@pytest.mark.process
def test_import_is_cheap() -> None:
    """Importing the package imports nothing else, and its clients need no GPU framework."""
    program = """
import sys
before = set(sys.modules)
import tokenbus
heavy = {"numpy", "google", "zmq", "tokenbus_contracts"}
added = set(sys.modules) - before
assert not heavy & {name.split(".")[0] for name in added}
assert {name for name in added if name.startswith("tokenbus")} == {"tokenbus", "tokenbus.on_use"}
assert "connect" in dir(tokenbus)
tokenbus.connect, tokenbus.Publisher, tokenbus.token_logprobs
assert not {"torch", "paddle", "cupy", "cuda"} & set(sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", program], check=False, timeout=MOST_SECONDS)
    assert not run.returncode
