"""WorkerSession: a worker's side of the stream protocol, without sockets or clocks.

`receive` handles frames, and `next_message` returns the next message to send. Only one thread at a time may use a
session. Callers pass the current time.
"""

import secrets
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict
from typing import Any

from tokenbus.bus.link import PROOF_BYTES, ReconnectingSession
from tokenbus.settings import Settings
from tokenbus.worker.engine import EngineDescription
from tokenbus.worker.retention import Dropped, Retained, Retention
from tokenbus_contracts import ContractError, Rule
from tokenbus_contracts.frames import read_frame, write_frame
from tokenbus_contracts.generated.control_pb2 import Control, EngineState
from tokenbus_contracts.generated.request_pb2 import Abort, Admitted, Generate
from tokenbus_contracts.generated.stream_pb2 import (
    Gap,
    GapReason,
    Heartbeat,
    Hello,
    Item,
    ProcessorFrame,
    StreamLimits,
    Welcome,
    WorkerFrame,
)
from tokenbus_contracts.schema import MAJOR, MINOR

_MAX_REPLAYS = 64
_MAX_REQUEST_IDS = 65_536
NO_TURN: tuple[int, Admitted | None] = (0, None)
"""Owner and turn of a request that did not come from the processor."""
_MAX_RECEIVED = 1024


def turn_of(generate: Generate) -> Admitted | None:
    """Return the fields of a request's turn for its admission, or None for a first turn that no worker has begun."""
    if not generate.first_request_id and not generate.HasField("continuation"):
        return None
    continuation = generate.continuation
    return Admitted(
        first_request_id=generate.first_request_id,
        turn=continuation.turn,
        first_position=len(continuation.token_ids),
        reason=continuation.reason,
    )


class WorkerSession(ReconnectingSession):
    """A worker's stream to its processor, which survives reconnections and changes of the processor."""

    def __init__(  # noqa: PLR0913 - each but the first three is given by name
        self,
        hello: Hello,
        epoch: int,
        retention: Retention,
        *,
        interval: float,
        timeout: float,
        on_request: Callable[[Generate | Abort], None],
        on_room: Callable[[], None],
        processors: int = 1,
        abandon_after: float = 0.0,
        proof: bytes = b"",
    ) -> None:
        """Create a session. All times are in seconds.

        `on_request` gets each new request and each abort, and may raise ContractError as a refusal. `on_room` is called
        when an ack has freed retention.
        """
        super().__init__(interval, timeout, processors, abandon_after)
        self._introduction = deepcopy(hello)
        self._introduction.proof = proof or secrets.token_bytes(PROOF_BYTES)
        self._epoch = epoch
        self._retention = retention
        self._on_request = on_request
        self._on_room = on_room
        self.on_epoch: Callable[[int], None] = lambda _: None
        """Callback for each new epoch, called before the retained items are dropped."""
        self.on_control: Callable[[Control], None] = lambda _: None
        """Callback for each operator's command. The processor sends an unanswered command again."""
        self.stalled_ms: Callable[[float], int] = lambda _: 0
        """Returns for how many milliseconds, at the given time, the engine has had requests without making progress."""
        self.kv_cache: Callable[[], int] = lambda: 0
        self._was_stalled = False
        self._replays: deque[tuple[int, int]] = deque()
        self._next_sequence = 1
        self._sent_bytes = 0
        self._granted_sequence = 0
        self._granted_bytes = 0
        self._received: dict[int, tuple[int, int]] = {}
        """Number and deadline of each recent request by id, oldest first, to detect repeated and reused ids."""
        self._count = self._count_at_hello = 0
        """Number of all received requests, and this number at the time of the last hello."""
        self._unlisted = range(0)
        """Numbers of the requests that the processor may repeat, because they arrived after the last answered hello."""
        self.requests: dict[int, tuple[int, Admitted | None]] = {}
        """Owner and turn of each of the worker's requests, including requests that wait for the engine."""
        self.given_up: set[int] = set()
        """Requests of the abandoned processor that the engine has not ended yet."""
        self._held: list[ProcessorFrame] = []  # frames from the new processor that wait until `given_up` is empty
        self._takes_no_more = False
        self.replayed = 0

    @property
    def credit(self) -> tuple[int, int]:
        """Remaining credit, as a number of items and a number of bytes."""
        return self._granted_sequence + 1 - self._next_sequence, self._granted_bytes - self._sent_bytes

    @property
    def outstanding(self) -> int:
        return len(self._retention)

    def take_no_more(self) -> None:
        """Tell processors to send no new requests. Requests that still arrive are accepted."""
        self._takes_no_more = self._is_news = True

    def add_request(self, generate: Generate) -> None:
        self.requests[generate.request_id] = generate.owner, turn_of(generate)

    def set_engine_state(self, state: EngineState) -> None:
        """Set the LoRA adapters, the version of the weights, and the pause that the next hello will report."""
        self._introduction.lora_adapters[:] = state.lora_adapters
        self._introduction.paused_since_unix_ms = state.paused_since_unix_ms
        self._introduction.paused_by = state.paused_by
        self._introduction.weight_version = state.weight_version

    def describe(self, admitted: Admitted) -> None:
        """Add the turn to an admission, and the version of the weights unless the engine has set it."""
        admitted.weight_version = admitted.weight_version or self._introduction.weight_version
        _, turn = self.requests.get(admitted.request_id, NO_TURN)
        if turn is not None:
            admitted.MergeFrom(turn)

    def _decode(self, parts: list[bytes]) -> ProcessorFrame:
        if len(parts) != 1:
            raise ContractError("message", "one part", len(parts), rule=Rule.LENGTH)
        return read_frame(ProcessorFrame, parts[0])

    def _handle(self, frame: ProcessorFrame, body: str, _parts: list[bytes], now: float) -> None:
        match body:
            case "credit":
                self._granted_sequence = max(self._granted_sequence, frame.credit.through_sequence)
                self._granted_bytes = max(self._granted_bytes, frame.credit.bytes)
            case "ack":
                self._acknowledge(frame.ack.through_sequence)
            case "replay":
                self._replay(frame.replay.first_sequence, frame.replay.last_sequence)
            case "generate" | "abort":
                self._handle_request(frame, now)
            case "control":
                self.on_control(frame.control)

    def _handle_request(self, frame: ProcessorFrame, now: float) -> None:
        if self.given_up:
            if len(self._held) < 2 * self._introduction.max_requests:
                self._held.append(frame)
            else:  # the processor repeats the frame after the next hello
                self._greet_again(now + self.interval)
        elif frame.HasField("abort"):
            self._on_request(frame.abort)
        elif frame.generate.request_id not in self.requests:
            number, deadline = self._received.get(frame.generate.request_id, (0, 0))
            # The processor repeats a request whose arrival is uncertain.
            if deadline != frame.generate.deadline_unix_ms or number not in self._unlisted:
                self._accept(frame.generate, now)

    def _accept(self, generate: Generate, now: float) -> None:
        try:
            self._on_request(generate)
        except ContractError:
            self._greet_again(now + self.interval)  # the processor repeats a request that the hello omits
            raise
        self.add_request(generate)
        self._count += 1
        self._received[generate.request_id] = self._count, generate.deadline_unix_ms
        if len(self._received) > _MAX_RECEIVED:
            del self._received[next(iter(self._received))]

    def _welcome(self, welcome: Welcome) -> None:
        is_another = self.asks_another
        latest = 1 if is_another else self._retention.next_sequence
        if welcome.resume_from > latest:
            raise ContractError("welcome.resume_from", f"at most {latest}, the next item", welcome.resume_from)
        self._welcomed(welcome)
        if is_another:
            self._begin_epoch()
        self._is_news = self._takes_no_more or self._was_stalled
        self._unlisted = range(self._count_at_hello + 1, self._count + 1)
        self._replays.clear()
        self._next_sequence = welcome.resume_from
        self._sent_bytes = 0
        self._granted_sequence = welcome.credit.through_sequence
        self._granted_bytes = welcome.credit.bytes
        # Earlier items may still be on their way to a client, so each item is retained until its ack.

    def _begin_epoch(self) -> None:
        """Abort the requests of the earlier processor, and drop the items for that processor.

        If the requests come from the engine's own server, the worker does not abort them.
        """
        self._epoch += 1
        self.on_epoch(self._epoch)
        self._retention.restart()
        if self._introduction.max_requests:
            given_up, self.requests = self.requests, {}
            self.given_up.update(given_up)
            for request_id in given_up:
                with suppress(ContractError):  # if the queue is full, the request ends without an abort
                    self._on_request(Abort(request_id=request_id))

    def ended(self, request_ids: Iterable[int], now: float) -> None:
        """Remove the requests that the engine has ended."""
        for request_id in request_ids:
            self.requests.pop(request_id, None)
            self.given_up.discard(request_id)
        if not self.given_up:
            held, self._held = self._held, []
            for frame in held:
                with suppress(ContractError):  # the processor repeats a refused request
                    self._handle_request(frame, now)

    def _acknowledge(self, through: int) -> None:
        if through >= self._retention.next_sequence:
            limit = f"at most {self._retention.next_sequence - 1}, the last item"
            raise ContractError("ack.through_sequence", limit, through)
        if self._retention.acknowledge(through):
            self._on_room()

    def _replay(self, first: int, last: int) -> None:
        if not first <= last < self._next_sequence:
            limit = f"a range within what was sent, up to {self._next_sequence - 1}"
            raise ContractError("replay.last_sequence", limit, f"{first} to {last}")
        if len(self._replays) < _MAX_REPLAYS:  # the processor requests an ignored replay again
            self._replays.append((first, last))

    @property
    def _last_sequence(self) -> int:
        return self._next_sequence - 1

    def _encode(self, **body: Any) -> bytes:  # noqa: ANN401 - messages
        return write_frame(WorkerFrame(epoch=self._epoch + self.asks_another, **body))

    def _next_data(self) -> list[bytes] | None:
        return None if self._is_news else self._next_replay() or self._next_item()

    def _heartbeat(self, now: float) -> Heartbeat:
        beat = super()._heartbeat(now)
        beat.takes_no_more = self._takes_no_more
        beat.stalled_ms = self.stalled_ms(now)
        if used := self.kv_cache():
            beat.kv_cache_permille = used - 1
        self._was_stalled = bool(beat.stalled_ms)
        return beat

    def _greeting(self, now: float) -> list[bytes] | None:
        """Send a hello unless the engine is stalled. The processor would at once declare a stalled worker lost."""
        if now >= self._next_greeting:
            most = 1000 * self.timeout + self._introduction.longest_step_ms
            if self.stalled_ms(now) > most:
                self._greet_again(now + self.interval)
        return super()._greeting(now)

    def _hello(self) -> Hello:
        self._count_at_hello = self._count
        hello = deepcopy(self._introduction)
        hello.first_sequence, hello.next_sequence = self._retention.first_sequence, self._retention.next_sequence
        if self.asks_another:
            hello.first_sequence = hello.next_sequence = 1
        if not (self.asks_another and hello.max_requests):
            hello.request_ids.extend(sorted(self.requests)[:_MAX_REQUEST_IDS])
            hello.request_owners.extend(self.requests[each][0] for each in hello.request_ids)
        hello.processors = self._processors
        if self._takes_no_more:
            hello.max_requests = 0
        return hello

    def _next_replay(self) -> list[bytes] | None:
        while self._replays:
            first, last = self._replays.popleft()
            entry = self._retention.find(max(first, self._retention.first_sequence))  # earlier items were acknowledged
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
            # An earlier processor acknowledged these items, so they are not retained.
            self._next_sequence = self._retention.first_sequence
            return [self._gap(sequence, self._next_sequence - 1, frozenset())]
        entry = self._retention.find(sequence)
        if entry is None:
            return None
        size = len(entry.payload) if isinstance(entry, Retained) else 0
        # Only the first item of a dropped run needs credit, because the run may be longer than any grant.
        if sequence > self._granted_sequence or self._sent_bytes + size > self._granted_bytes:
            return None
        self._next_sequence = entry.last_sequence + 1
        self._sent_bytes += size
        return self._message(entry)

    def _message(self, entry: Retained | Dropped) -> list[bytes]:
        if isinstance(entry, Dropped):
            return [self._gap(entry.sequence, entry.last_sequence, entry.request_ids)]
        item = Item(
            sequence=entry.sequence,
            payload_kind=entry.kind,
            payload_bytes=len(entry.payload),
            payload_crc32=entry.checksum,
        )
        return [self._encode(item=item), entry.payload]

    def _gap(self, first: int, last: int, request_ids: frozenset[int]) -> bytes:
        reason = GapReason.GAP_REASON_RETENTION
        gap = Gap(first_sequence=first, last_sequence=last, reason=reason, request_ids=sorted(request_ids))
        return self._encode(gap=gap)


def hello_of(settings: Settings, vocabulary_size: int, description: EngineDescription) -> Hello:
    """Return a worker's hello, to which the session adds items and requests."""
    worker, limits = settings.worker, settings.limits
    return Hello(
        schema_major=MAJOR,
        schema_minor=MINOR,
        worker_id=worker.id,
        role=f"WORKER_ROLE_{worker.role.upper()}",
        limits=StreamLimits(**{field.name: getattr(limits, field.name) for field in StreamLimits.DESCRIPTOR.fields}),
        model=worker.model,
        vocabulary_size=vocabulary_size,
        tp_rank=worker.tp_rank,
        dp_rank=worker.dp_rank,
        max_requests=worker.max_requests,
        longest_step_ms=worker.longest_step_ms,
        **asdict(description),
    )
