"""Let clients vanish beside others for minutes, with prefill and decode workers, and audit all that was left.

`python -m tests.integration.vanishing --minutes 10` prints the figures. Some clients are killed, some stop reading,
some leave without a goodbye, some crash and come back; it fails unless every request that its own client did not give
up ended well, with exactly its tokens.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.integration.asking import Asked, wanted
from tests.integration.attacks.peers import ClientPeer
from tests.integration.attacks.scene import AS_DEPLOYED, free_ports, peak_mib
from tests.integration.audit import Audit
from tests.integration.deployment import Deployment
from tests.integration.programs import tell
from tests.integration.test_stopped import last_positions
from tests.support import orphans
from tests.support.waiting import MOST
from tokenbus_contracts.generated.client_pb2 import ServerFrame
from tokenbus_contracts.generated.request_pb2 import ErrorCode
from tokenbus_services.client import Client
from tokenbus_services.logs import configure
from tokenbus_services.settings import LogSettings

_STEADY = 2
_AT_ONCE = 6
_RETURNING_TOKENS = 900
_FEW = 40
_TRIES = 60
_DECODERS = ("decode-0", "decode-1")


@dataclass(slots=True)
class Figures:
    """What vanished, and what became of the others."""

    seed: int
    seconds: float = 0.0
    vanished: dict[str, int] = field(default_factory=dict)
    requests: int = 0
    resumed: int = 0
    tokens: int = 0
    well: int = 0
    inexact: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    longest_request_ms: int = 0
    processor_peak_mib: int = 0
    reasons: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Whether every request that was not given up by its client ended well."""
        return self.requests > 0 and self.well == self.requests


class Vanishing:
    """Clients that ask and stay, and clients that vanish, for some seconds."""

    def __init__(self, deployment: Deployment, seconds: float, seed: int) -> None:
        self._deployment = deployment
        addresses = [f"tcp://127.0.0.1:{port}" for port in free_ports(2)]
        deployment.overrides.update(AS_DEPLOYED)
        deployment.overrides.update({"bus.workers_address": addresses[0], "bus.clients_address": addresses[1]})
        self._address = addresses[1]
        self._seconds, self._ends = seconds, 0.0
        self._random = random.Random(seed)  # noqa: S311 - a campaign can be run again
        self._vanished: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self.figures = Figures(seed)

    async def run(self) -> Figures:
        begin = time.monotonic()
        start, deployment = asyncio.to_thread, self._deployment
        processor = await start(deployment.start_processor)
        names = ("prefill-0", *_DECODERS)
        await asyncio.gather(
            *(start(deployment.start_worker, name, worker__role=name.partition("-")[0]) for name in names)
        )
        self._ends = time.monotonic() + self._seconds
        steady = [Client(deployment.settings(client__name=f"steady-{place}")) for place in range(_STEADY)]
        async with steady[0], steady[1]:
            asking = [self._steady(steady[place % _STEADY]) for place in range(_AT_ONCE * _STEADY)]
            manners = (self._killed, self._silent, self._deaf, self._hurried)
            vanishing = [self._again(lambda one=one: asyncio.to_thread(one)) for one in manners]  # type: ignore[misc]
            await asyncio.gather(*asking, *vanishing, self._again(self._returning))
        self.figures.processor_peak_mib = peak_mib(processor.pid)
        self.figures.seconds = round(time.monotonic() - begin, 1)
        self.figures.vanished, self.figures.errors = dict(self._vanished), dict(self._errors)
        return self.figures

    async def _again(self, vanish: Callable[[], Awaitable[None]]) -> None:
        while time.monotonic() < self._ends:
            await vanish()
            await asyncio.sleep(self._random.random() / 2)

    # Clients that stay.

    async def _steady(self, client: Client) -> None:
        while time.monotonic() < self._ends:
            tokens = self._random.randrange(1, 600)
            began = time.monotonic()
            audit = await Asked(client.generate(wanted(tokens))).task
            self._judge(audit, tokens)
            took = round(1000 * (time.monotonic() - began))
            self.figures.longest_request_ms = max(self.figures.longest_request_ms, took)

    def _judge(self, audit: Audit, tokens: int) -> None:
        figures = self.figures
        figures.requests += 1
        figures.tokens += audit.position
        figures.inexact += not audit.is_exact
        if audit.error is not None:
            self._errors[ErrorCode.Name(audit.error.code)] += 1
            figures.reasons.append(str(audit.error))
        figures.well += audit.error is None and audit.is_exact and audit.position == tokens

    async def _returning(self) -> None:
        """Kill a client as a process, and go on with its requests as its next life."""
        name = f"returning-{self._random.randrange(1 << 30)}"
        self._vanished["came back"] += 1
        first = self._deployment.start_module("client_program", str(_RETURNING_TOKENS), "4", client__name=name)
        try:
            await asyncio.to_thread(first.wait_for, "token", _FEW + self._random.randrange(200))
        except AssertionError:
            self.figures.requests += 4
            self._errors[f"no {_FEW} tokens in {MOST:g} s"] += 4
            return
        finally:
            await asyncio.to_thread(first.kill)
        over = {int(line.split()[1]) for line in first.lines("ended ")}
        taken = {
            key: position
            for key, position in last_positions(first.lines("token ")).items()
            if key not in over and position < _RETURNING_TOKENS
        }
        async with Client(self._deployment.settings(client__name=name)) as again:
            audits = await asyncio.gather(*(_resumed(again, key, position) for key, position in taken.items()))
        self.figures.resumed += len(audits)
        for audit in audits:
            self._judge(audit, _RETURNING_TOKENS)

    # Clients that do not.

    def _killed(self) -> None:
        """Ask, take some tokens, and be gone."""
        self._vanished["killed"] += 1
        with ClientPeer(self._address, name="killed") as peer:
            peer.hello()
            for _ in range(4):
                peer.ask(tokens=2000, top_logprobs=2)
            frames = self._random.randrange(1, 60)
            for number, (frame, _) in enumerate(peer.frames(ServerFrame, 5)):
                peer.acknowledge(frame.number)
                if number > frames:
                    return

    def _silent(self) -> None:
        """Ask and stay connected, alive, without acknowledging anything."""
        self._vanished["acknowledged nothing"] += 1
        with ClientPeer(self._address, name="silent") as peer:
            peer.hello()
            for _ in range(4):
                peer.ask(tokens=600)
            for _ in range(8):
                peer.beat()
                peer.listen(0)
                time.sleep(0.5)

    def _deaf(self) -> None:
        """Ask for much, and read nothing of it."""
        self._vanished["stopped reading"] += 1
        with ClientPeer(self._address, name="deaf") as peer:
            peer.greet()
            for _ in range(8):
                peer.ask(tokens=5000, top_logprobs=20)
            time.sleep(self._random.random() * 4)

    def _hurried(self) -> None:
        """Ask, and leave before anything has come."""
        self._vanished["left at once"] += 1
        with ClientPeer(self._address, name="hurried") as peer:
            peer.hello()
            for _ in range(8):
                peer.ask(tokens=900)
            peer.listen(0.01)


async def _resumed(client: Client, key: int, position: int) -> Audit:
    """Go on with a request of an earlier life, once that is known to be gone: until then there is no such request."""
    for _ in range(_TRIES):
        audit = await Asked(client.resume(key, position), position).task
        if audit.error is None or audit.error.code != ErrorCode.ERROR_CODE_UNKNOWN_REQUEST:
            break
        await asyncio.sleep(0.5)
    return audit


async def vanishing(deployment: Deployment, seconds: float, seed: int) -> Figures:
    """Run it, and return its figures."""
    return await Vanishing(deployment, seconds, seed).run()


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    configure(LogSettings(level="error"))
    with tempfile.TemporaryDirectory(prefix="tb", dir="/tmp") as folder:
        deployment = Deployment(Path(folder))
        try:
            figures = asyncio.run(vanishing(deployment, options.minutes * 60, options.seed))
        finally:
            deployment.close()
    tell(json.dumps(asdict(figures), indent=2))
    return 0 if figures.is_clean else 1


if __name__ == "__main__":
    orphans.end_with_this_process()
    sys.exit(_main())
