"""The reader of a tapped vLLM's stream: a processor in a process of its own, which counts the tokens that come."""

import asyncio
from multiprocessing.connection import Connection

from tokenbus.processor import Processor
from tokenbus.settings import Settings

READY, TOKENS = "ready", "tokens"


def read_steps(connection: Connection, settings: Settings) -> None:
    """Take every step; send READY once workers can come, and the tokens so far each time that TOKENS comes."""
    asyncio.run(_read(connection, settings))


async def _read(connection: Connection, settings: Settings) -> None:
    tokens = 0

    async def count() -> None:
        nonlocal tokens
        async for step in processor.steps():
            tokens += int(step.rows.token_counts.sum())

    async with Processor(settings) as processor:
        counting = asyncio.create_task(count())
        connection.send(READY)
        while await asyncio.to_thread(connection.recv) == TOKENS:
            if counting.done():
                counting.result()
            connection.send(tokens)
        counting.cancel()
