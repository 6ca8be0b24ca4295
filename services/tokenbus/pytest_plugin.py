"""pytest fixtures for `tokenbus.testing`. Every pytest loads this module, so the bus is imported only when used."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

from tokenbus import testing

if TYPE_CHECKING:
    from tokenbus.testing import Bus

_HAS_ASYNCIO = find_spec("pytest_asyncio") is not None
"""Whether pytest_asyncio is installed. Without it, only the golden messages are available."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "tokenbus(**arguments): arguments of tokenbus.testing.bus for `tokenbus_bus`")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "tokenbus_golden_message" in metafunc.fixturenames:
        messages = list(testing.golden_messages())
        metafunc.parametrize("tokenbus_golden_message", messages, ids=[each.name for each in messages])


if _HAS_ASYNCIO:
    import pytest_asyncio

    @pytest_asyncio.fixture
    async def tokenbus_buses() -> AsyncIterator[Callable[..., Awaitable["Bus"]]]:
        """A function that starts a bus with the arguments of `tokenbus.testing.bus`. The bus ends with the test."""
        async with AsyncExitStack() as stack:

            async def start(*arguments: Any, **named: Any) -> "Bus":  # noqa: ANN401 - those of `bus`
                return await stack.enter_async_context(testing.bus(*arguments, **named))

            yield start

    @pytest_asyncio.fixture
    async def tokenbus_bus(
        request: pytest.FixtureRequest, tokenbus_buses: Callable[..., Awaitable["Bus"]]
    ) -> AsyncIterator["Bus"]:
        """A bus with the arguments of the test's mark `tokenbus`."""
        mark = request.node.get_closest_marker("tokenbus")
        yield await tokenbus_buses(*(mark.args if mark else ()), **(mark.kwargs if mark else {}))
