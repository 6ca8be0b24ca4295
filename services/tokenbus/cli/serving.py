"""How a service of the command line runs: by its settings, until a signal asks it to leave."""

import argparse
import asyncio
import gc
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress

from tokenbus.cli.configuration import load_settings
from tokenbus.open_files import open_files_for
from tokenbus.settings import Settings
from tokenbus.signals import stop_on_signals

Serving = Callable[[Settings], AbstractAsyncContextManager[object]]


def serve(options: argparse.Namespace, serving: Serving) -> int:
    """Serve until a signal, let what is served take its leave, and return the exit status."""
    settings = load_settings(options)
    log_open_files = open_files_for(settings)
    asyncio.run(_until_asked_to_leave(serving, settings, log_open_files))
    return 0


async def _until_asked_to_leave(serving: Serving, settings: Settings, started: Callable[[], None]) -> None:
    served, starting = serving(settings), asyncio.current_task()
    with stop_on_signals() as stop:
        stopping = asyncio.create_task(_cancel_at(stop, starting))
        with suppress(asyncio.CancelledError):  # it was asked to leave before it had started
            async with served:
                stopping.cancel()
                started()
                # What is there from the start stays: the collector need not go over it again while tokens wait.
                gc.collect()
                gc.freeze()
                await stop.wait()


async def _cancel_at(stop: asyncio.Event, starting: asyncio.Task[None] | None) -> None:
    await stop.wait()
    if starting is not None:
        starting.cancel()
