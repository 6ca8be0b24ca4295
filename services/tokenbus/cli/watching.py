"""Watches the live items of workers, for `tap` and `record`."""

import argparse
import asyncio
from collections.abc import AsyncGenerator

from tokenbus.bus import Transport
from tokenbus.cli.arguments import whole
from tokenbus.cli.configuration import declare_settings
from tokenbus.client import Client
from tokenbus.recordings.items import StreamItem
from tokenbus.settings import Settings

_MOST_WAITING = 2048


def declare_watching(parser: argparse.ArgumentParser) -> None:
    """Declare the options that `watched` needs."""
    parser.add_argument("--worker", default="", metavar="ID", help="watch only this worker")
    parser.add_argument("--count", type=whole(), default=0, metavar="N", help="stop after N items")
    declare_settings(parser, {"--clients-address": "bus.clients_address"})


async def watched(
    settings: Settings, worker_id: str, stop: asyncio.Event, transport: Transport | None = None
) -> AsyncGenerator[StreamItem, None]:
    """Yield the items of one worker or of all workers. After `stop` is set, yield the buffered items and end."""
    async with Client(settings, transport=transport) as client, client.watch(worker_id, most=_MOST_WAITING) as items:
        stopping = asyncio.create_task(stop.wait())
        try:
            while not stop.is_set():
                if not len(items):
                    coming = asyncio.ensure_future(anext(items))
                    try:
                        await asyncio.wait({coming, stopping}, return_when=asyncio.FIRST_COMPLETED)
                        if not coming.done():
                            return
                    finally:
                        coming.cancel()
                    yield coming.result()
                else:
                    yield await anext(items)
            for _ in range(len(items)):
                yield await anext(items)
        finally:
            stopping.cancel()
