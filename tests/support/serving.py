"""serve: an engine as a worker on the test's own event loop."""

import asyncio
from collections.abc import Callable
from typing import Any

from tokenbus.settings import Settings
from tokenbus.worker import Engine
from tokenbus.worker.run import EngineThread, serve_engine


async def serve(
    engine: Engine | Callable[[], Engine],
    settings: Settings,
    stop: asyncio.Event | None = None,
    **options: Any,  # noqa: ANN401 - as serve_engine has them
) -> None:
    """Run an engine until `stop` is set; cancelling this stops it without waiting for anything."""
    with EngineThread(engine) as thread:
        await asyncio.wrap_future(thread.made)
        await serve_engine(thread, settings, stop or asyncio.Event(), **options)
