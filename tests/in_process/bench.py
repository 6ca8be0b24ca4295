"""A processor's core on a bench: its clock is manual, and the test plays its workers and its clients."""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from tests.in_process.builders import BATCH, EVENT, client_hello, hello_of, item_of, settings
from tests.in_process.sending import Sending
from tokenbus.bus import Listener, Outcome
from tokenbus.processor.processor import Core
from tokenbus.processor.workers import Worker
from tokenbus.testing import ManualClock, RowShape
from tokenbus.testing import batch as batch_of
from tokenbus_contracts import LogprobBatch, decode, encode
from tokenbus_contracts.frames import read_frame, write_frame
from tokenbus_contracts.generated.client_pb2 import ClientFrame, Confirm, ServerFrame
from tokenbus_contracts.generated.request_pb2 import Admitted, Generate, Prefilled, RequestError, RequestEvent
from tokenbus_contracts.generated.stream_pb2 import Heartbeat, ProcessorFrame, WorkerFrame

Message = list[bytes]


class Bench:
    """A core, and what it sent to each peer."""

    def __init__(self, overrides: dict[str, object] | None = None) -> None:
        self.settings = settings({"processor.id": "bench", "gateway.control": True} | (overrides or {}))
        self.clock = ManualClock()
        self.sent: defaultdict[bytes, deque[Message]] = defaultdict(deque)
        self.outcomes: dict[bytes, Outcome] = {}
        """What becomes of messages to a peer, where that is not SENT."""
        self.peers = Sending(self._send)
        self._soon: deque[Callable[[], None]] = deque()
        self._puts_off = False
        self.core = Core(self.settings, self.clock, self._call_soon)
        self.core.listen(cast("Listener", self.peers), cast("Listener", self.peers))

    def _send(self, peer: bytes, parts: Message) -> Outcome:
        outcome = self.outcomes.get(peer, Outcome.SENT)
        if outcome is Outcome.SENT:
            self.sent[peer].append(parts)
        return outcome

    def put_off(self) -> None:
        self._puts_off = True

    def _call_soon(self, call: Callable[[], None]) -> None:
        if self._puts_off:
            self._soon.append(call)
        else:
            call()

    def run_soon(self) -> None:
        while self._soon:
            self._soon.popleft()()

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.core.tick(self.clock.now())

    def pass_time(self, seconds: float, *alive: "BenchWorker | BenchClient", most: float = 1.0) -> None:
        """Advance the clock in small steps, ticking the core, while some peers send heartbeats."""
        end = self.clock.now() + seconds
        while self.clock.now() < end:
            self.clock.advance(min(most, end - self.clock.now()))
            for peer in alive:
                peer.beat()
            self.core.tick(self.clock.now())

    def worker(self, worker_id: str = "worker-0", epoch: int = 7, **hello: Any) -> "BenchWorker":  # noqa: ANN401
        worker = BenchWorker(self, worker_id, epoch)
        worker.say_hello(**hello)
        return worker

    def client(self, session: int = 5, **hello: Any) -> "BenchClient":  # noqa: ANN401 - as the message has them
        client = BenchClient(self, session)
        client.say_hello(**hello)
        return client


class BenchWorker:
    def __init__(self, bench: Bench, worker_id: str, epoch: int) -> None:
        self.bench = bench
        self.worker_id = worker_id
        self.epoch = epoch
        self.peer = f"{worker_id}/{epoch}".encode()
        self.sequence = 0
        """The last sequence that was used."""

    @property
    def known(self) -> Worker:
        return self.bench.core.workers.by_id[self.worker_id]

    def say(self, frame: WorkerFrame, *parts: bytes, epoch: int | None = None) -> None:
        frame.epoch = self.epoch if epoch is None else epoch
        self.bench.core.worker_connections.receive(self.peer, [write_frame(frame), *parts], self.bench.clock.now())

    def say_hello(self, **fields: Any) -> None:  # noqa: ANN401 - as the message has them
        self.sequence = fields.get("next_sequence", 1) - 1
        self.say(WorkerFrame(hello=hello_of(self.worker_id, **fields)))

    def beat(self, last_sequence: int | None = None, **more: Any) -> None:  # noqa: ANN401 - as the message has them
        last = self.sequence if last_sequence is None else last_sequence
        self.say(WorkerFrame(heartbeat=Heartbeat(sent_at_ns=1, last_sequence=last, **more)))

    def item(self, payload: bytes, sequence: int, kind: int = BATCH, checksum: int | None = None) -> None:
        self.sequence = max(self.sequence, sequence)
        self.say(WorkerFrame(item=item_of(payload, sequence, kind, checksum=checksum)), payload)

    def publish(self, wanted: Sequence[RowShape], step: int | None = None, **header: Any) -> LogprobBatch:  # noqa: ANN401
        sequence = self.sequence + 1
        made = batch_of(
            wanted, worker_id=self.worker_id, epoch=self.epoch, sequence=sequence, step=step or sequence, **header
        )
        self.item(encode(made), sequence)
        return made

    def admit(self, key: int, prompt_tokens: int = 3, cached_tokens: int | None = None) -> None:
        admitted = Admitted(
            request_id=key,
            worker_id=self.worker_id,
            epoch=self.epoch,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
        )
        self._event(RequestEvent(sequence=self.sequence + 1, admitted=admitted))

    def prefilled(self, key: int, state: bytes) -> None:
        prefilled = Prefilled(request_id=key, transfer_state=state)
        self._event(RequestEvent(sequence=self.sequence + 1, prefilled=prefilled))

    def fail(self, error: RequestError) -> None:
        self._event(RequestEvent(sequence=self.sequence + 1, error=error))

    def _event(self, event: RequestEvent) -> None:
        self.item(write_frame(event), event.sequence, EVENT)

    def heard(self) -> list[ProcessorFrame]:
        sent = self.bench.sent[self.peer]
        frames = [read_frame(ProcessorFrame, parts[0]) for parts in sent]
        sent.clear()
        return frames

    def refusals(self) -> list[int]:
        return [frame.refusal.reason for frame in self.heard() if frame.HasField("refusal")]

    def heard_bodies(self) -> list[str | None]:
        return [frame.WhichOneof("body") for frame in self.heard()]


class Heard(NamedTuple):
    frame: ServerFrame
    batches: list[LogprobBatch]

    @property
    def body(self) -> str | None:
        body: str | None = self.frame.WhichOneof("body")
        return body


class BenchClient:
    def __init__(self, bench: Bench, session: int) -> None:
        self.bench = bench
        self.session = session
        self._connections = 0
        self.peer = b"client-%d" % session
        self.number = 0
        """The highest frame number that came."""

    def say(self, frame: ClientFrame) -> None:
        self.bench.core.clients.receive(self.peer, [write_frame(frame)], self.bench.clock.now())

    def say_hello(self, **fields: Any) -> None:  # noqa: ANN401 - as the message has them
        self.number = 0
        self.say(ClientFrame(hello=client_hello(self.session, **fields)))

    def reconnect(self, **fields: Any) -> None:  # noqa: ANN401 - as the message has them
        self._connections += 1
        self.peer = b"client-%d-%d" % (self.session, self._connections)
        self.say_hello(**fields)

    def beat(self) -> None:
        self.say(ClientFrame(heartbeat=Heartbeat(sent_at_ns=1)))

    def heard(self) -> list[Heard]:
        sent = self.bench.sent[self.peer]
        found = []
        for parts in sent:
            frame = read_frame(ServerFrame, parts[0])
            self.number = max(self.number, frame.number)
            is_batches = frame.WhichOneof("body") == "outputs"
            found.append(Heard(frame, [decode(part) for part in parts[1:]] if is_batches else []))
        sent.clear()
        return found

    def ask(self, generate: Generate) -> None:
        self.say(ClientFrame(generate=generate))

    def errors(self) -> dict[int, int]:
        return {heard.frame.error.request_id: heard.frame.error.code for heard in self.heard() if heard.body == "error"}

    def outputs(self) -> list[Heard]:
        return [heard for heard in self.heard() if heard.body == "outputs"]

    def ack(self, through: int | None = None) -> None:
        """Acknowledge what came, or through a number."""
        self.say(ClientFrame(confirm=Confirm(through_number=self.number if through is None else through)))
