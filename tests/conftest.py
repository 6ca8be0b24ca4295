"""What all tests share."""

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tokenbus_services.logs.output import unconfigure

# A failure must be everybody's, and the same again: the examples follow from the test, not from chance.
settings.register_profile("tokenbus", derandomize=True, deadline=None, database=None)
settings.load_profile("tokenbus")


@pytest.fixture(autouse=True)
def logs_as_at_the_start() -> Iterator[None]:
    """Let no test's logs go where another one, or a command that it ran, sent them."""
    yield
    unconfigure()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which tests were not run, and why, once for each folder and reason."""
    skipped: Counter[tuple[str, str]] = Counter()
    for report in terminalreporter.getreports("skipped"):
        _path, _line, reason = report.longrepr
        skipped[report.nodeid.split("::")[0].rpartition("/")[0], reason.removeprefix("Skipped: ")] += 1
    for (folder, reason), count in sorted(skipped.items()):
        terminalreporter.write_line(f"not run: {count} tests of {folder}: {reason}")
