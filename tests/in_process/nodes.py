"""The peers of a processor in a simulated network: workers and clients without threads, sockets or time."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np

from tests.in_process.builders import OFF, client_hello
from tests.in_process.network import Network, Wire
from tests.in_process.prefix_engine import next_token
from tokenbus.bus.link import ReconnectingSession
from tokenbus.client.requests import OpenRequests
from tokenbus.client.session import ClientSession
from tokenbus.client.steps import RequestEnd, StepRows
from tokenbus.client.tokens import RequestTokens
from tokenbus.delivery import RequestFailedError, Token
from tokenbus.delivery.step import TokenLists
from tokenbus.engines import synthetic
from tokenbus.engines.synthetic import SyntheticEngine
from tokenbus.settings import Settings
from tokenbus.testing import ManualClock
from tokenbus.worker import Engine, Publisher
from tokenbus.worker.engine_loop import EngineLoop
from tokenbus.worker.engine_publisher import EnginePublisher
from tokenbus_contracts import BatchKind, ContractError, LogprobBatch, RowStatus
from tokenbus_contracts.generated.request_pb2 import Abort, Generate
from tokenbus_contracts.schema import MINOR


class Node:
    """A session at the end of a connection; what a Link does in an event loop, the test does by hand."""

    def __init__(
        self,
        session: ReconnectingSession,
        network: Network,
        clock: ManualClock,
        lock: AbstractContextManager[object] = nullcontext(),  # noqa: B008 - it has no state
    ) -> None:
        self.session = session
        self.lock = lock
        self.network = network
        self.clock = clock
        self.wire: Wire = network.connect()
        self.is_paused = False
        self.refused_frames = 0
        self._unsent: list[bytes] | None = None

    def pump(self) -> None:
        while not self.is_paused:
            with self.lock:
                message = self._unsent or self.session.next_message(self.clock.now())
            self._unsent = None
            if message is None:
                return
            if not self.wire.send(message):
                self._unsent = message
                return

    def receive(self) -> bool:
        if self.is_paused or not self.wire.down:
            return False
        try:
            with self.lock:
                self.session.receive(self.wire.down.popleft(), self.clock.now())
        except ContractError:
            self.refused_frames += 1
        self.pump()
        return True

    def reconnect(self, *, keeps_unsent: bool) -> None:
        self.wire = self.network.reconnect(self.wire, keeps_unsent=keeps_unsent)
        with self.lock:
            self.session.disconnected(self.clock.now())


class DrivenPublisher(Publisher):
    """A Publisher without a thread: the test carries its messages, and its engine never waits in earnest."""

    def __init__(self, settings: Settings, epoch: int) -> None:
        super().__init__(settings, vocabulary_size=synthetic.VOCABULARY_SIZE, epoch=epoch)
        self.session.stalled_ms = lambda _: 0  # its engine has a turn when the test says so
        self.begin()
        self.turn_over = threading.Event()
        self.emitted: dict[int, int] = {}
        """How many tokens of each request were published."""
        self.holds_back = False
        """Whether the next draft waits until another step has begun."""
        self.held: LogprobBatch | None = None

    @property
    def lock(self) -> threading.Condition:
        return self._room

    @property
    def waiting_generates(self) -> int:
        return sum(isinstance(request, Generate) for request in self.incoming._requests)

    def take_requests(self, seconds: float = 0) -> list[Generate | Abort]:
        """Return what is there without waiting: the engine has one turn at a time."""
        del seconds
        self.turn_over.set()
        return super().take_requests()

    def publish(self, batch: LogprobBatch) -> int:
        """Publish, and remember how far each request came; what was held back follows."""
        if self.holds_back and self.held is None and batch.header.kind is BatchKind.DRAFT:
            self.holds_back, self.held = False, batch
            return 0
        sequence = super().publish(batch)
        for key, end in zip(batch.request_ids.tolist(), (batch.positions + batch.token_counts).tolist(), strict=True):
            self.emitted[key] = max(end, self.emitted.get(key, 0))
        self.release()
        return sequence

    def release(self) -> None:
        held, self.held = self.held, None
        if held is not None:
            self.publish(held)

    def _wait_for_room(self, size: int) -> bool:
        """Time out at once: who would wait in earnest does not take a turn before there is room."""
        del size
        return False


class WorkerNode(Node):
    """One life of a worker: an engine, its publisher, and a connection."""

    def __init__(  # noqa: PLR0913 - what differs from world to world
        self,
        settings: Settings,
        epoch: int,
        networks: Mapping[str, Network],
        clock: ManualClock,
        *,
        parts: int,
        drafts: bool,
        engine: Engine | None = None,
    ) -> None:
        self.publisher = DrivenPublisher(settings, epoch)
        self.engine = engine or SyntheticEngine(tokens_per_step=3, drafts=drafts, parts=parts)
        publisher = EnginePublisher(self.publisher, self.engine.vocabulary_size)
        self._loop = EngineLoop(self.engine, publisher, unix_ms=clock.unix_ms)
        self.settings = settings
        self._messages_per_step = parts * (1 + drafts)
        self._networks = networks
        super().__init__(self.publisher.session, self._next_network(), clock, self.publisher.lock)

    def _next_network(self) -> Network:
        return self._networks[self.publisher._addresses[self.publisher.session.address_index]]

    def pump(self) -> None:
        """Send all that the session has to say, and go to the next processor when it is time, as a Link does."""
        super().pump()
        while not self.is_paused and self.session.is_leaving(self.clock.now()):
            with self.lock:
                self.session.move(self.clock.now())
            self._unsent = None
            self.network.wires.pop(self.wire.peer, None)
            self.network = self._next_network()
            self.wire = self.network.connect()
            super().pump()

    def has_room(self) -> bool:
        retention, worker = self.publisher.retention, self.settings.worker
        is_held = self.publisher.held is not None
        messages = self.publisher.waiting_generates + self._messages_per_step + is_held
        size = messages * self.settings.limits.max_message_bytes
        return len(retention) + messages < worker.most_items and retention.bytes + size <= worker.retention_bytes

    def turn(self) -> None:
        held = self.publisher.held
        self.publisher.turn_over.clear()
        self._loop.serve(self.publisher.turn_over)
        if held is not None and self.publisher.held is held:  # no step came any more
            self.publisher.release()
        self.pump()

    def release(self) -> None:
        self.publisher.release()
        self.pump()


@dataclass(slots=True)
class Asked:
    """A request as its client sees it: what it asked for, and what it got."""

    generate: Generate
    tokens: list[Token] = field(default_factory=list)
    source: RequestTokens | None = None
    is_aborted: bool = False
    status: RowStatus | None = None
    error: RequestFailedError | None = None

    @property
    def key(self) -> int:
        return self.generate.request_id

    @property
    def has_ended(self) -> bool:
        return self.status is not None or self.error is not None

    def check_end(self) -> None:
        """Assert that it ended as it may, if it did: every token was compared as it came."""
        has, most = len(self.tokens), self.generate.sampling.max_tokens
        if self.status is RowStatus.FINISHED_LENGTH:
            assert has == most
        elif self.status is not None:
            assert self.status is RowStatus.ABORTED
        if self.error is not None:
            assert has == self.error.emitted_tokens, (str(self.error), has)
            assert has <= self.error.generated_tokens <= most, (str(self.error), has)


class AskingClient:
    """One life of a client, at one processor or several, and what it took of each of its requests."""

    def __init__(  # noqa: PLR0913 - what differs from world to world
        self,
        settings: Settings,
        life: int,
        networks: Sequence[Network],
        clock: ManualClock,
        *,
        by_columns: bool,
        new_id: Callable[[], int],
    ) -> None:
        client, bus = settings.client, settings.bus
        hello = client_hello(
            life, schema_minor=MINOR, name=client.name, window_frames=client.window_frames,
            window_bytes=client.window_bytes, wants_room=len(networks) > 1,
        )  # fmt: skip
        interval, timeout = bus.heartbeat_interval_ms / 1000, bus.heartbeat_timeout_ms / 1000
        self.requests = OpenRequests(
            client.request_buffer_rows, client.resume_timeout_ms / 1000, has_several=len(networks) > 1, new_id=new_id
        )
        self.sessions = [
            ClientSession(hello, self.requests, settings.limits, interval=interval, timeout=timeout) for _ in networks
        ]
        self.nodes = [Node(*pair, clock) for pair in zip(self.sessions, networks, strict=True)]
        if by_columns:
            self.requests.open_stream(self._take_columns)
        self.clock = clock
        self.asked: dict[int, Asked] = {}
        self.is_reading = True
        self.drafted = 0
        self.ends: set[int] = set()

    @property
    def node(self) -> Node:
        return self.nodes[0]

    def pump(self) -> None:
        for node in self.nodes:
            node.pump()

    def ask(self, asked: Asked) -> None:
        self.asked[asked.key] = asked
        asked.source = self.requests.open(asked.generate)
        self.pump()

    def take_over(self, asked: Asked) -> None:
        self.asked[asked.key] = asked
        drafts = asked.generate.include_draft_logprobs
        asked.source = self.requests.resume(asked.key, len(asked.tokens), include_drafts=drafts)

    def abort(self, asked: Asked) -> None:
        asked.is_aborted = True
        self.requests.abort(asked.key)
        self.pump()

    def read(self) -> None:
        """Take all that has come, unless this client stopped reading, and compare it with what is true."""
        if self.is_reading:
            for asked in self.asked.values():
                if not asked.has_ended:
                    self._check_waiting(asked)
                    take(asked)

    def watch_over(self) -> None:
        """Do what time demands, as Client does."""
        self.requests.end_overdue(self.clock.unix_ms())
        self.requests.look(self.clock.now())
        self.pump()

    def _take_columns(self, output: StepRows | RequestEnd) -> None:
        """Take what is new of a step, and compare it with what is true; nothing of a request comes after its end."""
        if isinstance(output, RequestEnd):
            assert output.request_id not in self.ends
            self.ends.add(output.request_id)
            return
        target, draft = output
        assert self.ends.isdisjoint(target.request_ids.tolist())
        self._check_drafts(target, draft)
        lists = TokenLists(target)
        for place, key in enumerate(target.request_ids.tolist()):
            asked = self.asked[key]
            for token in lists.tokens_of(place):
                asked.tokens.append(token)
                assert_true(asked, len(asked.tokens) - 1)

    def _check_waiting(self, asked: Asked) -> None:
        for step, _ in asked.source.waiting if asked.source is not None else ():
            self._check_drafts(step.target, step.draft)

    def _check_drafts(self, target: LogprobBatch, draft: LogprobBatch | None) -> None:
        """Assert that what was drafted is about the same tokens as the rows beside it."""
        if draft is None:
            return
        self.drafted += draft.row_count
        mine = dict(zip(target.request_ids.tolist(), target.rows(), strict=True))
        for key, row in zip(draft.request_ids.tolist(), draft.rows(), strict=True):
            assert mine[key].position == row.position
            ids = synthetic.true_tokens(key, row.position, row.position + row.token_ids.size).ids
            assert np.array_equal(row.token_ids, ids)


def take(asked: Asked) -> None:
    source = asked.source
    assert source is not None
    while len(source) or source.has_ended or source._tokens:
        try:
            source.__anext__().send(None)
        except StopIteration as taken:
            asked.tokens.append(taken.value)
            assert_true(asked, len(asked.tokens) - 1)
        except StopAsyncIteration:
            asked.status = source.status
            return
        except RequestFailedError as error:
            asked.error = error
            return
        except RuntimeError as error:  # without an event loop it cannot wait: what was there, it had before
            if str(error) == "no running event loop":
                return
            raise


def assert_true(asked: Asked, place: int) -> None:
    token = asked.tokens[place]
    assert token.position == place
    if asked.generate.continuation_policy != OFF:
        assert asked.source is not None
        turn = [turn for turn in asked.source.turns if turn.begin <= place][-1]
        assert token.id == next_token(turn.request_id, [each.id for each in asked.tokens[:place]])
        return
    true = synthetic.true_tokens(asked.key, place, place + 1)
    assert token.id == true.ids[0]
    if not asked.generate.HasField("top_logprobs"):
        assert (token.logprob, token.rank, token.alternatives) == (None, None, ())
        return
    assert token.logprob == true.logprobs[0]
    assert token.rank == true.ranks[0]
    top_k = 0 if token.is_shed else asked.generate.top_logprobs
    numbers = synthetic.draws(np.array([asked.key], np.uint64), np.array([place]))
    ids, logprobs = synthetic.alternatives(numbers, np.array([top_k]))
    assert token.alternatives == tuple(zip(ids.tolist(), logprobs.tolist(), strict=True))


def work_left(worker: WorkerNode) -> Iterator[str]:
    name = worker.settings.worker.id
    if worker.engine.has_work:
        yield f"{name} computes"
    if len(worker.publisher.retention):
        yield f"{name} retains {len(worker.publisher.retention)}"
    if worker.publisher.session.given_up:
        yield f"{name} has not ended {worker.publisher.session.given_up}"
    if worker.publisher.session.requests:
        yield f"{name} believes to have {set(worker.publisher.session.requests)}"
