"""Tokens a second of the ngram engine through the whole system: a worker, a processor and a client, each a process."""

import asyncio
import contextlib
import subprocess
import tempfile
import time
from collections.abc import Iterator

from benchmarks.programs import PATIENCE, PROMPT, tokenbus, until_workers
from tokenbus_contracts.generated.request_pb2 import Generate, SamplingParameters, TextPrompt
from tokenbus_services.client import Client, RequestEnd, StepRows
from tokenbus_services.settings import Settings

REQUESTS = 256
_TOKENS_A_REQUEST = 1500
_WARM_SECONDS = 1.0


def measure(top_logprobs: int | None, seconds: float) -> float:
    """Return how many tokens a second reach a client that has so many requests open all the time."""
    with tempfile.TemporaryDirectory() as folder, _services(folder) as settings:
        return asyncio.run(_rate(settings, top_logprobs, seconds))


async def _rate(settings: Settings, top_logprobs: int | None, seconds: float) -> float:
    tokens = 0
    stop, first = asyncio.Event(), asyncio.Event()

    def came(output: StepRows | RequestEnd) -> None:
        nonlocal tokens
        if isinstance(output, StepRows):
            tokens += output.target.token_ids.size
            first.set()

    async with Client(settings) as client:
        client.requests.open_stream(came)
        await until_workers(client, 1)
        async with asyncio.TaskGroup() as group:  # where a request fails there is no rate
            for number in range(REQUESTS):
                group.create_task(_ask_on(client, number, top_logprobs, stop))
            await first.wait()
            await asyncio.sleep(_WARM_SECONDS)
            before, begin = tokens, time.monotonic()
            await asyncio.sleep(seconds)
            rate = (tokens - before) / (time.monotonic() - begin)
            stop.set()
    return rate


async def _ask_on(client: Client, number: int, top_logprobs: int | None, stop: asyncio.Event) -> None:
    """Ask for one request after the other, and end the last one before its time."""
    while not stop.is_set():
        sampling = SamplingParameters(seed=number, max_tokens=_TOKENS_A_REQUEST, ignore_end_token=True)
        request = Generate(text=TextPrompt(text=PROMPT), sampling=sampling, top_logprobs=top_logprobs)
        async for _ in client.generate(request).rows():
            if stop.is_set():
                return


@contextlib.contextmanager
def _services(folder: str) -> Iterator[Settings]:
    overrides = {
        "bus.workers_address": f"ipc://{folder}/w",
        "bus.clients_address": f"ipc://{folder}/c",
        "dead_letters.directory": f"{folder}/letters",
        "metrics.address": "",
        "log.level": "error",
        "processor.drain_timeout_ms": 0,
        "worker.drain_timeout_ms": 0,
        "client.drain_timeout_ms": 0,
    }
    given = [argument for key, value in overrides.items() for argument in ("--set", f"{key}={value}")]
    commands = [[*tokenbus(), "processor"], [*tokenbus(), "worker", "--engine", "ngram"]]
    programs = [subprocess.Popen([*command, *given]) for command in commands]
    try:
        yield Settings.load(environment={}, overrides=overrides)
    finally:
        for program in reversed(programs):
            program.terminate()
            program.wait(PATIENCE)
