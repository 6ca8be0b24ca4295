"""A processor whose steps are taken as they come, until it is told to stop; its settings are KEY=VALUE arguments."""

import asyncio
import signal
import sys

from tokenbus_services.logs import configure
from tokenbus_services.processor import Processor
from tokenbus_services.settings import LogSettings, Settings


async def _take(settings: Settings) -> None:
    async with Processor(settings) as processor:
        steps = processor.steps()
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        async for step in steps:
            step.target  # noqa: B018 - who asks for it has the step put in batch order


async def _main(settings: Settings) -> None:
    task = asyncio.create_task(_take(settings))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await asyncio.wait([task])


if __name__ == "__main__":
    configure(LogSettings(level="error"))
    asyncio.run(_main(Settings.load(environment={}, overrides=dict(pair.split("=", 1) for pair in sys.argv[1:]))))
