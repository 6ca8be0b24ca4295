"""A client in a process of its own: it keeps requests open at all processors, and counts what comes."""

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable

from benchmarks.errors import WrongDeliveryError
from benchmarks.programs import until_workers
from tokenbus_services.client import Client, RequestEnd, StepRows, Stream
from tokenbus_services.settings import Settings

_MOST_TOKENS = 100_000_000
_MANY_STEPS = 1024


class Counts:
    """What came so far."""

    def __init__(self) -> None:
        """Begin at nothing."""
        self.rows = 0
        self.tokens = 0
        self.ends = 0
        self.seen: set[int] = set()
        """The requests that have had a row."""

    def take(self, output: StepRows | RequestEnd) -> None:
        """Count rows, or the end of a request, which is not to come."""
        if isinstance(output, RequestEnd):
            self.ends += 1
            print(f"ended: {output.error}", file=sys.stderr, flush=True)
            return
        self.rows += output.target.row_count
        self.tokens += output.target.token_ids.size

    def as_line(self) -> str:
        """Return them as a line."""
        own = {"rows": self.rows, "tokens": self.tokens, "ends": self.ends}
        return json.dumps({**own, "cpu": time.process_time(), "at": time.monotonic()})


async def _read(workers: int, requests: int, top_logprobs: int | None) -> None:
    counts, lines = Counts(), asyncio.Queue[str]()
    loop = asyncio.get_running_loop()

    def say(line: str) -> None:
        loop.call_soon_threadsafe(lines.put_nowait, line)

    threading.Thread(target=_listen, args=(say,), daemon=True).start()  # it must not hold up the end
    async with Client(Settings.load()) as client, client.steps(most=_MANY_STEPS) as steps:
        await until_workers(client, workers)
        for _ in range(requests):
            client.submit([1], max_tokens=_MOST_TOKENS, top_logprobs=top_logprobs)
        missing = requests
        while missing:
            output = await anext(steps)
            if isinstance(output, StepRows):
                counts.seen.update(output.target.request_keys.tolist())
                missing = requests - len(counts.seen)
            else:
                raise WrongDeliveryError(f"a request ended: {output.error}")
        print("ready", flush=True)
        reading = asyncio.create_task(_count(steps, counts))
        while await lines.get():
            print(counts.as_line(), flush=True)
        reading.cancel()


async def _count(steps: Stream[StepRows | RequestEnd], counts: Counts) -> None:
    async for output in steps:
        counts.take(output)


def _listen(say: Callable[[str], None]) -> None:
    """Pass on each line of standard input, and an empty one at its end."""
    for line in sys.stdin:
        say(line)
    say("")


if __name__ == "__main__":
    _workers, _requests, _k = sys.argv[1:]
    asyncio.run(_read(int(_workers), int(_requests), None if _k == "none" else int(_k)))
