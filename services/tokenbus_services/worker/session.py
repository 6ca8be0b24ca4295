"""A worker's side of the stream protocol, without sockets and without a clock of its own.

Frames come in through `receive`, what is to be sent next comes out of `next_message`. Its owner calls it from
one thread at a time, and tells it what time it is.
"""

import secrets
from collections import deque
from collections.abc import Callable

from tokenbus_contracts import ContractError, Rule
from tokenbus_contracts.frames import read_frame, write_frame
from tokenbus_contracts.generated.request_pb2 import Abort, Generate
from tokenbus_contracts.generated.stream_pb2 import (
    Gap,
    GapReason,
    Goodbye,
    GoodbyeReason,
    Hello,
    Item,
    ProcessorFrame,
    Welcome,
    WorkerFrame,
)
from tokenbus_services.link import PROOF_BYTES, ReconnectingSession, SessionState, check_times
from tokenbus_services.worker.retention import Dropped, Retained, Retention

_MOST_REPLAYS = 64
_MOST_KEYS = 65_536
_SPARE_OWNERS = 1024


class WorkerSession(ReconnectingSession):
    """One worker's connection to a processor, whichever processor that is just now."""

    def __init__(self, hello: Hello, epoch: int, retention: Retention, *, interval: float, timeout: float) -> None:
        """Take what the worker says of itself, what it retains, and how often peers are to be heard, in seconds."""
        super().__init__(interval, timeout)
        self._introduction = Hello()
        self._introduction.CopyFrom(hello)
        self._introduction.proof = secrets.token_bytes(PROOF_BYTES)
        self._epoch = epoch
        self._retention = retention
        self._replays: deque[tuple[int, int]] = deque()
        self._next_sequence = 1
        self._sent_bytes = 0
        self._granted_sequence = 0
        self._granted_bytes = 0
        self._owners: dict[int, int] = {}
        self.requests: set[int] = set()
        """The keys of the requests that the worker has, whether the engine took them yet or not."""
        self._takes_no_more = False
        self._is_news = False
        """Whether the processor is still to learn that."""
        self.acknowledged = 0
        self.replayed = 0
        self.on_request: Callable[[Generate | Abort], None] = _ignore
        self.on_room: Callable[[], None] = _nothing

    @property
    def credit(self) -> tuple[int, int]:
        """How many more items, and how many more bytes, may be sent just now."""
        return self._granted_sequence + 1 - self._next_sequence, self._granted_bytes - self._sent_bytes

    @property
    def outstanding(self) -> int:
        """How many items no processor has acknowledged yet."""
        return len(self._retention)

    def take_no_more(self) -> None:
        """Tell every processor from now on that this worker takes no new requests; what comes nevertheless is taken."""
        self._takes_no_more = self._is_news = True

    def begin(self, generate: Generate) -> None:
        """Have a request, and know whose it is."""
        self.requests.add(generate.request_key)
        self._owners[generate.request_key] = generate.owner
        if len(self._owners) > 2 * len(self.requests) + _SPARE_OWNERS:
            self._owners = {key: owner for key, owner in self._owners.items() if key in self.requests}

    # What comes in.

    def receive(self, parts: list[bytes], now: float) -> None:
        """Take one transport message; a ContractError says what is wrong with it, and changes nothing."""
        if len(parts) != 1:
            raise ContractError("message", "one part", len(parts), rule=Rule.LENGTH)
        frame = read_frame(ProcessorFrame, parts[0])
        body = frame.WhichOneof("body")
        if body is None or self.state is SessionState.LEFT:
            return
        if body == "welcome":
            self._welcome(frame.welcome)
        elif body == "refusal":
            self._refused(frame.refusal, now)
        elif self.state is SessionState.OPEN:
            self._open_frame(frame, body, now)
        self._last_heard = now

    def _open_frame(self, frame: ProcessorFrame, body: str, now: float) -> None:
        match body:
            case "credit":
                self._granted_sequence = max(self._granted_sequence, frame.credit.through_sequence)
                self._granted_bytes = max(self._granted_bytes, frame.credit.bytes)
            case "ack":
                self._acknowledge(frame.ack.through_sequence)
            case "replay":
                self._replay(frame.replay.first_sequence, frame.replay.last_sequence)
            case "heartbeat":
                self._echo_ns = frame.heartbeat.sent_at_ns
            case "goodbye":
                self._greet_again(now + self._interval)
            case "generate":
                # One that is known is being asked for again, because nobody could tell whether it came.
                if frame.generate.request_key not in self.requests:
                    self._take(frame.generate, now)
            case "abort":
                self.on_request(frame.abort)

    def _take(self, generate: Generate, now: float) -> None:
        try:
            self.on_request(generate)
        except ContractError:
            self._greet_again(now + self._interval)  # a hello without it has it handed out again: nobody else would
            raise
        self.begin(generate)

    def _welcome(self, welcome: Welcome) -> None:
        if welcome.resume_from > self._retention.next_sequence:
            limit = f"at most {self._retention.next_sequence}, the next item"
            raise ContractError("welcome.resume_from", limit, welcome.resume_from)
        check_times(welcome)
        self._welcomed(welcome)
        self._is_news = self._takes_no_more
        self._replays.clear()
        self._next_sequence = welcome.resume_from
        self._sent_bytes = 0
        self._granted_sequence = welcome.credit.through_sequence
        self._granted_bytes = welcome.credit.bytes
        # What the processor does not want again may still be on its way to a client: it is kept until an Ack.

    def _acknowledge(self, through: int) -> None:
        if through >= self._retention.next_sequence:
            limit = f"at most {self._retention.next_sequence - 1}, the last item"
            raise ContractError("ack.through_sequence", limit, through)
        self.acknowledged = max(self.acknowledged, through)
        if self._retention.acknowledge(through):
            self.on_room()

    def _replay(self, first: int, last: int) -> None:
        if not first <= last < self._next_sequence:
            limit = f"a range within what was sent, up to {self._next_sequence - 1}"
            raise ContractError("replay.last_sequence", limit, f"{first} to {last}")
        if len(self._replays) < _MOST_REPLAYS:  # beyond that it will be asked for again
            self._replays.append((first, last))

    # What goes out.

    def _next(self, now: float) -> list[bytes] | None:
        message = None if self._is_news else self._next_replay() or self._next_item()
        if message is None and (beat := self._heartbeat(now, at_once=self._is_news)) is not None:
            self._is_news = False
            beat.last_sequence = self._next_sequence - 1
            beat.takes_no_more = self._takes_no_more
            message = [write_frame(WorkerFrame(epoch=self._epoch, heartbeat=beat))]
        return message

    def goodbye(self, reason: GoodbyeReason, message: str = "") -> list[bytes]:
        """Leave: return the last message to send."""
        self.state = SessionState.LEFT
        body = Goodbye(reason=reason, message=message, last_sequence=self._next_sequence - 1)
        return [write_frame(WorkerFrame(epoch=self._epoch, goodbye=body))]

    def _hello(self) -> list[bytes]:
        hello = Hello()
        hello.CopyFrom(self._introduction)
        hello.first_sequence = self._retention.first_sequence
        hello.next_sequence = self._retention.next_sequence
        hello.request_keys.extend(sorted(self.requests)[:_MOST_KEYS])
        hello.request_owners.extend(self._owners.get(key, 0) for key in hello.request_keys)
        if self._takes_no_more:
            hello.max_requests = 0
        return [write_frame(WorkerFrame(epoch=self._epoch, hello=hello))]

    def _next_replay(self) -> list[bytes] | None:
        while self._replays:
            first, last = self._replays.popleft()
            # What was acknowledged in the meantime, nobody needs.
            entry = self._retention.find(max(first, self._retention.first_sequence))
            if entry is None or entry.sequence > last:
                continue
            if entry.last_sequence < last:
                self._replays.appendleft((entry.last_sequence + 1, last))
            self.replayed += 1
            return self._message(entry)
        return None

    def _next_item(self) -> list[bytes] | None:
        sequence = self._next_sequence
        if sequence < self._retention.first_sequence:
            # What was asked for from here on is gone: it was acknowledged to another processor.
            self._next_sequence = self._retention.first_sequence
            return [self._gap(sequence, self._next_sequence - 1, frozenset())]
        entry = self._retention.find(sequence)
        if entry is None:
            return None
        size = len(entry.payload) if isinstance(entry, Retained) else 0
        # Of a run that found no room only the first needs credit: the whole may be longer than any grant.
        if sequence > self._granted_sequence or self._sent_bytes + size > self._granted_bytes:
            return None
        self._next_sequence = entry.last_sequence + 1
        self._sent_bytes += size
        return self._message(entry)

    def _message(self, entry: Retained | Dropped) -> list[bytes]:
        if isinstance(entry, Dropped):
            return [self._gap(entry.sequence, entry.last_sequence, entry.keys)]
        item = Item(
            sequence=entry.sequence,
            payload_kind=entry.kind,
            payload_bytes=len(entry.payload),
            payload_crc32=entry.checksum,
        )
        return [write_frame(WorkerFrame(epoch=self._epoch, item=item)), entry.payload]

    def _gap(self, first: int, last: int, keys: frozenset[int]) -> bytes:
        gap = Gap(
            first_sequence=first,
            last_sequence=last,
            reason=GapReason.GAP_REASON_RETENTION,
            request_keys=sorted(keys),
        )
        return write_frame(WorkerFrame(epoch=self._epoch, gap=gap))


def _ignore(_request: Generate | Abort) -> None:
    """Take a request that nobody waits for."""


def _nothing() -> None:
    """Nobody waits for room."""
