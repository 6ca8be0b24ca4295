"""Runs a service of the command line until a signal stops it."""

import argparse
import asyncio
import gc
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress

from tokenbus.cli.configuration import load_settings
from tokenbus.open_files import open_files_for
from tokenbus.settings import Settings
from tokenbus.signals import stop_on_signals

_NEW_OBJECTS = 10_000
"""Number of new objects between garbage collections. With Python's default, each engine step causes a collection."""


def serve(options: argparse.Namespace, serving: Callable[[Settings], AbstractAsyncContextManager[object]]) -> int:
    """Run a service until a signal arrives, shut the service down in order, and return the exit status."""
    settings = load_settings(options)
    log_open_files = open_files_for(settings)
    asyncio.run(_serve_until_signal(serving(settings), log_open_files))
    return 0


async def _serve_until_signal(served: AbstractAsyncContextManager[object], started: Callable[[], None]) -> None:
    starting = asyncio.current_task()
    with stop_on_signals() as stop:
        stopping = asyncio.create_task(_cancel_at(stop, starting))
        with suppress(asyncio.CancelledError):  # a signal arrived before the service was up
            async with served:
                stopping.cancel()
                started()
                # Exclude the objects that exist now from later garbage collections, which delay tokens.
                gc.collect()
                gc.freeze()
                gc.set_threshold(_NEW_OBJECTS, *gc.get_threshold()[1:])
                await stop.wait()


async def _cancel_at(stop: asyncio.Event, starting: asyncio.Task[None] | None) -> None:
    await stop.wait()
    if starting is not None:
        starting.cancel()
