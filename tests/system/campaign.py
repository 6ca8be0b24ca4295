"""Kill one process after another while requests run, and compare all that was delivered with the truth.

The processor is killed, a worker's publisher, its engine, both of them, or a client whose requests another one resumes.
"""

import asyncio
import hashlib
import json
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from tests.support.waiting import until
from tests.system.asking import wanted
from tests.system.audit import Audit
from tests.system.client_program import taken
from tests.system.deployment import Deployment
from tokenbus.client import Client, Generation
from tokenbus.delivery import RequestFailedError
from tokenbus_contracts.generated.request_pb2 import ErrorCode, Generate, SamplingParameters, TokenPrompt

VICTIMS = ("processor", "publisher", "engine", "worker", "client")
_LIFE_TOKENS = 1000
_LIFE_SECONDS = 15.0
_MOST_SECONDS = 60.0
_LOOK_SECONDS = 0.002
_EARLY = 0.1  # so many of the kills come before what is killed has met the others
_RESUMED, _RESUMED_TOKENS = 4, 1500
_KILLED_TOKENS = 3000
_PATIENCE = {
    # On a busy machine the next publisher takes seconds to start, and it may be killed meanwhile.
    "bus.heartbeat_timeout_ms": 10_000,
    # A request that died with the processor, before a worker had it, is asked for again only when these are over.
    "processor.unclaimed_timeout_ms": 5000,
}
_DUE = {
    ErrorCode.ERROR_CODE_ENGINE,
    ErrorCode.ERROR_CODE_WORKER_LOST,
    ErrorCode.ERROR_CODE_OVERLOADED,
    ErrorCode.ERROR_CODE_NO_WORKER,
    ErrorCode.ERROR_CODE_UNKNOWN_REQUEST,
}
"""How requests end that come while there is no engine, and those whose client died before their engine."""


@dataclass(slots=True)
class Figures:
    """What a campaign did, and what it found."""

    seed: int
    requests: int = 0
    tokens: int = 0
    lost: int = 0
    repeated: int = 0
    wrong_rows: int = 0
    errors: int = 0
    unfinished: int = 0
    resumed: int = 0
    """Requests of clients that died."""
    continued: int = 0
    """Requests that another engine finished after theirs had died."""
    client_handshakes: int = 0
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
    """A processor, a worker whose publisher has a process of its own, and a client whose requests follow each other."""

    def __init__(self, deployment: Deployment, seed: int, requests: int) -> None:
        self._deployment = deployment
        deployment.overrides.update(_PATIENCE)
        self._requests = requests
        self._random = random.Random(seed)  # noqa: S311 - a campaign can be run again
        self._over = asyncio.Event()
        self._audits: list[Audit] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._tokens = 0
        self._changes = 0
        """How often an engine died, or the next one came: odd while there is none."""
        self._publishers = self._unmet = 0
        """How many publishers the worker has had, and how many of them were killed before they met the processor."""
        self._kill: dict[str, Callable[[], Awaitable[None]]] = {
            "processor": self._kill_processor,
            "publisher": self._kill_publisher,
            "engine": self._kill_engine,
            "worker": self._kill_worker,
            "client": self._kill_client,
        }
        self.figures = Figures(seed)

    async def run(self, victims: Sequence[str]) -> Figures:
        self._processor = await asyncio.to_thread(self._deployment.start_processor)
        await self._start_worker()
        async with Client(self._deployment.settings()) as self._client:
            self._tasks += [asyncio.create_task(self._ask_on()) for _ in range(self._requests)]
            for victim in victims:
                await self._kill[victim]()
            await asyncio.to_thread(self._processor.wait_for, '"listening"')
            self._over.set()
            _, pending = await asyncio.wait(self._tasks, timeout=_MOST_SECONDS)
            for task in pending:
                task.cancel()
        figures = self.figures
        figures.unfinished = len(pending)
        figures.client_handshakes = sum(each.handshakes for each in self._client.sessions)
        for program in (self._worker, self._processor):
            if status := await asyncio.to_thread(program.terminate):
                raise RuntimeError(f"the {program.name} ended with status {status}:\n{program.output}")
        self._sum_up()
        return figures

    async def _start_worker(self) -> None:
        # An id of its own: the publisher of an engine that died has the last one's until it has delivered all.
        self._worker = self._deployment.start_module("handing_worker", worker__id=f"worker-{self._changes}")
        self._publishers = self._unmet = 0
        await asyncio.to_thread(self._worker.wait_for, '"connected"')

    async def _kill_processor(self) -> None:
        if self._is_early():
            await asyncio.sleep(self._random.random())
        else:
            await asyncio.to_thread(self._processor.wait_for, '"listening"')
            await self._see_tokens()
        await asyncio.to_thread(self._processor.kill)
        self._processor = self._deployment.start_processor(is_awaited=False)

    async def _kill_publisher(self) -> None:
        pid = await self._publisher()
        if self._is_early():
            self._unmet += 1
        else:
            # It logs each connection; processors come and go meanwhile.
            await asyncio.to_thread(self._worker.wait_for, '"connected"', self._publishers - self._unmet)
            await self._see_tokens()
        os.kill(pid, signal.SIGKILL)

    async def _kill_engine(self, *, with_publisher: bool = False) -> None:
        pid = await self._publisher()
        generation = self._client.generate(wanted(_KILLED_TOKENS))
        audit = self._audit(generation.request_id)
        taking = asyncio.create_task(self._take(audit, generation))
        self._tasks.append(taking)
        await until(lambda: audit.position or taking.done())
        await self._see_tokens()
        self._changes += 1
        self._worker.signal(signal.SIGKILL)
        if with_publisher:
            os.kill(pid, signal.SIGKILL)
        await self._start_worker()
        self._changes += 1

    async def _kill_worker(self) -> None:
        await self._kill_engine(with_publisher=True)

    async def _kill_client(self) -> None:
        """Kill a client in a process of its own, and resume its requests from what it had taken."""
        await asyncio.to_thread(self._processor.wait_for, '"listening"')
        program = self._deployment.start_module("client_program", str(_RESUMED_TOKENS), str(_RESUMED))
        await asyncio.to_thread(program.wait_for, "token", 10 * _RESUMED)
        await asyncio.to_thread(program.kill)
        for request_id, place in taken(program.lines("token ")).items():
            self.figures.resumed += 1
            audit = self._audit(request_id, place.position)
            generation = self._client.resume(place.turn_id, place.position)
            self._tasks.append(asyncio.create_task(self._take(audit, generation)))

    async def _publisher(self) -> int:
        """Return the process id of the worker's next publisher, once there is one."""
        self._publishers += 1
        line = await asyncio.to_thread(self._worker.wait_for, '{"publisher"', self._publishers)
        return int(json.loads(line)["publisher"])

    def _is_early(self) -> bool:
        return self._random.random() < _EARLY

    async def _see_tokens(self) -> None:
        """Wait until some more tokens came, and not for ever: a request may wait to be found unknown."""
        most, enough = time.monotonic() + _LIFE_SECONDS, self._tokens + self._random.randrange(_LIFE_TOKENS)
        while self._tokens < enough and time.monotonic() < most:  # noqa: ASYNC110 - several requests, one count
            await asyncio.sleep(_LOOK_SECONDS)

    async def _ask_on(self) -> None:
        """Have one request after the other, until the last kill."""
        while not self._over.is_set():
            generation = self._client.generate(
                Generate(
                    tokens=TokenPrompt(token_ids=[1]),
                    sampling=SamplingParameters(max_tokens=self._random.randrange(1, 1500)),
                    top_logprobs=self._random.choice((None, 0, 3)),
                    include_draft_logprobs=self._random.random() < 0.5,
                )
            )
            await self._take(self._audit(generation.request_id), generation)

    def _audit(self, request_id: int, position: int = 0) -> Audit:
        audit = Audit(request_id, position)
        self._audits.append(audit)
        return audit

    async def _take(self, audit: Audit, generation: Generation) -> None:
        changes, is_resumed = self._changes, audit.position > 0
        try:
            async for row in generation.rows():
                audit.take(row)
                self._tokens += row.token_ids.size
            self.figures.continued += len(generation.turns) > 1
        except RequestFailedError as error:
            has_no_engine = changes % 2 or changes != self._changes
            if not (error.code in _DUE and has_no_engine and (is_resumed or not audit.position)):
                self.figures.errors += 1
                self.figures.reasons.append(str(error))
            await asyncio.sleep(_LOOK_SECONDS)

    def _sum_up(self) -> None:
        figures = self.figures
        delivered, true = hashlib.sha256(), hashlib.sha256()
        for audit in self._audits:
            figures.requests += 1
            figures.tokens += audit.position
            figures.lost += audit.lost
            figures.repeated += audit.repeated
            figures.wrong_rows += audit.wrong
            delivered.update(f"{audit.key:016x} {audit.delivered}\n".encode())
            true.update(f"{audit.key:016x} {audit.true}\n".encode())
        figures.delivered_sha256, figures.true_sha256 = delivered.hexdigest(), true.hexdigest()
