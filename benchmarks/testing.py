"""Measure a bus in a test, and checks of messages in CI: `python -m benchmarks.testing`.

A bus of tokenbus.testing is started and ended, and gives many requests their tokens, all in one event loop. `tokenbus
check` takes files of one message each, and `tokenbus schema diff` compares two schemas, each with the start of Python.
"""

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.report import Report, Row
from tokenbus import testing
from tokenbus_contracts import encode

_ROWS, _TOKENS = 256, 3
_REQUESTS, _MOST_TOKENS = 64, 300


def main(arguments: Sequence[str] | None = None) -> None:
    report = Report("testing", __doc__)
    options = report.parse(arguments)
    count, files = (3, 100) if options.quick else (100, 10_000)
    report.table([_started(count), *(_tokens(requests, 3 if options.quick else 9) for requests in (1, _REQUESTS))])
    report.table([_checked(files, top_k) for top_k in (0, 20)] + [_compared(3 if options.quick else 9)], "commands")
    report.write()


def _started(count: int) -> Row:
    async def once() -> None:
        async with testing.bus():
            pass

    seconds = _median(lambda: asyncio.run(once()), count)
    return {"what": "a bus is started and ended", "ms": seconds * 1000, "goal": "30 ms"}


def _tokens(requests: int, count: int) -> Row:
    async def once() -> float:
        async with testing.bus() as bus:

            async def ask() -> None:
                async for _ in bus.client.generate([1, 2, 3], max_tokens=_MOST_TOKENS, top_logprobs=0):
                    pass

            began = time.perf_counter()
            await asyncio.gather(*(ask() for _ in range(requests)))
            return time.perf_counter() - began

    seconds = float(np.median([asyncio.run(once()) for _ in range(count)]))
    what = f"{requests} request{'s' * (requests > 1)} of {_MOST_TOKENS} tokens"
    return {
        "what": what,
        "ms": seconds * 1000,
        "tokens/s": requests * _MOST_TOKENS / seconds,
        "goal": "20,000 tokens/s",
    }


def _checked(files: int, top_k: int) -> Row:
    data = encode(testing.batch([testing.RowShape(key + 1, 0, _TOKENS, top_k=top_k) for key in range(_ROWS)]))
    with tempfile.TemporaryDirectory() as folder:
        names = [f"{number}.binpb" for number in range(files)]
        for name in names:
            Path(folder, name).write_bytes(data)
        seconds = _median(lambda: _run("check", *names, folder=folder), 3)
    what = f"check of {files:,} messages, {_ROWS} x {_TOKENS}, k = {top_k}, of {len(data):,} bytes"
    return {"what": what, "s": seconds, "MB/s": files * len(data) / seconds / 1e6, "goal": "50 MB/s"}


def _compared(count: int) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        _run("schema", "descriptor", "--output", "old.binpb", folder=folder)
        seconds = _median(lambda: _run("schema", "diff", "old.binpb", folder=folder), count)
    return {"what": "schema diff of two descriptor sets", "s": seconds}


def _run(*arguments: str, folder: str) -> None:
    command = [str(Path(sys.executable).with_name("tokenbus")), *arguments]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)


def _median(call: Callable[[], object], count: int) -> float:
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return float(np.median(seconds))


if __name__ == "__main__":
    main()
