"""Kill and stop one process after another, and compare all that was delivered with the truth.

There are two processors with keys, a client whose requests follow each other in sessions, and prefill, decode and
mixed workers that draft tokens, with publishers in processes of their own.
"""

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any

from tests.bus.keyed import Keyring
from tests.support.ports import free_ports
from tests.support.waiting import until
from tests.system.asked_sessions import AskedRequest, AskedSessions, SessionFigures
from tests.system.audit import Audit
from tests.system.client_program import taken
from tests.system.deployment import COMMAND, Deployment, Overrides
from tests.system.programs import Program
from tokenbus.client import Client, Generation
from tokenbus.delivery import RequestFailedError
from tokenbus.delivery.errors import code_name
from tokenbus.recordings.items import read_recording
from tokenbus.recordings.sessions import items_of
from tokenbus_contracts.generated.request_pb2 import Generate, SamplingParameters, TokenPrompt

ROLES = ("prefill", "prefill", "decode", "decode", "mixed", "mixed")
USUAL: Overrides = {
    "bus.heartbeat_ms": 1000,
    "bus.heartbeat_timeout_ms": 3000,
    "bus.reconnect_ms": 100,
    "bus.reconnect_max_ms": 500,
}
"""The settings' own times: a deployment of the tests has others."""
_PACE_SECONDS = "0.02"
_MOST_STOPPED, _MOST_SECONDS = 4.0, 60.0
_MOST_TOKENS, _MOST_PROMPT = 1500, 1000
_RESUMED, _RESUMED_TOKENS = 4, 300
_LIFE_TOKENS = 500
_MOST_FOLLOWING = 4
"""Requests of a session."""
_MOST_ADDED = 30
"""Tokens between an answer and the next one."""
_STILL_SECONDS = 1.0
"""The time without a new item after which the recorder is stopped."""


@dataclass(slots=True)
class Figures:
    faults: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    tokens: int = 0
    turns: int = 0
    resumed: int = 0
    """Requests of clients that died."""
    handshakes: int = 0
    """How often the client met a processor."""
    wrong: list[Audit] = field(default_factory=list)
    """Requests with lost, repeated or wrong tokens."""
    errors: Counter[str] = field(default_factory=Counter)
    """Requests that ended with an error, by its code."""
    unfinished: int = 0
    pauses: list[float] = field(default_factory=list)
    """The longest pause between two rows of each request."""

    @property
    def finished(self) -> int:
        return self.requests - sum(self.errors.values()) - self.unfinished

    def __str__(self) -> str:
        pauses = sorted(self.pauses)
        p50, p99, most = (pauses[min(len(pauses) - 1, int(part * len(pauses)))] for part in (0.5, 0.99, 1))
        return (
            f"{sum(self.faults.values())} faults {dict(self.faults)}; {self.requests} requests, {self.tokens} tokens, "
            f"{self.turns} turns; {len(self.wrong)} wrong, {self.finished} finished, {dict(self.errors)} errors, "
            f"{self.unfinished} unfinished; longest pause of a request: p50 {p50:.2f}, p99 {p99:.2f}, most {most:.2f} s"
        )


class Worker:
    def __init__(self, start: Callable[[], Program]) -> None:
        self._start = start
        self.program = start()

    @property
    def publisher(self) -> int:
        """The process id of the last publisher; 0: there was none."""
        lines = self.program.lines('{"publisher"')
        return int(json.loads(lines[-1])["publisher"]) if lines else 0

    def restart(self) -> None:
        self.program = self._start()


class Faults:
    """A campaign of faults. A process that died is started again at once."""

    def __init__(
        self, deployment: Deployment, folder: Path, requests: int, roles: Sequence[str] = ROLES, seed: int = 0
    ) -> None:
        self._deployment, self._requests, self._roles = deployment, requests, roles
        self._random = random.Random(seed)  # noqa: S311 - faults can be had again
        self._folder = folder
        self._keys = Keyring(folder)
        self._keys.make("peer")
        self._keys.allow(self._keys.entry("peer"))
        ports = [f"tcp://127.0.0.1:{port}" for port in free_ports(4)]
        self._places = [
            {"bus.workers_address": ports[place], "bus.clients_address": ports[2 + place]} for place in (0, 1)
        ]
        deployment.overrides |= {"bus.workers_address": ",".join(ports[:2]), "bus.clients_address": ",".join(ports[2:])}
        self._numbers, self._labels = count(), count()
        self._over = asyncio.Event()
        self._bag: list[Worker] = []
        """Workers whose engine is killed before any other's a second time."""
        self.figures = Figures()
        self.sessions = AskedSessions()

    async def one_by_one(self, faults: Sequence[str]) -> Figures:
        """Let each fault follow some tokens."""
        async with self._running():
            for name in faults:
                least = self.figures.tokens + _LIFE_TOKENS
                await until(lambda: self.figures.tokens >= least)  # noqa: B023 - it is awaited here
                await self._begin(name)
        return self.figures

    async def at_random(self, faults: Sequence[str], seconds: float, every: float) -> Figures:
        """Let faults follow each other at an interval, some before the last one is over."""
        async with self._running():
            end = time.monotonic() + seconds
            doing = []
            while time.monotonic() < end:
                doing.append(asyncio.create_task(self._begin(self._random.choice(faults))))
                await asyncio.sleep(every)
            await asyncio.gather(*doing)
        return self.figures

    def recorded(self) -> SessionFigures:
        """Compare the sessions with the recordings of an observer."""
        return self.sessions.compared(chain.from_iterable(map(read_recording, self._recordings())))

    def logged(self) -> SessionFigures:
        """Compare the sessions with the durable log."""
        return self.sessions.compared(items_of([str(self._deployment.overrides["durable_log.address"])], []))

    def _recordings(self) -> list[Path]:
        return sorted(self._folder.glob("*.tokenbus"))

    async def _stop_recording(self, recorder: Program) -> None:
        """Stop the recorder once nothing more arrives."""
        size, before = 0, -1
        while size != before:
            await asyncio.sleep(_STILL_SECONDS)
            size, before = sum(path.stat().st_size for path in self._recordings()), size
        await asyncio.to_thread(recorder.terminate)

    async def _begin(self, name: str) -> None:
        self.figures.faults[name] += 1
        await getattr(self, f"_{name}")()

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        self._processors = [self._processor(place) for place in (0, 1)]
        files = str(self._folder / "{worker}-{epoch}.tokenbus")
        recorder = self._deployment.start("record", [COMMAND, "record", files], **self._keyed())
        await asyncio.to_thread(recorder.wait_for, '"connected"', len(self._processors))
        self._workers = [Worker(lambda role=role: self._worker(role)) for role in self._roles]  # type: ignore[misc]
        for worker in self._workers:
            await asyncio.to_thread(worker.program.wait_for, '"connected"')
        async with Client(self._deployment.settings(**self._keyed())) as self._client:
            asking = [asyncio.create_task(self._ask_on()) for _ in range(self._requests)]
            yield
            self._over.set()
            _, pending = await asyncio.wait(asking, timeout=_MOST_SECONDS)
            self.figures.unfinished = len(pending)
            for task in pending:
                task.cancel()
        await self._stop_recording(recorder)
        self.figures.handshakes = sum(each.handshakes for each in self._client.sessions)

    # Processes.

    def _keyed(self) -> dict[str, Any]:
        bus = self._keys.connecting("peer")
        return {"bus__key_file": bus.key_file, "bus__server_key": bus.server_key}

    def _processor(self, place: int) -> Program:
        bus = self._keys.listening()
        own = {key.replace(".", "__"): value for key, value in self._places[place].items()}
        keys = {"bus__key_file": bus.key_file, "bus__allowed_keys": bus.allowed_keys}
        name = f"processor-{place}"
        return self._deployment.start(name, [COMMAND, "processor"], processor__id=name, **own, **keys)

    def _worker(self, role: str) -> Program:
        # An id of its own: the publisher of an engine that died has the last one's until it has delivered all.
        name = f"{role}-{next(self._numbers)}"
        command = [sys.executable, "-m", "tests.system.handing_worker", _PACE_SECONDS]
        return self._deployment.start(name, command, worker__id=name, worker__role=role, **self._keyed())

    # Faults.

    async def _kill_processor(self) -> None:
        place = self._random.randrange(len(self._processors))
        await asyncio.to_thread(self._processors[place].kill)
        self._processors[place] = self._processor(place)

    async def _stop_processor(self) -> None:
        await self._stop(self._random.choice(self._processors).pid)

    async def _kill_publisher(self) -> None:
        publishers = [pid for worker in self._workers if (pid := worker.publisher)]
        self._signal(self._random.choice(publishers), signal.SIGKILL)

    async def _stop_publisher(self) -> None:
        await self._stop(self._random.choice(self._workers).publisher)

    async def _kill_engine(self, *, with_publisher: bool = False) -> None:
        if not self._bag:
            self._bag = self._random.sample(self._workers, len(self._workers))
        worker = self._bag.pop()
        if with_publisher:
            self._signal(worker.publisher, signal.SIGKILL)
        worker.program.signal(signal.SIGKILL)
        worker.restart()

    async def _kill_worker(self) -> None:
        await self._kill_engine(with_publisher=True)

    async def _stop_engine(self) -> None:
        await self._stop(self._random.choice(self._workers).program.pid)

    async def _kill_client(self) -> None:
        """Kill a client in a process of its own, and resume its requests from what it had taken."""
        command = [sys.executable, "-m", "tests.system.client_program", str(_RESUMED_TOKENS), str(_RESUMED)]
        program = self._deployment.start("client", command, **self._keyed())
        await asyncio.to_thread(program.wait_for, "token", 10 * _RESUMED)
        await asyncio.to_thread(program.kill)
        places = taken(program.lines("token "))
        self.figures.resumed += len(places)
        resumed = [(self._client.resume(*place), Audit(key, place.position)) for key, place in places.items()]
        await asyncio.gather(*(self._take(generation, audit) for generation, audit in resumed))

    async def _stop(self, process: int) -> None:
        self._signal(process, signal.SIGSTOP)
        await asyncio.sleep(self._random.uniform(0.1, _MOST_STOPPED))
        self._signal(process, signal.SIGCONT)

    def _signal(self, process: int, number: int) -> None:
        if process:
            with suppress(ProcessLookupError):
                os.kill(process, number)

    # Requests.

    async def _ask_on(self) -> None:
        while not self._over.is_set():
            await self._have_session(f"session-{next(self._labels)}")

    async def _have_session(self, label: str) -> None:
        """Send requests that follow each other, until one of them fails."""
        prompt = [1] * self._random.randrange(1, _MOST_PROMPT)
        written = [False] * len(prompt)
        parent = 0
        for _ in range(self._random.randrange(1, _MOST_FOLLOWING + 1)):
            asked = await self._ask(label, prompt, written, parent)
            if self._over.is_set() or not asked.is_finished:
                break
            added = self._random.randrange(_MOST_ADDED)
            prompt = [*prompt, *asked.output, *[1] * added]
            written = [*written, *[True] * asked.output_tokens, *[False] * added]
            parent = asked.request_id
            if self._random.random() < 0.25:
                self._edit(prompt, written, len(asked.prompt))

    def _edit(self, prompt: list[int], written: list[bool], begin: int) -> None:
        """Change a token at `begin` or later: a history that was edited."""
        place = self._random.randrange(begin, len(prompt))
        prompt[place] ^= 1
        written[place:] = [False] * (len(prompt) - place)

    async def _ask(self, label: str, prompt: list[int], written: list[bool], parent: int) -> AskedRequest:
        top_logprobs = self._random.choice((None, 0, 3))
        generation = self._client.generate(
            Generate(
                tokens=TokenPrompt(token_ids=prompt),
                sampling=SamplingParameters(max_tokens=self._random.randrange(1, _MOST_TOKENS)),
                top_logprobs=top_logprobs,
                include_draft_logprobs=self._random.random() < 0.5,
                session=label,
                parent=parent,
            )
        )
        is_scored = top_logprobs is not None
        asked = AskedRequest(generation.request_id, label, prompt, written, is_scored, parent)
        self.sessions.add(asked)
        audit = Audit(asked.request_id)
        asked.is_finished = await self._take(generation, audit)
        asked.output_tokens = audit.position
        return asked

    async def _take(self, generation: Generation, audit: Audit) -> bool:
        """Take all rows of a request; return whether it finished."""
        figures, last, pause = self.figures, 0.0, 0.0
        figures.requests += 1
        is_finished = True
        try:
            async for row in generation.rows():
                audit.take(row)
                figures.tokens += row.token_ids.size
                now = time.monotonic()
                pause, last = max(pause, now - (last or now)), now
        except RequestFailedError as error:
            is_finished = False
            figures.errors[code_name(error.code)] += 1
        figures.pauses.append(pause)
        figures.turns += len(generation.turns)
        if not audit.is_exact:
            figures.wrong.append(audit)
        return is_finished
