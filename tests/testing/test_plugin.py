"""The pytest plugin: a project of somebody else has its fixtures by installing Tokenbus."""

import re
import subprocess
import sys
from pathlib import Path

from tests.pages import blocks
from tokenbus import testing

_FIXTURES = """
import pytest
import tokenbus
from tokenbus import testing


async def ids_of(generation):
    return [token.id async for token in generation]


@pytest.mark.asyncio
@pytest.mark.tokenbus(testing.ScriptedEngine(testing.Answer(tokens=[5, 6])), step_seconds=0.5)
async def test_bus_is_made_as_the_mark_says(tokenbus_bus):
    before = tokenbus_bus.clock.now()
    assert await tokenbus_bus.until(ids_of(tokenbus_bus.client.generate([1]))) == [5, 6]
    assert tokenbus_bus.clock.now() - before >= 1


@pytest.mark.asyncio
async def test_buses_are_made_as_they_are_asked_for(tokenbus_buses):
    for workers in (1, 2):
        bus = await tokenbus_buses(testing.SyntheticEngine, workers=workers)
        assert len(bus.workers) == workers


def test_golden_messages_come_one_by_one(tokenbus_golden_message):
    assert tokenbus_golden_message.is_valid is tokenbus_golden_message.name.startswith("valid/")
"""


_STRICT = """[pytest]
asyncio_mode = strict
asyncio_default_fixture_loop_scope = function
addopts = --strict-markers -W error
"""


def output_of(folder: Path, *options: str) -> str:
    unneeded = ("anyio", "hypothesispytest", "randomly", "schemathesis", "xdist")
    others = [option for name in unneeded for option in ("-p", f"no:{name}")]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *others, *options, str(folder)]
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    return found.stdout + found.stderr


def test_fixtures_and_the_examples_of_the_page_in_strict_mode(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text(_FIXTURES)
    (tmp_path / "pytest.ini").write_text(_STRICT)
    examples = blocks("python", of="docs/testing.md")
    for block in examples:
        is_async = "async def test_" in block.text
        mark = "import pytest\n\npytestmark = pytest.mark.asyncio\n" if is_async else ""
        (tmp_path / f"test_line_{block.line}.py").write_text(mark + block.text)
    tests = sum(len(re.findall(r"^(?:async )?def test_", block.text, re.MULTILINE)) for block in examples)
    printed = output_of(tmp_path)
    assert tests == 4
    assert f"{len(list(testing.golden_messages())) + 2 + tests} passed" in printed, printed


def test_nothing_is_imported_before_it_is_used(tmp_path: Path) -> None:
    """A project's other tests pay nothing for what they do not use; without pytest-asyncio the rest is there."""
    heavy = "{'zmq', 'google.protobuf', 'tokenbus_contracts', 'tokenbus.bus'}"
    (tmp_path / "test_theirs.py").write_text(
        f"import sys\nAT_FIRST = {heavy} & set(sys.modules)\ndef test_light(): assert not AT_FIRST\n"
    )
    printed = output_of(tmp_path, "-p", "no:asyncio")
    assert "1 passed" in printed, printed
