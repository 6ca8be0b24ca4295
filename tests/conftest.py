"""What all tests share."""

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
