"""A reader of the log in a process of its own: `python -m benchmarks.durable_log.reader ADDRESS`.

A line of its input names a worker's life and the time from which on it is written; its items are read up to one with
the payload END, and a line says how many came.
"""

import asyncio
import json
import sys
import time
from contextlib import aclosing
from datetime import UTC, datetime

from tokenbus_services.durable_log.reader import read_log

END = b"end"


async def _read(address: str, epoch: int, since: datetime) -> None:
    items, cpu = 0, 0.0
    async with aclosing(read_log(address, since=since, follow=True)) as log:
        async for item in log:
            if item.epoch != epoch:
                continue
            if item.payload == END:
                break
            if not items:
                cpu = time.process_time()
                print("ready", flush=True)
            items += 1
    print(json.dumps({"items": items, "cpu": time.process_time() - cpu}), flush=True)


if __name__ == "__main__":
    for line in sys.stdin:
        _epoch, _since = line.split()
        asyncio.run(_read(sys.argv[1], int(_epoch), datetime.fromtimestamp(float(_since), UTC)))
