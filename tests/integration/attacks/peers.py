"""Attackers: they speak the protocols by sockets of their own, and none of them uses this project's client or worker.

All of them block, so a test runs them in a thread; none waits longer than `MOST` seconds, and none fails because it was
cut off or refused: what an attack comes to is for the test to look at.
"""

import asyncio
import contextlib
import queue
import random
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Protocol, Self, TypeVar
from urllib.parse import urlsplit
from zlib import crc32

import zmq
from google.protobuf.message import DecodeError

from tests.support.waiting import MOST
from tokenbus_contracts import BatchHeader, LogprobBatch, RowStatus, Scoring, ValueKind, encode
from tokenbus_contracts.generated.client_pb2 import (
    ClientFrame,
    ClientHello,
    Confirm,
    Resume,
    ServerFrame,
    StatusRequest,
)
from tokenbus_contracts.generated.handoff_pb2 import DecodeFrame, Handoff, PrefillFrame
from tokenbus_contracts.generated.request_pb2 import Generate, SamplingParameters, TokenPrompt
from tokenbus_contracts.generated.stream_pb2 import (
    GapReason,
    Goodbye,
    GoodbyeReason,
    Heartbeat,
    Hello,
    Item,
    PayloadKind,
    ProcessorFrame,
    StreamLimits,
    WorkerFrame,
    WorkerRole,
)
from tokenbus_services.bus import Connection
from tokenbus_services.bus.addresses import is_nats
from tokenbus_services.bus.nats import NatsTransport
from tokenbus_services.loop_thread import start_loop_thread
from tokenbus_services.settings import BusSettings

_FORGED_ID = 4242
"""The token that every forged row consists of."""
RANDOM = random.Random()  # noqa: S311 - an attacker's: keys that no one else draws, and nothing that is secret
Frame = TypeVar("Frame", ServerFrame, ProcessorFrame, DecodeFrame)


def drawn() -> int:
    """Return a key, a session or a number that no other peer has."""
    return RANDOM.getrandbits(63) | 1


Prove = Callable[["zmq.Socket[bytes]"], None]
"""Lets a socket show a key."""


def no_key(_: "zmq.Socket[bytes]") -> None:
    """Show none."""


class Line(Protocol):
    """What carries an attacker's messages."""

    def close(self) -> None:
        """Vanish, without a word."""

    def send(self, parts: tuple[bytes, ...]) -> None:
        """Send one message."""

    def receive(self, seconds: float) -> list[bytes] | None:
        """Return the next message, or None: none came in time."""


class Dealer:
    """A DEALER without a high-water mark of its own, as an attacker has it."""

    def __init__(self, address: str, prove: Prove) -> None:
        """Show a key, or none, and connect."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(option, 0)
        prove(self._socket)
        self._socket.connect(address)

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def send(self, parts: tuple[bytes, ...]) -> None:
        """Send one message; it waits in this process until the system takes it."""
        self._socket.send_multipart(parts)

    def receive(self, seconds: float) -> list[bytes] | None:
        """Return the next message, or None: none came in time."""
        if not self._socket.poll(int(1000 * seconds)):
            return None
        return self._socket.recv_multipart()


class NatsLine:
    """A connection over NATS, on an event loop and a thread of its own; tests/services/bus has attacks on those."""

    def __init__(self, address: str) -> None:
        self._came: queue.Queue[list[bytes]] = queue.Queue()
        self._over = asyncio.Event()
        self._thread, (self._loop, self._connection) = start_loop_thread("attacker", partial(self._run, address))

    async def _run(self, address: str, started: Future[tuple[asyncio.AbstractEventLoop, Connection]]) -> None:
        connection = await NatsTransport(BusSettings(linger_ms=0)).connect(address)
        started.set_result((asyncio.get_running_loop(), connection))
        reading = asyncio.create_task(self._read(connection))
        await self._over.wait()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await connection.close()

    async def _read(self, connection: Connection) -> None:
        while True:
            self._came.put(await connection.receive())

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    def send(self, parts: tuple[bytes, ...]) -> None:
        """Send one message, unless too many wait."""
        self._loop.call_soon_threadsafe(self._connection.send, parts)

    def receive(self, seconds: float) -> list[bytes] | None:
        """Return the next message, or None: none came in time."""
        with contextlib.suppress(queue.Empty):
            return self._came.get(timeout=seconds)
        return None


class Peer:
    """An attacker: it says what it likes, over either transport."""

    def __init__(self, address: str, prove: Prove = no_key) -> None:
        """Connect; over tcp with the key that `prove` shows."""
        self._line: Line = NatsLine(address) if is_nats(address) else Dealer(address, prove)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._line.close()

    def say(self, *parts: bytes) -> None:
        """Send one message; it waits in this process until the system takes it."""
        self._line.send(parts)

    def listen(self, seconds: float) -> list[bytes] | None:
        """Return the next message, or None: none came in time."""
        return self._line.receive(seconds)

    def frames(self, kind: type[Frame], seconds: float = MOST) -> Iterator[tuple[Frame, list[bytes]]]:
        """Return the frames that come, each with its further parts, until none came for so many seconds."""
        while (parts := self.listen(seconds)) is not None:
            with contextlib.suppress(DecodeError):
                yield kind.FromString(parts[0]), parts[1:]


class ClientPeer(Peer):
    """A client that says what it likes; it acknowledges what it is made to, and reads when it is made to."""

    def __init__(
        self,
        address: str,
        *,
        name: str = "attacker",
        session: int = 0,
        proof: bytes = b"",
        window_frames: int = 65_536,
    ) -> None:
        """Connect; a session of 0 is drawn at random."""
        super().__init__(address)
        self._hello = ClientHello(
            schema_major=1,
            name=name,
            window_frames=window_frames,
            window_bytes=1 << 40,
            session=session or drawn(),
            proof=proof or RANDOM.randbytes(16),
        )

    def hello(self) -> ServerFrame | None:
        """Say hello, and return the answer: a welcome or a refusal; None: there was none."""
        self.greet()
        return self.heard("welcome", "refusal")

    def greet(self) -> None:
        """Say hello, and wait for nothing."""
        self.tell(ClientFrame(hello=self._hello))

    def tell(self, frame: ClientFrame) -> None:
        """Say a frame, whatever the bounds are that it breaks."""
        self.say(frame.SerializeToString())

    def read_out(self) -> None:
        """Wait until the processor has read all that was said: one that vanishes sooner has not attacked.

        A status is answered past every window, and a client that has been ended is refused; asked while its connection
        is being cut off, it is not heard.
        """
        for _ in range(round(MOST)):
            self.tell(ClientFrame(status=StatusRequest()))
            if self.heard("status", "refusal", seconds=1) is not None:
                return
        raise AssertionError("the processor does not answer")

    def come_back(self) -> None:
        """Say hello until it is answered, as clients do: a connection that is being cut off is not heard."""
        for _ in range(round(MOST)):
            self.greet()
            if self.heard("welcome", "refusal", seconds=1) is not None:
                return
        raise AssertionError("the processor does not answer")

    def heard(self, *bodies: str, seconds: float = MOST) -> ServerFrame | None:
        """Return the next frame of some kinds, and pass over others."""
        for frame, _ in self.frames(ServerFrame, seconds):
            if frame.WhichOneof("body") in bodies:
                return frame
        return None

    def ask(self, key: int = 0, tokens: int = 300, top_logprobs: int = 0, **fields: object) -> int:
        """Ask for a request, and return its key."""
        generate = request(key, tokens, top_logprobs, **fields)
        self.tell(ClientFrame(generate=generate))
        return generate.request_key

    def resume(self, key: int, position: int = 0, deadline_unix_ms: int = 0) -> None:
        """Ask for the rest of a request, whosever it is."""
        self.tell(
            ClientFrame(resume=Resume(request_key=key, next_position=position, deadline_unix_ms=deadline_unix_ms))
        )

    def resume_all(self, keys: Iterable[int]) -> None:
        """Ask for the rest of some requests, each from its first token."""
        for key in keys:
            self.resume(key)

    def acknowledge(self, number: int) -> None:
        self.tell(ClientFrame(confirm=Confirm(through_number=number)))

    def beat(self) -> None:
        self.tell(ClientFrame(heartbeat=Heartbeat(sent_at_ns=1)))

    def watched(self, worker_id: str = "") -> Hello:
        """Watch a worker, and return what it said of itself; its epoch is in `watched_epoch`."""
        frame = ClientFrame()
        frame.watch.worker_id = worker_id
        self.tell(frame)
        answer = self.heard("watched_stream")
        assert answer is not None, "the stream cannot be watched"
        self.watched_epoch = answer.watched_stream.epoch
        return answer.watched_stream.hello


class WorkerPeer(Peer):
    """A worker that claims to be any, and publishes what it likes."""

    def __init__(self, address: str, worker_id: str, epoch: int, *, prove: Prove = no_key, **fields: object) -> None:
        super().__init__(address, prove)
        self.epoch = epoch
        said: dict[str, object] = {"first_sequence": 1, "next_sequence": 1, "proof": RANDOM.randbytes(16), **fields}
        self._hello = Hello(
            schema_major=1,
            worker_id=worker_id,
            limits=StreamLimits(max_message_bytes=2_097_152, max_rows=512, max_tokens_per_row=8, max_top_k=20),
            **{"role": WorkerRole.WORKER_ROLE_MIXED, **said},  # type: ignore[arg-type]
        )

    def greet(self) -> None:
        """Say hello, and wait for nothing."""
        self.tell(WorkerFrame(epoch=self.epoch, hello=self._hello))

    def hello(self) -> ProcessorFrame | None:
        """Say hello, and return the answer: a welcome or a refusal; None: there was none."""
        self.greet()
        return self.heard("welcome", "refusal")

    def tell(self, frame: WorkerFrame) -> None:
        """Say a frame, whatever the bounds are that it breaks."""
        self.say(frame.SerializeToString())

    def heard(self, *bodies: str, seconds: float = MOST) -> ProcessorFrame | None:
        """Return the next frame of some kinds, and pass over others."""
        for frame, _ in self.frames(ProcessorFrame, seconds):
            if frame.WhichOneof("body") in bodies:
                return frame
        return None

    def beat(self, last_sequence: int = 0) -> None:
        """Be alive, and claim to have sent some items."""
        self.tell(WorkerFrame(epoch=self.epoch, heartbeat=Heartbeat(sent_at_ns=1, last_sequence=last_sequence)))

    def gap(self, first: int, last: int) -> None:
        """Claim that some items cannot be had, so that every request of the stream would end."""
        frame = WorkerFrame(epoch=self.epoch)
        frame.gap.first_sequence, frame.gap.last_sequence, frame.gap.reason = (
            first,
            last,
            GapReason.GAP_REASON_RETENTION,
        )
        self.tell(frame)

    def leave(self) -> None:
        self.tell(WorkerFrame(epoch=self.epoch, goodbye=Goodbye(reason=GoodbyeReason.GOODBYE_REASON_STOPPED)))

    def publish(
        self,
        sequence: int,
        step: int,
        rows: Iterable[tuple[int, int]],
        tokens: int = 1,
        *,
        status: RowStatus = RowStatus.ACTIVE,
    ) -> None:
        """Publish a step of forged rows, each a request's key and the place of its first token."""
        payload = forged(self._hello.worker_id, self.epoch, sequence, step, list(rows), tokens, status)
        item = Item(
            sequence=sequence,
            payload_kind=PayloadKind.PAYLOAD_KIND_LOGPROB_BATCH,
            payload_bytes=len(payload),
            payload_crc32=crc32(payload),
        )
        self.say(WorkerFrame(epoch=self.epoch, item=item).SerializeToString(), payload)


def request(key: int = 0, tokens: int = 300, top_logprobs: int = 0, **fields: object) -> Generate:
    """Return a request for some tokens."""
    return Generate(
        request_key=key or drawn(),
        tokens=TokenPrompt(token_ids=[1]),
        sampling=SamplingParameters(max_tokens=tokens),
        top_logprobs=top_logprobs,
        **fields,  # type: ignore[arg-type]
    )


def forged(  # noqa: PLR0913, PLR0917 - what the header says, and the rows
    worker_id: str,
    epoch: int,
    sequence: int,
    step: int,
    rows: list[tuple[int, int]],
    tokens: int,
    status: RowStatus = RowStatus.ACTIVE,
) -> bytes:
    """Return an encoded step, each of whose rows has some tokens that no engine computed."""
    header = BatchHeader(
        worker_id, epoch=epoch, sequence=sequence, step=step, step_rows=len(rows), value_kind=ValueKind.RAW_LOGPROBS
    )
    size = len(rows)
    return encode(
        LogprobBatch(
            header,
            request_keys=[key for key, _ in rows],
            batch_indices=list(range(size)),
            positions=[position for _, position in rows],
            statuses=[status] * size,
            token_counts=[tokens] * size,
            draft_token_counts=[0] * size,
            proposal_counts=[0] * size,
            scorings=[Scoring.FULL] * size,
            top_ks=[0] * size,
            token_ids=[_FORGED_ID] * (size * tokens),
            logprobs=[-0.5] * (size * tokens),
            ranks=[1] * (size * tokens),
        )
    )


def handoff(generate: Generate, state: bytes, ticket: bytes = b"", worker_id: str = "prefill-0") -> list[bytes]:
    """Return a hand-off of some request with some state, and what it shows the decode worker."""
    said = Handoff(
        schema_major=1,
        worker_id=worker_id,
        generate=generate,
        state_bytes=len(state),
        state_crc32=crc32(state),
        number=drawn(),
        ticket=ticket,
    )
    return [PrefillFrame(handoff=said).SerializeToString(), state]


class Tcp:
    """A plain connection to a tcp address, that speaks ZMTP by hand as far as it likes."""

    GREETING = b"\xff" + b"\0" * 8 + b"\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + b"\0" + b"\0" * 31

    def __init__(self, address: str, patience: float = MOST) -> None:
        """Connect; with less patience, what takes nothing for so many seconds is taken for cut off."""
        url = urlsplit(address)
        self._socket = socket.create_connection((url.hostname or "", url.port or 0), timeout=patience)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def shake_hands(self) -> bool:
        """Do ZMTP's handshake without a key; return whether it was done."""
        body = b"\x05READY" + b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
        try:
            self._socket.sendall(self.GREETING)
            received = b""
            while len(received) < 64:
                chunk = self._socket.recv(64 - len(received))
                if not chunk:
                    return False
                received += chunk
            self._socket.sendall(b"\x04" + bytes([len(body)]) + body)
            return bool(self._socket.recv(1))
        except OSError:
            return False

    def send(self, data: bytes) -> bool:
        """Send some bytes; False: it was cut off."""
        try:
            self._socket.sendall(data)
        except OSError:
            return False
        return True

    def part(self, body: bytes, *, more: bool) -> bool:
        """Send one part of a message; False: it was cut off."""
        return self.send(part(body, more=more))

    def is_closed_within(self, seconds: float) -> bool:
        """Return whether the other side ends the connection in time."""
        ends = time.monotonic() + seconds
        try:
            while (left := ends - time.monotonic()) > 0:
                self._socket.settimeout(left)
                if not self._socket.recv(65_536):
                    return True
        except TimeoutError:
            return False
        except OSError:
            return True
        return False


def pour(address: str, data: bytes, seconds: float, at_once: int = 8) -> None:
    """Send the same bytes again and again from some connections, which come again when they are cut off."""
    ends = time.monotonic() + seconds

    def attack() -> None:
        while time.monotonic() < ends:
            with contextlib.suppress(OSError), Tcp(address, 0.5) as peer:
                if peer.shake_hands():
                    while time.monotonic() < ends and peer.send(data):
                        pass

    with ThreadPoolExecutor(at_once) as threads:
        for _ in range(at_once):
            threads.submit(attack)


def part(body: bytes, *, more: bool = False) -> bytes:
    """Return one part of a message as it is sent."""
    flags = b"\x03" if more else b"\x02"  # both with a length of eight bytes
    return flags + len(body).to_bytes(8, "big") + body


@contextlib.contextmanager
def many(made: Callable[[], Tcp], count: int) -> Iterator[list[Tcp]]:
    with contextlib.ExitStack() as stack:
        peers = []
        for _ in range(count):
            try:
                peers.append(stack.enter_context(made()))
            except OSError:
                break
        yield peers
