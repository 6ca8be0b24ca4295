"""The whole bus in one place: workers, processors and clients, networks between them, and one clock."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import NamedTuple, cast

from tests.in_process.builders import generate_of
from tests.in_process.network import Network
from tests.in_process.nodes import Asked, AskingClient, Node, WorkerNode, work_left
from tests.in_process.prefix_engine import PrefixEngine
from tests.in_process.sending import Sending
from tests.support.settings import settings_of
from tokenbus.bus import Listener
from tokenbus.processor.processor import Core
from tokenbus.testing import ManualClock
from tokenbus_contracts.generated.request_pb2 import ErrorCode
from tokenbus_contracts.generated.stream_pb2 import GoodbyeReason

_TICK = 0.25
_SETTLE_SECONDS = 100


@dataclass(frozen=True, slots=True)
class Shape:
    settings: dict[str, object] = field(default_factory=dict)
    workers: int = 1
    pairs: int = 0
    """How many prefill workers there are besides, and as many decode workers."""
    clients: int = 1
    parts: int = 1
    drafts: bool = False
    capacity: int = 64
    """How many messages a connection holds in each direction."""
    by_columns: bool = False
    """Whether clients take whole outputs, instead of iterating over each request."""
    continues: bool = False
    """Whether requests go on at another worker when theirs is lost."""
    processors: int = 1


class Wish(NamedTuple):
    client: int
    max_tokens: int
    top_logprobs: int | None
    drafts: bool


class Site:
    def __init__(self, capacity: int) -> None:
        self.worker_network = Network(capacity)
        self.client_network = Network(capacity)
        self.soon: deque[Callable[[], None]] = deque()
        self.core: Core | None = None


class World:
    """Nothing happens here unless it is asked for, so that every run can be had again."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.clock = ManualClock()
        self.settings = settings_of(shape.settings)
        self.sites = [Site(shape.capacity) for _ in range(shape.processors)]
        self._keys = count(1)
        self._lives = count(1)
        self._turn_ids = count(1 << 32)
        self.is_patient = self.settings.worker.policy != "fail"
        """Whether engines wait until there is room, instead of giving up at once."""
        self.asked: list[Asked] = []
        self.emitted: dict[int, int] = {}
        for site in self.sites:
            self._start(site)
        self._roles = ["mixed"] * shape.workers + ["prefill", "decode"] * shape.pairs
        self.workers = [self._new_worker(place) for place in range(len(self._roles))]
        self.clients = [self._new_client() for _ in range(shape.clients)]
        for node in self.nodes():
            node.pump()

    @property
    def processor(self) -> Core:
        core = self.sites[0].core
        assert core is not None
        return core

    @property
    def cores(self) -> list[Core]:
        return [site.core for site in self.sites if site.core is not None]

    def _start(self, site: Site) -> None:
        settings = settings_of({"processor.id": f"life-{next(self._lives)}"} | self.shape.settings)
        site.soon.clear()
        site.core = core = Core(settings, self.clock, site.soon.append)
        # Where requests do not go on elsewhere, a line that heals late would end them.
        wires = site.worker_network.wires if self.shape.continues else None
        workers, clients = Sending(site.worker_network.send, wires), Sending(site.client_network.send)
        core.listen(cast("Listener", workers), cast("Listener", clients))
        core.begin(self.clock.now())

    def _new_worker(self, place: int) -> WorkerNode:
        addresses = [f"memory://{number}" for number in range(len(self.sites))]
        role = self._roles[place]
        own = {"worker.id": f"worker-{place}", "worker.role": role, "bus.workers_address": ",".join(addresses)}
        shape, settings = self.shape, settings_of(own | self.shape.settings)
        engine = PrefixEngine(role) if shape.continues else None
        # Epochs follow each other when processors are abandoned.
        life, parts, drafts = next(self._lives) << 32, shape.parts, shape.drafts
        networks = {address: site.worker_network for address, site in zip(addresses, self.sites, strict=True)}
        return WorkerNode(settings, life, networks, self.clock, parts=parts, drafts=drafts, engine=engine)

    def _new_client(self) -> AskingClient:
        by_columns = self.shape.by_columns
        networks = [site.client_network for site in self.sites]
        life, new_id = next(self._lives), partial(next, self._turn_ids)
        return AskingClient(self.settings, life, networks, self.clock, by_columns=by_columns, new_id=new_id)

    def nodes(self) -> Iterator[Node]:
        yield from self.workers
        for client in self.clients:
            yield from client.nodes

    def nodes_of(self, site: Site) -> list[Node]:
        return [node for node in self.nodes() if node.network in (site.worker_network, site.client_network)]

    # What people do.

    def ask(self, wish: Wish) -> None:
        generate = generate_of(
            next(self._keys), wish.max_tokens, top_logprobs=wish.top_logprobs, include_draft_logprobs=wish.drafts
        )
        if self.shape.continues:
            generate.ClearField("continuation_policy")
            generate.ClearField("top_logprobs")
        asked = Asked(generate)
        self.asked.append(asked)
        self.clients[wish.client % len(self.clients)].ask(asked)

    def open_requests(self) -> list[tuple[AskingClient, Asked]]:
        return [(client, asked) for client in self.clients for asked in client.asked.values() if not asked.has_ended]

    def turn(self, place: int) -> None:
        worker = self.workers[place]
        if not worker.is_paused and (not self.is_patient or worker.has_room()):
            worker.turn()
            self._note(worker)

    def work(self, turns: int) -> None:
        """Let everything go well for a while; what was computed last is left on its way to the clients."""
        for _ in range(turns):
            self.flush()
            self.stir(carries_up=True)

    def stir(self, *, carries_up: bool) -> None:
        """Put something on its way: to the processor, or through it to the clients."""
        for place in range(len(self.workers)):
            self.turn(place)
        if carries_up:
            for node in self.nodes():
                while self.deliver_up(node):
                    pass

    def _note(self, worker: WorkerNode) -> None:
        for key, emitted in worker.publisher.emitted.items():
            self.emitted[key] = max(emitted, self.emitted.get(key, 0))

    # What the network does.

    def deliver_up(self, node: Node) -> bool:
        wire = node.wire
        core = next(site.core for site in self.sites if node.network in (site.worker_network, site.client_network))
        if not wire.up or core is None:
            return False
        connections = core.worker_connections if isinstance(node, WorkerNode) else core.clients
        connections.receive(wire.peer, wire.up.popleft(), self.clock.now())
        node.pump()
        return True

    def run_soon(self) -> None:
        for site in self.sites:
            for _ in range(len(site.soon)):
                site.soon.popleft()()

    def flush(self, most: int = 10_000) -> None:
        for _ in range(most):
            moved = [node.receive() | self.deliver_up(node) for node in self.nodes()]
            waits = any(site.soon for site in self.sites)
            self.run_soon()
            for client in self.clients:
                client.read()
            if not any(moved) and not waits:
                return
        raise AssertionError(f"messages go to and fro without an end: more than {most} rounds")

    def pass_time(self, seconds: float, *, carries: bool) -> None:
        for worker in self.workers:
            worker.release()
        end = self.clock.now() + seconds
        while self.clock.now() < end:
            self.clock.advance(min(_TICK, end - self.clock.now() + 1e-9))
            for core in self.cores:
                core.tick(self.clock.now())
            for node in self.nodes():
                node.pump()
            for client in self.clients:
                if not client.node.is_paused:
                    client.watch_over()
            if carries:
                self.flush()

    def stand_still(self, seconds: float) -> None:
        """Let the processors stand still: what waits there has that much more time, as a step for its parts."""
        self.clock.advance(seconds)
        for core in self.cores:
            core.extend_deadlines(seconds, self.clock.now())
            core.tick(self.clock.now())

    # What goes wrong.

    def restart_processor(self, place: int = 0, *, keeps_unsent: bool) -> None:
        """Kill a processor and start another: whatever it knew is lost, and so is what was on its way from it."""
        self.kill_processor(place, keeps_unsent=keeps_unsent)
        self._start(self.sites[place])

    def kill_processor(self, place: int, *, keeps_unsent: bool = False) -> None:
        site = self.sites[place]
        for node in self.nodes_of(site):
            node.reconnect(keeps_unsent=keeps_unsent)
        site.core = None

    def drain_processor(self, place: int, *, closes: bool) -> None:
        if (core := self.sites[place].core) is not None:
            core.drain()
            if closes:
                core.close()
                self.flush()
                self.kill_processor(place)

    def restart_worker(self, place: int) -> None:
        old = self.workers[place]
        old.network.wires.pop(old.wire.peer, None)
        self.workers[place] = self._new_worker(place)
        self.workers[place].pump()

    def restart_client(self, place: int, *, forgets: int = 0) -> None:
        """Kill a client; its next life goes on with what the old one had taken, but for the last few tokens of each.

        It can do so with what is known to have been taken alone, so one that waits for such news lives on.
        """
        old = self.clients[place]
        if any(request.generate is not None for request in old.requests.requests.values()):
            return
        old.is_reading = True
        old.read()
        for node in old.nodes:
            node.network.wires.pop(node.wire.peer, None)
        self.clients[place] = new = self._new_client()
        for asked in old.asked.values():
            if not asked.has_ended:
                del asked.tokens[max(0, len(asked.tokens) - forgets) :]
                new.take_over(asked)
        new.pump()

    def close_client(self, place: int) -> None:
        """Let a client leave: what it has not received is no longer expected. Another takes its place."""
        old = self.clients[place]
        old.node.wire.up.append(old.sessions[0].goodbye(GoodbyeReason.GOODBYE_REASON_STOPPED))
        self.asked = [asked for asked in self.asked if asked.has_ended or asked.key not in old.asked]
        while self.deliver_up(old.node):
            pass
        self.clients[place] = self._new_client()
        self.clients[place].pump()

    # What must hold.

    def heal(self) -> None:
        self.is_patient = True
        for site in self.sites:
            if not self.cores or (site.core is not None and site.core.clients.is_draining):
                self.restart_processor(self.sites.index(site), keeps_unsent=False)
        for node in self.nodes():
            node.is_paused = False
            node.pump()
        for client in self.clients:
            client.is_reading = True
            client.requests.is_paused = False
            client.pump()

    def settle(self) -> None:
        """Let everything go well until nothing is left to do; in bounded time, or it is an error."""
        self.heal()
        end = self.clock.now() + _SETTLE_SECONDS
        while self.clock.now() < end:
            for place in range(len(self.workers)):
                self.turn(place)
            self.flush()
            if not self.unsettled():
                return
            self.pass_time(_TICK, carries=True)
        raise AssertionError(f"after {_SETTLE_SECONDS} s: {self.unsettled()}")

    def unsettled(self) -> list[str]:
        left = [f"request {asked.key} is open at its client" for _, asked in self.open_requests()]
        left += [line for worker in self.workers for line in work_left(worker)]
        for core in self.cores:
            if core.registry.table.open_requests():
                left.append(f"a processor has {[each.id for each in core.registry.table.open_requests()]}")
            send_queues = [each.send_queue for each in core.clients.sessions.values() if each.peer is not None]
            left += [f"a processor keeps {len(each)} frames for a client" for each in send_queues if len(each)]
        return left

    def check_bounds(self) -> None:
        for worker in self.workers:
            retention, settings = worker.publisher.retention, worker.settings.worker
            assert len(retention) <= settings.most_items
            assert retention.bytes <= settings.retention_bytes
            assert len(worker.publisher.incoming) <= 2 * settings.max_requests
            # Of a run that found no room, only the first item needs credit.
            assert worker.publisher.session.credit >= (0, 0) or worker.publisher.failed
        for core in self.cores:
            self._check_bounds_of(core)

    def _check_bounds_of(self, core: Core) -> None:
        processor = self.settings.processor
        for known in core.workers.by_id.values():
            assert len(known.stream._ahead) <= processor.credit_items
            assert known.assembler.open_steps <= processor.max_open_steps + processor.credit_items
            assert all(sequence >= known.stream.expected for sequence in known.stream._ahead)
            # What was granted before too much was held may still come.
            assert len(known.stream.acks) <= processor.pending_items + processor.credit_items + 1
        for session in core.clients.sessions.values():
            send_queue, clients = session.send_queue, self.settings.clients
            news = sum(not frame.parts for frame in send_queue.frames())
            assert len(send_queue) - news <= clients.send_queue_frames
            assert send_queue.bytes <= clients.send_queue_bytes
            assert len(send_queue._sent) <= self.settings.client.window_frames
        assert len(core.registry.table) <= processor.max_requests

    def check_ends(self) -> None:
        for asked in self.asked:
            asked.check_end()
            if asked.error is not None:
                assert asked.error.code != ErrorCode.ERROR_CODE_INTERNAL, str(asked.error)
