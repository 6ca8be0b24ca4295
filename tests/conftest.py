"""What all tests share."""

import gc
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support import orphans, seconds
from tests.support.alone import Guard, marks_of
from tests.support.campaigns import many
from tokenbus.logs.output import unconfigure

# A failure must be the same on every machine and in every run: examples follow from the test, not from chance.
settings.register_profile("tokenbus", derandomize=True, deadline=None, database=None)
# `make soak` looks for new ones; what fails is printed with all that repeats it.
settings.register_profile(
    "soak", derandomize=False, deadline=None, database=None, print_blob=True, max_examples=many(500, 100)
)
settings.load_profile("tokenbus")

# Hundreds of processes are started here; each would compile all modules anew where a machine forbids to keep bytecode.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

_OWN_FOLDER = orphans.end_with_this_process()
_GUARD = Guard()
_TABLE_AFTER_SECONDS = 60.0


def pytest_configure(config: pytest.Config) -> None:
    """Have the folders of `tmp_path` in the run's own, by short paths."""
    if _OWN_FOLDER and config.option.basetemp is None:
        config.option.basetemp = f"{_OWN_FOLDER}/t"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import a module whose tests are all deselected by their place, as `-m "not process and not long"` does."""
    parts = config.option.markexpr.split(" and ")
    refused = {part.removeprefix("not ") for part in parts} if all(part.startswith("not ") for part in parts) else set()
    return True if refused.intersection(marks_of(collection_path)) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that are no unit tests by their place, before they are selected by mark."""
    for item in items:
        for mark in marks_of(item.path):
            item.add_marker(mark)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin with what waits for processes, so that none of it is left alone at the end.

    The garbage collector is kept from going over all modules and tests, at each collection, until the end.
    """
    session.items.sort(key=lambda item: item.get_closest_marker("process") is None)
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Refuse that a unit test, or a fixture that it begins, starts a process."""
    _GUARD.switch(is_on=item.get_closest_marker("process") is None)
    try:
        return (yield)
    finally:
        _GUARD.switch(is_on=False)


@pytest.fixture(autouse=True)
def refused() -> Iterator[list[str]]:
    """Fail a unit test that tried to start a process, also where what it tests has caught the refusal."""
    yield _GUARD.refused
    assert not _GUARD.refused, _GUARD.refused


@pytest.fixture(autouse=True)
def logs_as_at_the_start() -> Iterator[None]:
    """Reset logging after each test, so that none writes to an output that another configured."""
    yield
    unconfigure()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="tb") as name:
        yield Path(name)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped: Counter[tuple[str, str]] = Counter()
    for report in terminalreporter.getreports("skipped"):
        _path, _line, reason = report.longrepr
        skipped[report.nodeid.split("::")[0].rpartition("/")[0], reason.removeprefix("Skipped: ")] += 1
    for (folder, reason), count in sorted(skipped.items()):
        terminalreporter.write_line(f"not run: {count} tests of {folder}: {reason}")
    found = [each for state in ("", "passed", "failed", "error") for each in terminalreporter.getreports(state)]
    reports = [each for each in found if isinstance(each, pytest.TestReport)]  # and not of a module that has errors
    if sum(each.duration for each in reports) > _TABLE_AFTER_SECONDS:
        for line in seconds.table((each.nodeid, each.duration) for each in reports):
            terminalreporter.write_line(line)
