"""What may happen on the bus, for hypothesis to put together: four machines, from peaceful to hostile."""

from collections import deque
from math import inf

from google.protobuf.message import DecodeError
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.in_process.faults import damaged, flipped
from tests.in_process.nodes import Asked, Node
from tests.in_process.prefix_engine import PrefixEngine
from tests.in_process.shapes import continuing_shapes, faulty_shapes, healing_shapes, lossless_shapes
from tests.in_process.world import Shape, Wish, World
from tokenbus.delivery.errors import NOT_TAKEN
from tokenbus_contracts import RowStatus
from tokenbus_contracts.generated.stream_pb2 import ProcessorFrame

_PLACES = st.integers(0, 7)
_WISHES = st.builds(
    Wish,
    client=_PLACES,
    max_tokens=st.integers(1, 40),
    top_logprobs=st.sampled_from([None, 0, 2]),
    drafts=st.booleans(),
)
_BEGINNINGS = st.lists(_WISHES, min_size=1, max_size=6)


class Bus(RuleBasedStateMachine):
    """What people and engines do, and messages that arrive."""

    world: World

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.settle()
            self.world.check_bounds()
            self.world.check_ends()
            self.check_at_end()

    def check_at_end(self) -> None:
        """Assert what holds of this machine's runs alone."""

    def node(self, place: int) -> Node:
        nodes = list(self.world.nodes())
        return nodes[place % len(nodes)]

    @rule(wishes=st.lists(_WISHES, min_size=1, max_size=4))
    def ask(self, wishes: list[Wish]) -> None:
        for wish in wishes:
            if len(self.world.open_requests()) < 4 * len(self.world.workers):
                self.world.ask(wish)

    @rule(place=_PLACES)
    def abort(self, place: int) -> None:
        if found := self.world.open_requests():
            client, asked = found[place % len(found)]
            client.abort(asked)

    @rule(worker=_PLACES, turns=st.integers(1, 12))
    def turn(self, worker: int, turns: int) -> None:
        for _ in range(turns):
            self.world.turn(worker % len(self.world.workers))

    @rule(worker=_PLACES)
    def hold_back(self, worker: int) -> None:
        """Let a worker publish a draft, or a part of one, only once the next step has begun."""
        if self.world.is_patient:
            self.world.workers[worker % len(self.world.workers)].publisher.holds_back = True

    @rule(seconds=st.sampled_from([0.7, 2.5]))
    def stand_still(self, seconds: float) -> None:
        self.world.stand_still(seconds)

    @rule(turns=st.integers(1, 3))
    def work(self, turns: int) -> None:
        """Let every engine compute, and carry everything, but leave the last of it on its way to the clients."""
        self.world.work(turns)

    @rule()
    def carry_all(self) -> None:
        self.world.flush()

    @rule(node=_PLACES, messages=st.integers(1, 4))
    def carry_up(self, node: int, messages: int) -> None:
        for _ in range(messages):
            self.world.deliver_up(self.node(node))

    @rule(node=_PLACES, messages=st.integers(1, 4))
    def carry_down(self, node: int, messages: int) -> None:
        for _ in range(messages):
            self.node(node).receive()

    @rule()
    def run_soon(self) -> None:
        self.world.run_soon()

    @rule(client=_PLACES)
    def read(self, client: int) -> None:
        self.world.clients[client % len(self.world.clients)].read()

    @rule(seconds=st.sampled_from([0.3, 1.1]))
    def pass_time(self, seconds: float) -> None:
        self.world.pass_time(seconds, carries=True)

    @invariant()
    def everything_is_within_its_bounds(self) -> None:
        if hasattr(self, "world"):
            self.world.check_bounds()


class FaultlessBus(Bus):
    """Nothing goes wrong: no request may end with an error, and no node may complain."""

    @initialize(shape=lossless_shapes(), wishes=_BEGINNINGS)
    def begin(self, shape: Shape, wishes: list[Wish]) -> None:
        self.world = World(shape)
        self.world.flush()
        self.ask(wishes)

    def check_at_end(self) -> None:
        assert_no_errors(self.world)
        assert_no_complaints(self.world)


class LosslessBus(Bus):
    """Processors, clients and connections die, workers do not: no request may end with an error."""

    most_silence = 15.0
    silence = 0.0

    @initialize(shape=lossless_shapes(), wishes=_BEGINNINGS)
    def begin(self, shape: Shape, wishes: list[Wish]) -> None:
        self.world = World(shape)
        self.ask(wishes)
        self.world.work(2)

    @rule(node=_PLACES, heard=st.integers(0, 3), answers=st.booleans(), keeps_unsent=st.booleans())
    def disconnect(self, node: int, heard: int, *, answers: bool, keeps_unsent: bool) -> None:
        peer = self.node(node)
        self.hear(peer, heard, answers=answers)
        peer.reconnect(keeps_unsent=keeps_unsent)

    @rule(place=_PLACES, heard=st.integers(0, 3), answers=st.booleans(), keeps_unsent=st.booleans())
    def restart_processor(self, place: int, heard: int, *, answers: bool, keeps_unsent: bool) -> None:
        place %= len(self.world.sites)
        for peer in self.world.nodes_of(self.world.sites[place]):
            self.hear(peer, heard, answers=answers)
        self.world.restart_processor(place, keeps_unsent=keeps_unsent)

    def hear(self, peer: Node, heard: int, *, answers: bool) -> None:
        if not peer.wire.down:
            self.world.stir(carries_up=True)
        for _ in range(heard):
            peer.receive()
        while answers and self.world.deliver_up(peer):
            pass

    @rule(client=_PLACES)
    def restart_client(self, client: int) -> None:
        self.world.restart_client(client % len(self.world.clients))

    @rule(seconds=st.sampled_from([0.3, 1.1, 2.5]))
    def pass_time_in_silence(self, seconds: float) -> None:
        """Let time pass, and carry nothing, as long as no peer is lost by that."""
        self.silence += seconds
        if self.silence < self.most_silence:
            self.world.pass_time(seconds, carries=False)

    def check_at_end(self) -> None:
        assert_no_errors(self.world)


class HealingBus(LosslessBus):
    """Items are lost, doubled, damaged and out of order besides: replay heals all of it."""

    @initialize(shape=healing_shapes(), wishes=_BEGINNINGS)
    def begin(self, shape: Shape, wishes: list[Wish]) -> None:
        super().begin(shape, wishes)

    def sent(self, worker: int) -> deque[list[bytes]]:
        peer = self.world.workers[worker % len(self.world.workers)]
        if len(peer.wire.up) < 2:
            self.world.stir(carries_up=False)
        return peer.wire.up

    @rule(worker=_PLACES, place=_PLACES)
    def lose(self, worker: int, place: int) -> None:
        if queue := self.sent(worker):
            del queue[place % len(queue)]

    @rule(worker=_PLACES, place=_PLACES, to=_PLACES)
    def double(self, worker: int, place: int, to: int) -> None:
        if queue := self.sent(worker):
            queue.insert(to, queue[place % len(queue)])

    @rule(worker=_PLACES, place=_PLACES, to=_PLACES)
    def swap(self, worker: int, place: int, to: int) -> None:
        if queue := self.sent(worker):
            one, other = place % len(queue), to % len(queue)
            queue[one], queue[other] = queue[other], queue[one]

    @rule(worker=_PLACES, place=_PLACES, number=st.integers(0, 2**32 - 1))
    def flip(self, worker: int, place: int, number: int) -> None:
        if queue := self.sent(worker):
            queue[place % len(queue)] = flipped(queue[place % len(queue)], number)


class ContinuingBus(LosslessBus):
    """Workers die, fail and stand still besides, and processors stay away: every request goes on elsewhere.

    Its turns are never mixed.
    """

    most_silence = inf

    @initialize(shape=continuing_shapes(), wishes=_BEGINNINGS)
    def begin(self, shape: Shape, wishes: list[Wish]) -> None:
        super().begin(shape, wishes)

    @rule(worker=_PLACES)
    def kill_worker(self, worker: int) -> None:
        self.world.restart_worker(worker % len(self.world.workers))

    @rule(worker=_PLACES)
    def fail(self, worker: int) -> None:
        engine = self.world.workers[worker % len(self.world.workers)].engine
        assert isinstance(engine, PrefixEngine)
        engine.fails_next = engine.has_work

    @rule(worker=_PLACES, seconds=st.sampled_from([1.1, 7.0]))
    def stop_and_go_on(self, worker: int, seconds: float) -> None:
        """Let a worker stand still, perhaps until it counts as lost, and come back as the same life."""
        node = self.world.workers[worker % len(self.world.workers)]
        node.is_paused = True
        self.world.pass_time(seconds, carries=True)
        node.is_paused = False
        node.pump()

    @precondition(lambda self: len(self.world.cores) > 1)
    @rule(place=_PLACES)
    def kill_processor(self, place: int) -> None:
        self.world.kill_processor(place % len(self.world.sites))

    @precondition(lambda self: len(self.world.cores) > 1)
    @rule(place=_PLACES, closes=st.booleans())
    def drain_processor(self, place: int, *, closes: bool) -> None:
        self.world.drain_processor(place % len(self.world.sites), closes=closes)

    def restart_client(self, client: int) -> None:
        """Never: only the life that asked for a request can continue it."""

    def check_at_end(self) -> None:
        """Assert that no request ended with an error, but those that were aborted, or that no worker ever took."""
        asked = [each for each in self.world.asked if not (each.is_aborted or _was_never_taken(each))]
        self.world.asked = asked
        super().check_at_end()


class FaultyBus(LosslessBus):
    """Everything goes wrong: requests may end with errors, but never with a wrong, missing or repeated token."""

    most_silence = inf

    @initialize(shape=faulty_shapes(), wishes=_BEGINNINGS)
    def begin(self, shape: Shape, wishes: list[Wish]) -> None:
        super().begin(shape, wishes)

    def queue(self, peer: Node, *, up: bool) -> deque[list[bytes]]:
        """Return what is on its way in one direction; if nothing is, see to it that something may be."""
        if not (peer.wire.up if up else peer.wire.down):
            self.world.stir(carries_up=not up)
        return peer.wire.up if up else peer.wire.down

    def worker_queue(self, place: int, *, up: bool) -> deque[list[bytes]]:
        """Return what is on its way between a worker and the processor, to lose or damage some of it.

        Streams need not trust the transport. Clients must, as far as it says: it loses a message only with the whole
        connection, and what is asked for or not acked is repeated in the next one.
        """
        return self.queue(self.world.workers[place % len(self.world.workers)], up=up)

    @rule(worker=_PLACES, up=st.booleans(), place=_PLACES)
    def drop(self, worker: int, place: int, *, up: bool) -> None:
        queue = self.worker_queue(worker, up=up)
        if queue and not _is_generate(queue[place % len(queue)]):
            del queue[place % len(queue)]

    def out_of_order(self, place: int, *, up: bool) -> deque[list[bytes]]:
        """Return what is on its way in one direction, to double it or to change its order; not what a client sends."""
        peer = self.node(place)
        return self.queue(peer, up=up and peer in self.world.workers)

    @rule(node=_PLACES, up=st.booleans(), place=_PLACES, to=_PLACES)
    def duplicate(self, node: int, place: int, to: int, *, up: bool) -> None:
        if queue := self.out_of_order(node, up=up):
            queue.insert(to, queue[place % len(queue)])

    @rule(node=_PLACES, up=st.booleans(), place=_PLACES, to=_PLACES)
    def reorder(self, node: int, place: int, to: int, *, up: bool) -> None:
        if queue := self.out_of_order(node, up=up):
            one, other = place % len(queue), to % len(queue)
            queue[one], queue[other] = queue[other], queue[one]

    @rule(worker=_PLACES, up=st.booleans(), place=_PLACES, number=st.integers(0, 2**32 - 1))
    def damage(self, worker: int, place: int, number: int, *, up: bool) -> None:
        queue = self.worker_queue(worker, up=up)
        if queue and not _is_generate(queue[place % len(queue)]):
            place %= len(queue)
            queue[place] = damaged(queue[place], number, has_checksum=self.has_checksum)

    @rule(node=_PLACES, up=st.booleans(), place=_PLACES, number=st.integers(0, 2**32 - 1))
    def inject(self, node: int, place: int, number: int, *, up: bool) -> None:
        """Let a message that no peer sent come before another."""
        peer = self.node(node)
        if queue := self.queue(peer, up=up):
            place %= len(queue)
            has_checksum = self.has_checksum and peer in self.world.workers
            queue.insert(place, damaged(queue[place], number, has_checksum=has_checksum))

    @property
    def has_checksum(self) -> bool:
        return self.world.settings.worker.checksum

    @rule(node=_PLACES)
    def pause(self, node: int) -> None:
        self.node(node).is_paused = True

    @rule(node=_PLACES)
    def go_on(self, node: int) -> None:
        self.node(node).is_paused = False
        self.node(node).pump()

    @rule(client=_PLACES, is_reading=st.booleans())
    def stop_reading(self, client: int, *, is_reading: bool) -> None:
        self.world.clients[client % len(self.world.clients)].is_reading = is_reading

    @rule(client=_PLACES, is_paused=st.booleans())
    def stop_confirming(self, client: int, *, is_paused: bool) -> None:
        """Let a client ack nothing, as one that iterates over outputs too slowly."""
        node = self.world.clients[client % len(self.world.clients)]
        node.requests.is_paused = is_paused
        node.pump()

    @rule(is_patient=st.booleans())
    def lose_patience(self, *, is_patient: bool) -> None:
        """Let engines give up when there is no room; what they held back is out by then."""
        for worker in self.world.workers:
            worker.release()
        self.world.is_patient = is_patient

    @rule(client=_PLACES, forgets=st.integers(1, 4))
    def restart_forgetful_client(self, client: int, forgets: int) -> None:
        self.world.restart_client(client % len(self.world.clients), forgets=forgets)

    @rule(worker=_PLACES)
    def restart_worker(self, worker: int) -> None:
        self.world.restart_worker(worker % len(self.world.workers))

    @precondition(lambda self: len(self.world.clients) > 1)
    @rule(client=_PLACES)
    def say_goodbye(self, client: int) -> None:
        self.world.close_client(client % len(self.world.clients))

    def check_at_end(self) -> None:
        """Assert nothing more: errors are allowed here."""


def _was_never_taken(asked: Asked) -> bool:
    is_first_turn = asked.source is None or len(asked.source.turns) == 1
    return asked.error is not None and asked.error.code in NOT_TAKEN and is_first_turn


def _is_generate(parts: list[bytes]) -> bool:
    """Return whether a message is a new request on its way to a worker: only a broken connection loses those."""
    try:
        return ProcessorFrame.FromString(parts[0]).HasField("generate")
    except DecodeError:
        return False


def assert_no_errors(world: World) -> None:
    aborted = [asked.key for asked in world.asked if asked.status is RowStatus.ABORTED and not asked.is_aborted]
    assert not aborted, aborted
    errors = [str(asked.error) for asked in world.asked if asked.error is not None]
    assert not errors, errors


def assert_no_complaints(world: World) -> None:
    core = world.processor
    assert core.worker_connections.refused == core.clients.refused == core.workers.lost == 0
    assert [node.refused_frames for node in world.nodes()] == [0] * len(list(world.nodes()))
    for worker in core.workers.by_id.values():
        items = worker.stream.counts
        assert items.replays == items.gaps == items.damaged == items.duplicates == items.divergences == 0
        assert items.incomplete_steps == items.missing_drafts == 0
    rows = core.intake.router.counts
    assert rows.repeated == rows.unknown == rows.foreign == 0
    assert all(client.requests.repeated == 0 for client in world.clients)
