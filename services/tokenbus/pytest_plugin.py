"""Fixtures for `tokenbus.testing`, found by every pytest where Tokenbus is installed; unused ones import nothing."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

from tokenbus import testing

if TYPE_CHECKING:
    from tokenbus.testing import Bus

_HAS_ASYNCIO = find_spec("pytest_asyncio") is not None
"""Without it there are the golden messages, and no buses."""


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark that says how a test's bus is made."""
    config.addinivalue_line("markers", "tokenbus(**arguments): what tokenbus.testing.bus makes `tokenbus_bus` with")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes `tokenbus_golden_message` once for each of them."""
    if "tokenbus_golden_message" in metafunc.fixturenames:
        messages = list(testing.golden_messages())
        metafunc.parametrize("tokenbus_golden_message", messages, ids=[each.name for each in messages])


if _HAS_ASYNCIO:
    import pytest_asyncio

    @pytest_asyncio.fixture
    async def tokenbus_buses() -> AsyncIterator[Callable[..., Awaitable["Bus"]]]:
        """Return a function that starts a bus, as `tokenbus.testing.bus` does; the bus ends with the test."""
        async with AsyncExitStack() as stack:

            async def start(*arguments: Any, **named: Any) -> "Bus":  # noqa: ANN401 - as `bus` takes them
                return await stack.enter_async_context(testing.bus(*arguments, **named))

            yield start

    @pytest_asyncio.fixture
    async def tokenbus_bus(
        request: pytest.FixtureRequest, tokenbus_buses: Callable[..., Awaitable["Bus"]]
    ) -> AsyncIterator["Bus"]:
        """Return a bus, made as the mark `tokenbus` of the test says."""
        mark = request.node.get_closest_marker("tokenbus")
        yield await tokenbus_buses(*(mark.args if mark else ()), **(mark.kwargs if mark else {}))
