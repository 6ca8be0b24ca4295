"""The system's own programs, as the benchmarks start them, wait for them, and what they ask of them."""

import asyncio
import sys

from benchmarks.errors import NotRunError
from tokenbus_services.client import Client

_MAIN = "import sys; from tokenbus_services.cli import main; sys.exit(main())"
PROMPT = "In the evening the old man said"
_LOOK_SECONDS = 0.1
PATIENCE = 600.0
"""Seconds that a benchmark waits for its processes: on a busy machine each may stand still for long."""


def tokenbus(python: str = sys.executable) -> list[str]:
    """Return the command `tokenbus` of an interpreter, where its script need not be installed."""
    return [python, "-c", _MAIN]


async def until_workers(client: Client, count: int) -> None:
    """Wait until a client's processors have so many workers; raises NotRunError."""
    try:
        async with asyncio.timeout(PATIENCE):
            while await _workers_of(client) < count:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(_LOOK_SECONDS)
    except TimeoutError:
        raise NotRunError(f"not run: no {count} workers within {PATIENCE:g} s") from None


async def _workers_of(client: Client) -> int:
    try:
        return len((await client.status()).workers)
    except TimeoutError:  # it knows no processor yet
        return 0
