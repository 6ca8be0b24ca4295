"""Kill one process again and again while requests run, and compare all that was delivered with the truth.

`python -m tests.system.campaign --kills 50` kills the processor, prints the figures, and fails unless nothing was
lost, repeated or out of order. With `--kill publisher` or `--kill engine` one of the two processes of a worker dies in
the processor's place: under a publisher that dies no request ends, under an engine that dies each open one does.
"""

import argparse
import asyncio
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar

from tests.support import orphans
from tests.system.audit import Audit
from tests.system.deployment import Deployment, Overrides
from tests.system.programs import Program, tell
from tokenbus.client import Client
from tokenbus.delivery import RequestFailedError
from tokenbus.logs import configure
from tokenbus.settings import LogSettings
from tokenbus_contracts.generated.request_pb2 import ErrorCode, Generate, SamplingParameters, TokenPrompt

_CLIENTS = 2
_LIFE_TOKENS = 3000
_LIFE_SECONDS = 15.0
_MOST_SECONDS = 60.0
_LOOK_SECONDS = 0.002
_PATIENCE: Overrides = {
    "bus.heartbeat_timeout_ms": 3000,
    "processor.unclaimed_timeout_ms": 5000,
    "processor.handoff_timeout_ms": 8000,
}
"""A request that died with the processor, before a worker had it, is asked for again only when these are over."""
_DUE = {
    ErrorCode.ERROR_CODE_ENGINE,
    ErrorCode.ERROR_CODE_WORKER_LOST,
    ErrorCode.ERROR_CODE_OVERLOADED,
    ErrorCode.ERROR_CODE_NO_WORKER,
}
"""How requests end whose engine died, and those that come before there is another."""
_EARLY = 0.1  # so many of the kills come before the new processor listens


@dataclass(slots=True)
class Figures:
    """What a campaign did, and what it found."""

    seed: int
    kills: int = 0
    kills_while_starting: int = 0
    seconds: float = 0.0
    requests: int = 0
    tokens: int = 0
    lost: int = 0
    repeated: int = 0
    wrong_rows: int = 0
    errors: int = 0
    unfinished: int = 0
    ended: int = 0
    """Requests that ended because the engine's process had died, each with its error and some tokens."""
    items_sent: int = 0
    items_sent_again: int = 0
    rows_dropped_as_repeated: int = 0
    client_handshakes: int = 0
    longest_pause_ms: int = 0
    slowest_ends_ms: int = 0
    """After the engine's process died, until the last request had ended."""
    delivered_sha256: str = ""
    true_sha256: str = ""
    reasons: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Whether nothing was lost, repeated, out of order or wrong, and no request ended with an error."""
        return not (self.lost or self.repeated or self.wrong_rows or self.errors or self.unfinished) and (
            self.delivered_sha256 == self.true_sha256 != ""
        )


class Campaign:
    """A worker, clients whose requests follow each other without end, and a processor that is killed."""

    worker_module = "counting_worker"
    patience: ClassVar[Overrides] = _PATIENCE

    def __init__(self, deployment: Deployment, kills: int, seed: int, requests: int) -> None:
        self._deployment = deployment
        deployment.overrides.update(self.patience)
        self._kills = kills
        self._requests = requests
        self._random = random.Random(seed)  # noqa: S311 - a campaign can be run again
        self._over = asyncio.Event()
        self._audits: list[Audit] = []
        self._tokens = 0
        self._last_row = 0.0
        self._last_end = 0.0
        """When a request that had begun ended with an error last."""
        self._longest_pause = 0.0
        self.figures = Figures(seed)

    async def run(self) -> Figures:
        begin = time.monotonic()
        processor = await asyncio.to_thread(self._deployment.start_processor)
        worker = await self._start_worker()
        settings = self._deployment.settings()
        clients = [Client(settings) for _ in range(_CLIENTS)]
        async with clients[0], clients[1]:
            self._last_row = time.monotonic()
            asking = [asyncio.create_task(self._ask(clients[place % _CLIENTS])) for place in range(self._requests)]
            processor, worker = await self._kill_often(processor, worker)
            self._over.set()
            _, pending = await asyncio.wait(asking, timeout=_MOST_SECONDS)
            for task in pending:
                task.cancel()
        self.figures.unfinished = len(pending)
        figures = self.figures
        figures.client_handshakes = sum(each.handshakes for client in clients for each in client.sessions)
        figures.rows_dropped_as_repeated = sum(client.requests.repeated for client in clients)
        status = await asyncio.to_thread(worker.terminate)
        if status:
            raise RuntimeError(f"the worker ended with status {status}:\n{worker.output}")
        for counts in map(json.loads, worker.lines('{"sent"')):
            figures.items_sent, figures.items_sent_again = counts["sent"], counts["sent_again"]
        await asyncio.to_thread(processor.terminate)
        figures.seconds = round(time.monotonic() - begin, 1)
        self._sum_up()
        return figures

    async def _start_worker(self) -> Program:
        worker = self._deployment.start_module(self.worker_module)
        await asyncio.to_thread(worker.wait_for, '"connected"')
        return worker

    async def _kill_often(self, processor: Program, worker: Program) -> tuple[Program, Program]:
        """Kill one of the two, and start another in its place; return those that run at the end."""
        for _ in range(self._kills):
            if self._random.random() < _EARLY:
                self.figures.kills_while_starting += 1
                await asyncio.sleep(self._random.random())
            else:
                await asyncio.to_thread(processor.wait_for, '"listening"')
                await self._see_tokens(self._random.randrange(_LIFE_TOKENS))
            await asyncio.to_thread(processor.kill)
            self.figures.kills += 1
            processor = self._deployment.start_processor(is_awaited=False)
        await asyncio.to_thread(processor.wait_for, '"listening"')
        return processor, worker

    async def _see_tokens(self, count: int) -> None:
        """Wait until so many more tokens came, and not for ever: a request may wait to be found unknown."""
        most, enough = time.monotonic() + _LIFE_SECONDS, self._tokens + count
        while self._tokens < enough and time.monotonic() < most:  # noqa: ASYNC110 - several clients, one count
            await asyncio.sleep(_LOOK_SECONDS)

    async def _ask(self, client: Client) -> None:
        """Have one request after the other, until the last kill."""
        while not self._over.is_set():
            tokens = client.generate(
                Generate(
                    tokens=TokenPrompt(token_ids=[1]),
                    sampling=SamplingParameters(max_tokens=self._random.randrange(1, 1500)),
                    top_logprobs=self._random.choice((None, 0, 3)),
                    include_draft_logprobs=self._random.random() < 0.5,
                )
            )
            audit = Audit(tokens.request_id)
            self._audits.append(audit)
            try:
                async for row in tokens.rows():
                    now = time.monotonic()
                    self._longest_pause = max(self._longest_pause, now - self._last_row)
                    self._last_row = now
                    audit.take(row)
                    self._tokens += row.token_ids.size
            except RequestFailedError as error:
                audit.error = error
                if audit.position:
                    self._last_end = time.monotonic()
                await asyncio.sleep(_LOOK_SECONDS)

    def _is_due(self, error: RequestFailedError) -> bool:  # noqa: ARG002 - it depends on what is killed
        """Tell whether a request had to end with this error."""
        return False

    def _sum_up(self) -> None:
        figures = self.figures
        delivered, true = hashlib.sha256(), hashlib.sha256()
        for audit in self._audits:
            figures.requests += 1
            figures.tokens += audit.position
            figures.lost += audit.lost
            figures.repeated += audit.repeated
            figures.wrong_rows += audit.wrong
            if audit.error is not None and self._is_due(audit.error):
                figures.ended += audit.position > 0
            elif audit.error is not None:
                figures.errors += 1
                figures.reasons.append(str(audit.error))
            delivered.update(f"{audit.key:016x} {audit.delivered}\n".encode())
            true.update(f"{audit.key:016x} {audit.true}\n".encode())
        figures.delivered_sha256, figures.true_sha256 = delivered.hexdigest(), true.hexdigest()
        figures.longest_pause_ms = round(self._longest_pause * 1000)


class PublisherCampaign(Campaign):
    """The publisher of a worker is killed, whose engine goes on in a process of its own."""

    worker_module = "handing_worker"
    patience: ClassVar[Overrides] = {**_PATIENCE, "bus.heartbeat_timeout_ms": 30_000}
    """On a busy machine the next publisher takes seconds to start, and it may be killed meanwhile."""

    async def _kill_often(self, processor: Program, worker: Program) -> tuple[Program, Program]:
        for number in range(1, self._kills + 1):
            publisher = await asyncio.to_thread(worker.wait_for, '{"publisher"', number)
            if self._random.random() < _EARLY:
                self.figures.kills_while_starting += 1  # it has not met the processor
            else:
                await asyncio.to_thread(worker.wait_for, '"connected"', number - self.figures.kills_while_starting)
                await self._see_tokens(self._random.randrange(_LIFE_TOKENS))
            os.kill(json.loads(publisher)["publisher"], signal.SIGKILL)
            self.figures.kills += 1
        await asyncio.to_thread(worker.wait_for, '{"publisher"', self._kills + 1)
        return processor, worker


class EngineCampaign(Campaign):
    """The engine's process of a worker is killed, whose publisher has one of its own, and another is started."""

    worker_module = "handing_worker"

    async def _kill_often(self, processor: Program, worker: Program) -> tuple[Program, Program]:
        for _ in range(self._kills):
            await self._see_tokens(self._random.randrange(_LIFE_TOKENS))
            killed = time.monotonic()
            await asyncio.to_thread(worker.kill)
            self.figures.kills += 1
            worker = await self._start_worker()
            slowest = round(1000 * (self._last_end - killed))
            self.figures.slowest_ends_ms = max(self.figures.slowest_ends_ms, slowest)
        return processor, worker

    def _is_due(self, error: RequestFailedError) -> bool:
        return error.code in _DUE


CAMPAIGNS = {"processor": Campaign, "publisher": PublisherCampaign, "engine": EngineCampaign}
"""By what is killed."""


async def campaign(
    deployment: Deployment, kills: int, seed: int, requests: int = 48, *, kill: str = "processor"
) -> Figures:
    return await CAMPAIGNS[kill](deployment, kills, seed, requests).run()


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=48, help="how many are open at once")
    parser.add_argument("--kill", choices=tuple(CAMPAIGNS), default="processor")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    configure(LogSettings(level="error"))
    with tempfile.TemporaryDirectory(prefix="tb", dir="/tmp") as folder:
        deployment = Deployment(Path(folder))
        try:
            figures = asyncio.run(
                campaign(deployment, options.kills, options.seed, options.requests, kill=options.kill)
            )
        finally:
            deployment.close()
    values = asdict(figures)
    if options.json:
        tell(json.dumps(values, indent=2))
    else:
        tell("\n".join(f"{name:26} {value}" for name, value in values.items()))
    return 0 if figures.is_clean else 1


if __name__ == "__main__":
    orphans.end_with_this_process()
    sys.exit(_main())
