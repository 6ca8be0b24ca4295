"""A processor as a process: it takes its settings from the environment, and ends when it is asked to."""

import asyncio
import signal

from tokenbus_services.logs import configure
from tokenbus_services.processor import TokenProcessor
from tokenbus_services.settings import Settings


async def _main() -> None:
    settings = Settings.load()
    configure(settings.log)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with TokenProcessor(settings):
        await stop.wait()


if __name__ == "__main__":
    asyncio.run(_main())
