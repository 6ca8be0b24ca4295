"""A pytest plugin that tells coverage which test runs: `coverage run -m pytest -p tests.mutants.contexts`."""

from collections.abc import Generator

import coverage
import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Attribute the lines that run during a test, its fixtures and its teardown to the test's function."""
    running = coverage.Coverage.current()
    if running is None:
        raise pytest.UsageError("tests.mutants.contexts needs `coverage run`")
    running.switch_context(item.nodeid.partition("[")[0])
    try:
        return (yield)
    finally:
        running.switch_context("")
