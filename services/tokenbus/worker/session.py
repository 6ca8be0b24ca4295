"""WorkerSession: a worker's side of the stream protocol, without sockets and without a clock of its own.

`receive` takes frames, `next_message` returns the next one to send. One thread at a time uses it, and passes the time.
"""

import secrets
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import deepcopy
from typing import Any, NamedTuple

from tokenbus.bus.link import PROOF_BYTES, ReconnectingSession
from tokenbus.settings import Settings
from tokenbus.worker.engine import DescribesModel
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

_MOST_REPLAYS = 64
_MOST_KEYS = 65_536
_SPARE_OWNERS = 1024
_MOST_TAKEN = 1024


class _Taken(NamedTuple):
    """A request that came, by what differs where its key is used again."""

    number: int
    deadline: int


class WorkerSession(ReconnectingSession):
    """One worker's connection to a processor, which may be another one after a reconnection."""

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
        """Take the worker's hello, what it retains, the times of heartbeats in seconds, and two callbacks.

        `on_request` gets each new request and each abort; a ContractError of its refuses a request. `on_room` is
        called when an ack has made room in retention.
        """
        super().__init__(interval, timeout, processors, abandon_after)
        self._introduction = deepcopy(hello)
        self._introduction.proof = proof or secrets.token_bytes(PROOF_BYTES)
        self._epoch = epoch
        self._retention = retention
        self._on_request = on_request
        self._on_room = on_room
        self.on_epoch: Callable[[int], None] = lambda _: None
        """Called with each new epoch, before the retained items are dropped."""
        self.on_control: Callable[[Control], None] = lambda _: None
        """Called with each command of an operator's; one comes again whose answer the processor has not seen."""
        self.stalled_ms: Callable[[float], int] = lambda _: 0
        """Returns at a time for how long the engine has had requests and made no progress."""
        self.kv_cache: Callable[[], int] = lambda: 0
        """Returns how much of the engine's KV cache is in use, as `WorkerCounts.kv_cache`."""
        self._was_stalled = False
        """Whether the last heartbeat said so."""
        self._replays: deque[tuple[int, int]] = deque()
        self._next_sequence = 1
        self._sent_bytes = 0
        self._granted_sequence = 0
        self._granted_bytes = 0
        self._owners: dict[int, int] = {}
        self._later_turns: dict[int, Admitted] = {}
        """The facts of a turn for each of its requests that is not a client's first turn."""
        self._taken: dict[int, _Taken] = {}
        """The requests that came last, the oldest first."""
        self._count = self._named = 0
        """How many requests it has taken, and how many of them came before its last hello, which names them."""
        self._unnamed = range(0)
        """The numbers of those that came after the hello that was answered last: they may be sent again."""
        self.requests: set[int] = set()
        """The ids of the requests that the worker has, those too that the engine has not admitted yet."""
        self.given_up: set[int] = set()
        """Those that it has abandoned with their processor, until the engine has ended them."""
        self._held: list[ProcessorFrame] = []
        """The frames of the new processor that wait for that."""
        self._takes_no_more = False
        self.replayed = 0

    @property
    def credit(self) -> tuple[int, int]:
        """The credit that is left: items, and bytes."""
        return self._granted_sequence + 1 - self._next_sequence, self._granted_bytes - self._sent_bytes

    @property
    def outstanding(self) -> int:
        """How many items are not acknowledged yet."""
        return len(self._retention)

    def take_no_more(self) -> None:
        """Tell processors from now on that this worker takes no new requests; one that comes all the same is taken."""
        self._takes_no_more = self._is_news = True

    def add_request(self, generate: Generate) -> None:
        """Add a request to those that the worker has, with its owner."""
        self.requests.add(generate.request_id)
        self._owners[generate.request_id] = generate.owner
        if generate.first_request_id:
            turn = generate.continuation
            self._later_turns[generate.request_id] = Admitted(
                first_request_id=generate.first_request_id,
                turn=turn.turn,
                first_position=len(turn.token_ids),
                reason=turn.reason,
            )
        if len(self._owners) > 2 * len(self.requests) + _SPARE_OWNERS:
            self._owners = {key: owner for key, owner in self._owners.items() if key in self.requests}

    def set_engine_state(self, state: EngineState) -> None:
        """Learn the engine's LoRA adapters, its weights' version, and who paused it; the next hello says so."""
        del self._introduction.lora_adapters[:]
        self._introduction.lora_adapters.extend(state.lora_adapters)
        self._introduction.paused_since_unix_ms = state.paused_since_unix_ms
        self._introduction.paused_by = state.paused_by
        self._introduction.weight_version = state.weight_version

    def describe(self, admitted: Admitted) -> None:
        """Say which turn of which request was admitted, with which weights."""
        admitted.weight_version = self._introduction.weight_version
        if (turn := self._later_turns.get(admitted.request_id)) is not None:
            admitted.MergeFrom(turn)

    # What comes in.

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
                self._requested(frame, now)
            case "control":
                self.on_control(frame.control)

    def _requested(self, frame: ProcessorFrame, now: float) -> None:
        if self.given_up:
            if len(self._held) < 2 * self._introduction.max_requests:
                self._held.append(frame)
            else:  # as where `on_request` refuses one
                self._greet_again(now + self._interval)
        elif frame.HasField("abort"):
            self._on_request(frame.abort)
        # The processor sends a request again where it cannot know whether it arrived.
        elif frame.generate.request_id not in self.requests and not self._was_taken(frame.generate):
            self._take_request(frame.generate, now)

    def _was_taken(self, generate: Generate) -> bool:
        """Tell whether a request is sent again that has ended since; a key may be used again."""
        taken = self._taken.get(generate.request_id)
        return taken is not None and taken.deadline == generate.deadline_unix_ms and taken.number in self._unnamed

    def _take_request(self, generate: Generate, now: float) -> None:
        try:
            self._on_request(generate)
        except ContractError:
            self._greet_again(now + self._interval)  # the next hello does not name it, so the processor sends it again
            raise
        self.add_request(generate)
        self._count += 1
        self._taken[generate.request_id] = _Taken(self._count, generate.deadline_unix_ms)
        if len(self._taken) > _MOST_TAKEN:
            del self._taken[next(iter(self._taken))]

    def _welcome(self, welcome: Welcome) -> None:
        latest = 1 if self.asks_another else self._retention.next_sequence
        if welcome.resume_from > latest:
            raise ContractError("welcome.resume_from", f"at most {latest}, the next item", welcome.resume_from)
        is_another = self.asks_another
        self._welcomed(welcome)
        if is_another:
            self._begin_epoch()
        self._is_news = self._takes_no_more or self._was_stalled
        self._unnamed = range(self._named + 1, self._count + 1)
        self._replays.clear()
        self._next_sequence = welcome.resume_from
        self._sent_bytes = 0
        self._granted_sequence = welcome.credit.through_sequence
        self._granted_bytes = welcome.credit.bytes
        # What is not to be sent again may still be on its way to a client: it is retained until its ack.

    def _begin_epoch(self) -> None:
        """Give up the requests of the processor before, and drop the items that are retained for it.

        A worker that takes no requests goes on with its own, whichever processor shows them.
        """
        self._epoch += 1
        self.on_epoch(self._epoch)
        self._retention.restart()
        if self._introduction.max_requests:
            given_up, self.requests = self.requests, set()
            self.given_up |= given_up
            for key in given_up:
                with suppress(ContractError):  # without room for its abort it ends by itself
                    self._on_request(Abort(request_id=key))

    def ended(self, keys: Iterable[int], now: float) -> None:
        """Learn that the engine has ended requests."""
        keys = list(keys)
        self.requests.difference_update(keys)
        if self._later_turns:
            for key in keys:
                self._later_turns.pop(key, None)
        if not self.given_up:
            return
        self.given_up.difference_update(keys)
        if not self.given_up:
            held, self._held = self._held, []
            for frame in held:
                with suppress(ContractError):  # its processor sends it again
                    self._requested(frame, now)

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
        if len(self._replays) < _MOST_REPLAYS:  # beyond that the processor asks again
            self._replays.append((first, last))

    # What goes out.

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
        """Say hello; not while the engine is stalled for so long that the worker would be lost at once."""
        if now >= self._next_greeting:
            most = 1000 * self._timeout + self._introduction.longest_step_ms
            if self.stalled_ms(now) > most:
                self._greet_again(now + self._interval)
        return super()._greeting(now)

    def _hello(self) -> Hello:
        self._named = self._count
        hello = deepcopy(self._introduction)
        hello.first_sequence, hello.next_sequence = self._retention.first_sequence, self._retention.next_sequence
        if self.asks_another:
            hello.first_sequence = hello.next_sequence = 1
        if not (self.asks_another and hello.max_requests):
            hello.request_ids.extend(sorted(self.requests)[:_MOST_KEYS])
            hello.request_owners.extend(self._owners.get(key, 0) for key in hello.request_ids)
        hello.processors = self._processors
        if self._takes_no_more:
            hello.max_requests = 0
        return hello

    def _next_replay(self) -> list[bytes] | None:
        while self._replays:
            first, last = self._replays.popleft()
            # Skip what was acknowledged in the meantime.
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
            # The processor resumes from before what is retained: an earlier processor acknowledged those items.
            self._next_sequence = self._retention.first_sequence
            return [self._gap(sequence, self._next_sequence - 1, frozenset())]
        entry = self._retention.find(sequence)
        if entry is None:
            return None
        size = len(entry.payload) if isinstance(entry, Retained) else 0
        # Of a run of dropped items only the first needs credit: the run may be longer than any grant.
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
        return [self._encode(item=item), entry.payload]

    def _gap(self, first: int, last: int, keys: frozenset[int]) -> bytes:
        gap = Gap(
            first_sequence=first,
            last_sequence=last,
            reason=GapReason.GAP_REASON_RETENTION,
            request_ids=sorted(keys),
        )
        return self._encode(gap=gap)


def hello_of(
    settings: Settings,
    vocabulary_size: int,
    model: DescribesModel | None = None,
    *,
    takes_control: bool = False,
    continues_requests: bool = False,
) -> Hello:
    """Return a worker's hello; the session adds what it retains and which requests it has."""
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
        max_model_tokens=0 if model is None else model.max_model_tokens,
        tokenizer_digest=0 if model is None else model.tokenizer_digest,
        tokenizer_probes=getattr(model, "tokenizer_probes", ()),
        lora_adapters=() if model is None else model.lora_adapters,
        takes_control=takes_control,
        continues_requests=continues_requests,
        longest_step_ms=worker.longest_step_ms,
    )
