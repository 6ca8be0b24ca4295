"""Several processors, workers that go from one to the next, and clients of all: a world with one clock."""

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import cast

from tests.in_process.builders import generate_of
from tests.in_process.network import Network, Wire
from tests.in_process.nodes import Asked, AskingClient, Node, WorkerNode, work_left
from tests.in_process.sending import Sending
from tests.support.settings import settings_of
from tokenbus.bus import Listener
from tokenbus.bus.processor_list import ProcessorList
from tokenbus.processor.processor import Core
from tokenbus.settings import Settings
from tokenbus.testing import ManualClock
from tokenbus.worker.handoff import HandoffSender
from tokenbus.worker.publisher import ReceivedHandoff
from tokenbus.worker.session import HandoffPoint
from tokenbus_contracts import RowStatus
from tokenbus_contracts.generated.request_pb2 import ErrorCode, Generate
from tokenbus_contracts.generated.stream_pb2 import GoodbyeReason

_TICK = 0.25
_SETTLE_SECONDS = 150
_CAPACITY = 64
_MAX_REQUESTS = 4
_OVERRIDES: dict[str, object] = {
    "limits.max_message_bytes": 2048,
    "limits.max_rows": 4,
    "worker.max_requests": _MAX_REQUESTS,
    "worker.retention_items": 4096,
    "worker.longest_step_ms": 0,
    "worker.retention_bytes": 200_000,
    "clients.detached_timeout_ms": 30_000,
    "client.resume_timeout_ms": 1_200_000,
    "processor.unclaimed_timeout_ms": 30_000,
    "processor.handoff_timeout_ms": 30_000,
    "processor.abort_timeout_ms": 3_600_000,
    "processor.step_timeout_ms": 3_600_000,
}


class Site:
    """One address: a processor that dies, stands still, and comes back, and the connections to it."""

    def __init__(self, place: int, world: "SeveralWorld") -> None:
        self.place = place
        self._world = world
        self.worker_network, self.client_network = Network(_CAPACITY), Network(_CAPACITY)
        self.soon: deque[Callable[[], None]] = deque()
        self.core: Core | None = None
        self.stopped_at: float | None = None
        """Since when it stands still."""
        self.start()

    @property
    def runs(self) -> bool:
        return self.core is not None and self.stopped_at is None

    def start(self) -> None:
        """Start the next life of the processor; what it knew is lost, and so is what was on its way."""
        clock = self._world.clock
        settings = self._world.settings({"processor.id": f"life-{next(self._world.lives)}"})
        self.soon.clear()
        self.core = core = Core(settings, clock, self.soon.append)
        core.listen(
            cast("Listener", Sending(self.worker_network.send)), cast("Listener", Sending(self.client_network.send))
        )
        core.begin(clock.now())
        self.stopped_at = None
        self._world.reconnect(self)

    def kill(self) -> None:
        self.core, self.stopped_at = None, None
        self._world.reconnect(self)

    def stop(self) -> None:
        if self.runs:
            self.stopped_at = self._world.clock.now()

    def go_on(self) -> None:
        """Let it go on: as in its own process, its stall is no silence of its peers."""
        if self.core is not None and self.stopped_at is not None:
            now = self._world.clock.now()
            self.core.extend_deadlines(now - self.stopped_at, now)
            self.stopped_at = None

    def drain(self) -> None:
        """Let it send its workers away, and take no new request."""
        if self.core is not None and self.runs:
            self.core.worker_connections.is_draining = self.core.clients.is_draining = True
            workers = self.core.workers.by_id.values()
            self.core.worker_connections.send_away(workers, "the processor is closing")

    def close(self) -> None:
        self.drain()
        if self.core is not None and self.runs:
            for connections in (self.core.clients, self.core.worker_connections):
                connections.close(GoodbyeReason.GOODBYE_REASON_RESTARTING, "the processor is closing")
            self._world.flush()
            self.kill()

    def take(self, node: Node, *, is_worker: bool) -> bool:
        """Carry a node's oldest message to the processor; False: there is none, or the processor takes none."""
        if self.core is None or self.stopped_at is not None or not node.wire.up:
            return False
        connections = self.core.worker_connections if is_worker else self.core.clients
        connections.receive(node.wire.peer, node.wire.up.popleft(), self._world.clock.now())
        return True

    def tick(self) -> None:
        if self.core is not None and self.stopped_at is None:
            self.core.tick(self._world.clock.now())

    def run_soon(self) -> None:
        """Do what the processor put off until its event loop's next turn."""
        for _ in range(len(self.soon) if self.runs else 0):
            self.soon.popleft()()


class HeldHandoffs:
    """A prefill worker's hand-offs on their way to decode workers: they wait until the test carries them."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[Generate, bytes]] = deque()

    def send(self, generate: Generate, state: bytes) -> None:
        if not generate.handoff_address:
            raise ValueError("no decode worker is available")
        self.waiting.append((generate, state))


class MovingWorker(WorkerNode):
    """A worker that goes from one processor to the next; what a Link does in an event loop, the test does by hand."""

    def __init__(self, place: int, world: "SeveralWorld", role: str, *, parts: int, drafts: bool) -> None:
        addresses = [f"memory://{site.place}" for site in world.sites]
        point = HandoffPoint(f"memory://handoff-{place}") if role == "decode" else HandoffPoint()
        overrides: dict[str, object] = {"worker.id": f"worker-{place}", "bus.workers_address": ",".join(addresses)}
        overrides["worker.role"] = role
        if role == "decode":
            overrides["worker.handoff_address"] = point.address
        settings = world.settings(overrides)
        self._world = world
        self.handoffs = HeldHandoffs()
        self.handoff_address = point.address
        processors = ProcessorList(addresses, settings.worker.id)
        self._order = [addresses.index(processors.next()) for _ in addresses]
        self.site = world.sites[self._order[0]]
        self.left: list[tuple[Site, Wire]] = []
        """The connection that it left last: what it had sent there may still arrive."""
        sender = cast("HandoffSender", self.handoffs) if role == "prefill" else None
        here, life = self.site.worker_network, next(world.lives)
        super().__init__(settings, life, here, world.clock, parts=parts, drafts=drafts, handoff=point, sender=sender)

    def pump(self) -> None:
        """Send all that the session has to say, and go to the next processor when it is time."""
        super().pump()
        while not self.is_paused and self.publisher.session.is_leaving(self.clock.now()):
            self.move()
            super().pump()

    def move(self) -> None:
        with self.lock:
            farewell = self.publisher.session.move(self.clock.now())
        self._unsent = None
        self.wire.send(farewell)
        self.left = [(self.site, self.wire)]
        self.wire.down.clear()
        place = self._order.index(self.site.place)
        self.site = self._world.sites[self._order[(place + 1) % len(self._order)]]
        self.network = self.site.worker_network
        self.wire = self.network.connect()

    def carry_handoffs(self) -> bool:
        """Carry what this worker hands off to the decode workers; return whether there was anything."""
        moved = bool(self.handoffs.waiting)
        while self.handoffs.waiting:
            generate, state = self.handoffs.waiting.popleft()
            target = next(each for each in self._world.workers if each.handoff_address == generate.handoff_address)
            answer = partial(self._answered, generate.request_key)
            target.publisher.add_handoff(ReceivedHandoff(generate, state, answer))
            target.turn()  # an engine that stands still for as long as workers are looked for has a request unseen
        return moved

    def _answered(self, key: int, refusal: str) -> None:
        if refusal:  # of a request that was sent anew, its first copy may be at the decode worker already
            self.publisher.failed_request(key, ErrorCode.ERROR_CODE_HANDOFF, refusal)

    def forget_left(self) -> None:
        for site, wire in self.left:
            site.worker_network.wires.pop(wire.peer, None)
        self.left = []

    def turn(self) -> None:
        """Let the engine take its requests and compute one step, where what it publishes has room."""
        if self.has_room():
            super().turn()


class SeveralWorld:
    """Nothing happens here unless it is asked for, so that every run can be had again."""

    def __init__(  # noqa: PLR0913 - each but the first three is given by name
        self,
        sites: int,
        workers: int,
        clients: int,
        *,
        by_columns: bool,
        overrides: dict[str, object],
        pairs: int = 0,
        parts: int = 1,
        drafts: bool = False,
    ) -> None:
        self.clock = ManualClock()
        self._overrides, self._drafts = overrides, drafts
        self.lives = count(1)
        self._keys, self._turn_ids = count(1), count(1 << 32)
        self.asked: list[Asked] = []
        self.sites: list[Site] = []
        self.workers: list[MovingWorker] = []
        self.clients: list[AskingClient] = []
        for place in range(sites):
            self.sites.append(Site(place, self))
        roles = ["mixed"] * workers + ["prefill", "decode"] * pairs
        self.workers += [
            MovingWorker(place, self, role, parts=parts, drafts=drafts) for place, role in enumerate(roles)
        ]
        networks = [site.client_network for site in self.sites]
        self.clients += [
            AskingClient(
                self.settings({}),
                next(self.lives),
                networks,
                self.clock,
                by_columns=by_columns,
                new_id=partial(next, self._turn_ids),
            )
            for _ in range(clients)
        ]
        self.places = _MAX_REQUESTS * (workers + pairs)
        """How many requests the workers take at once."""
        self.pump()

    def settings(self, more: dict[str, object]) -> Settings:
        return settings_of(_OVERRIDES | self._overrides | more)

    def connections(self, site: Site) -> Iterator[Node]:
        yield from (worker for worker in self.workers if worker.site is site)
        yield from (client.nodes[site.place] for client in self.clients)

    def reconnect(self, site: Site) -> None:
        for node in self.connections(site):
            node.reconnect(keeps_unsent=False)

    # What people do.

    def ask(self, client: int, max_tokens: int) -> None:
        generate = generate_of(next(self._keys), max_tokens, top_logprobs=0, include_draft_logprobs=self._drafts)
        asked = Asked(generate)
        self.asked.append(asked)
        self.clients[client % len(self.clients)].ask(asked)

    def open_requests(self) -> list[tuple[AskingClient, Asked]]:
        return [(client, asked) for client in self.clients for asked in client.asked.values() if not asked.has_ended]

    def work(self, turns: int) -> None:
        """Let everything go well for a while; what was computed last is left on its way to the clients."""
        for _ in range(turns):
            self.flush()
            for worker in self.workers:
                if not worker.is_paused:
                    worker.turn()
            for site in self.sites:
                for worker in [each for each in self.workers if each.site is site]:
                    while site.take(worker, is_worker=True):
                        pass

    # What the network does.

    def carry(self, site: Site) -> bool:
        """Carry one message in each direction between a processor and each of its peers; return whether any moved."""
        moved = bool(site.soon) and site.runs
        for worker in [each for each in self.workers if each.site is site]:
            moved |= worker.receive()
            if worker.site is site:  # what it received may have sent it away
                moved |= site.take(worker, is_worker=True)
            worker.pump()
        for client in self.clients:
            node = client.nodes[site.place]
            moved |= node.receive() | site.take(node, is_worker=False)
            client.pump()
        site.run_soon()
        return moved

    def flush(self, most: int = 10_000) -> None:
        for _ in range(most):
            self.carry_left()
            moved = [self.carry(site) for site in self.sites] + [worker.carry_handoffs() for worker in self.workers]
            for client in self.clients:
                client.read()
            if not any(moved):
                return
        raise AssertionError(f"messages go to and fro without an end: more than {most} rounds")

    def carry_from(self, worker: MovingWorker, messages: int) -> None:
        """Carry some of what a worker sends, and nothing else: the rest of a step may come much later."""
        for _ in range(messages):
            worker.site.take(worker, is_worker=True)

    def carry_left(self) -> None:
        """Let what workers sent to processors that they have left arrive there, where those take it."""
        for worker in self.workers:
            for site, wire in worker.left:
                while site.core is not None and site.runs and wire.up:
                    site.core.worker_connections.receive(wire.peer, wire.up.popleft(), self.clock.now())
            worker.forget_left()

    def pump(self) -> None:
        for worker in self.workers:
            worker.pump()
        for client in self.clients:
            client.pump()

    def pass_time(self, seconds: float, *, carries: bool) -> None:
        end = self.clock.now() + seconds
        while self.clock.now() < end:
            self.clock.advance(min(_TICK, end - self.clock.now() + 1e-9))
            for site in self.sites:
                site.tick()
            self.pump()
            for client in self.clients:
                client.watch_over()
            if carries:
                self.flush()

    # What must hold.

    def settle(self, standstill: float = 5.0) -> None:
        """Let everything go well until nothing is left to do; in bounded time, or it is an error.

        So it is if a request that a worker has stands still for longer than `standstill` seconds.
        """
        for worker in self.workers:
            worker.is_paused = False
        for site in self.sites:
            if site.core is None or site.core.worker_connections.is_draining:
                site.start()
            site.go_on()
        end = self.clock.now() + _SETTLE_SECONDS
        progress: dict[int, tuple[int, float]] = {}
        while self.clock.now() < end:
            self.work(1)
            self.flush()
            if not self.unsettled():
                return
            self.check_progress(progress, standstill)
            self.pass_time(_TICK, carries=True)
        raise AssertionError(f"after {_SETTLE_SECONDS} s: {self.unsettled()}")

    def check_progress(self, progress: dict[int, tuple[int, float]], standstill: float) -> None:
        """Assert that each request that a worker has goes on: `progress` keeps how far each came, and when."""
        now = self.clock.now()
        begun = {key for worker in self.workers for key in worker.publisher.emitted}
        for _, asked in self.open_requests():
            tokens, since = progress.get(asked.key, (-1, now))
            if tokens != len(asked.tokens):
                progress[asked.key] = len(asked.tokens), now
            elif asked.key in begun:
                assert now - since <= standstill, f"request {asked.key} stands still at {tokens} tokens"

    def unsettled(self) -> list[str]:
        left = [f"request {asked.key} is open at its client" for _, asked in self.open_requests()]
        left += [line for worker in self.workers for line in work_left(worker)]
        return left

    def check_ends(self) -> None:
        for asked in self.asked:
            asked.check_end()
            assert asked.is_aborted or asked.status is not RowStatus.ABORTED

    def errors(self) -> list[str]:
        return [str(asked.error) for asked in self.asked if asked.error is not None]
