"""One worker's stream as it arrives: put in order, holes found and healed, or named; without sockets and a clock."""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from zlib import crc32

from tokenbus.delivery.ack_tracker import AckTracker
from tokenbus.processor.speculation import Speculation
from tokenbus.settings import ProcessorSettings
from tokenbus_contracts import ContractError, LogprobBatch, decode
from tokenbus_contracts.frames import read_frame
from tokenbus_contracts.generated.request_pb2 import RequestEvent
from tokenbus_contracts.generated.stream_pb2 import Credit, GapReason, Hello, Item, PayloadKind
from tokenbus_contracts.limits import Limits


@dataclass(slots=True)
class Arrived:
    """An item in its place: a batch, an event, or None for a kind of payload that a newer minor brought."""

    sequence: int
    contents: LogprobBatch | RequestEvent | None
    kind: PayloadKind
    payload: bytes
    last_sequence: int

    @property
    def size(self) -> int:
        """How many bytes of credit it used."""
        return len(self.payload)


@dataclass(slots=True)
class Lost:
    """A run of items that cannot be had; without ids, any request of the stream may have had rows in them."""

    sequence: int
    last_sequence: int
    reason: GapReason
    request_ids: frozenset[int]
    size: int = 0
    """How many bytes of credit they used."""


class Fate(StrEnum):
    """What became of an item when it came."""

    TAKEN = "taken"
    DUPLICATE = "duplicate"
    DIVERGENT = "divergent"
    """A duplicate whose bytes differ from the first."""
    DAMAGED = "damaged"
    """Not the bytes that were sent: it is asked for again."""
    REFUSED = "refused"
    """It breaks the contract."""
    FLOOD = "flood"
    """It came without credit."""


@dataclass(slots=True)
class StreamCounts:
    """What happened in the streams of one worker, over all of its lives; in items, where the name says nothing else."""

    taken: int = 0
    bytes: int = 0
    """Of everything that came, repeated items too."""
    duplicates: int = 0
    divergences: int = 0
    damaged: int = 0
    refused: int = 0
    replays: int = 0
    gaps: int = 0
    lost: int = 0
    steps: int = 0
    tokens: int = 0
    incomplete_steps: int = 0
    missing_drafts: int = 0
    speculation: Speculation = field(default_factory=Speculation)


class Stream:
    """The items of one (worker id, epoch)."""

    def __init__(self, hello: Hello, epoch: int, limits: Limits, settings: ProcessorSettings) -> None:
        self.hello = hello
        self.epoch = epoch
        self.worker_id = hello.worker_id
        self.name = f"{hello.worker_id}/{epoch}"
        self.expected = hello.first_sequence
        self.known_last = hello.first_sequence - 1
        self.acks = AckTracker(self.expected - 1)
        self.counts = StreamCounts()
        self._limits = limits
        self._settings = settings
        self._ahead: dict[int, Arrived | Lost] = {}
        self._checksums: OrderedDict[int, int] = OrderedDict()
        self._asked_at: float | None = None
        self._attempts = 0
        self._refused_once: set[int] = set()
        self._ahead_bytes = 0
        self.credit = Credit()
        """What the worker was granted in this connection: up to which sequence, and how many bytes since its hello.

        Both are totals, so a grant that is lost costs nothing but the time until the next.
        """
        self._used_bytes = 0
        self.refusal: ContractError | None = None
        self.wants_handshake = False
        self.produced_at_ns = 0
        """When the last step that was handed out was produced, by the worker's clock; zero: it did not say."""

    @property
    def lag(self) -> int:
        """How many items are known to have been sent and are not in order yet."""
        return max(0, self.known_last - self.expected + 1)

    @property
    def in_order_through(self) -> int:
        """The last sequence up to which nothing is missing."""
        return self.expected - 1

    @property
    def credit_left(self) -> int:
        """How many more items the worker may send, as far as is known here."""
        return max(0, self.credit.through_sequence - self.known_last)

    @property
    def is_credit_due(self) -> bool:
        """Whether the worker has used so much credit that a grant is worth a message."""
        most_items, most_bytes = self._settings.credit_items, self._settings.credit_bytes
        items = self.in_order_through + most_items - self.credit.through_sequence
        size = self._used_bytes + most_bytes - self.credit.bytes
        return items >= max(1, most_items // 4) or size >= max(1, most_bytes // 4)

    def open_connection(self) -> None:
        """Begin to count anew: the worker goes on from what is expected, in a connection of its own."""
        self._ahead.clear()
        self._ahead_bytes = 0
        self.wants_handshake = False
        self._asked_at = None
        self._attempts = 0
        self.known_last = self.in_order_through
        self.credit.Clear()
        self._used_bytes = 0
        self.grant()

    def grant(self) -> None:
        """Let the worker send as much as may be on its way."""
        self.credit.through_sequence = self.in_order_through + self._settings.credit_items
        self.credit.bytes = self._used_bytes + self._settings.credit_bytes

    # Items.

    def take(self, item: Item, payload: bytes) -> Fate:
        """Take one item; a ContractError only if the item itself contradicts its payload's length."""
        sequence = item.sequence
        if item.payload_bytes != len(payload):
            raise ContractError("item.payload_bytes", f"{len(payload)}, as it has", item.payload_bytes)
        if sequence > self.credit.through_sequence:
            return Fate.FLOOD
        self.counts.bytes += len(payload)
        checksum = crc32(payload) if item.HasField("payload_crc32") else None
        if checksum is not None and item.payload_crc32 != checksum:
            self.counts.damaged += 1
            self.known_last = max(self.known_last, sequence)
            return Fate.DAMAGED
        if sequence < self.expected or sequence in self._ahead:
            return self._duplicate(sequence, checksum)
        if self._ahead_bytes + len(payload) > self._settings.credit_bytes:
            return Fate.FLOOD
        self.known_last = max(self.known_last, sequence)
        try:
            contents = self._read(item, payload)
        except ContractError as error:
            return self._refuse(item, payload, error)
        if checksum is not None:
            self._checksums[sequence] = checksum
            if len(self._checksums) > self._settings.credit_items:
                self._checksums.popitem(last=False)
        self._put_ahead(Arrived(sequence, contents, item.payload_kind, payload, sequence))
        self.counts.taken += 1
        return Fate.TAKEN

    def _put_ahead(self, entry: Arrived | Lost) -> None:
        self._ahead[entry.sequence] = entry
        self._ahead_bytes += entry.size

    def _pop_ahead(self, sequence: int) -> Arrived | Lost | None:
        entry = self._ahead.pop(sequence, None)
        if entry is not None:
            self._ahead_bytes -= entry.size
            self._used_bytes += entry.size
        return entry

    def _read(self, item: Item, payload: bytes) -> LogprobBatch | RequestEvent | None:
        match item.payload_kind:
            case PayloadKind.PAYLOAD_KIND_LOGPROB_BATCH:
                batch = decode(payload, self._limits)
                header = batch.header
                found = (header.worker_id, header.epoch, header.sequence)
                if found != (self.worker_id, self.epoch, item.sequence):
                    limit = f"{self.name} sequence {item.sequence}, as its item"
                    raise ContractError("header", limit, f"{found[0]}/{found[1]} sequence {found[2]}")
                if header.selection:
                    raise ContractError("header.selection", "False in a worker's stream", True)  # noqa: FBT003
                return batch
            case PayloadKind.PAYLOAD_KIND_REQUEST_EVENT:
                event = read_frame(RequestEvent, payload)
                if event.sequence != item.sequence:
                    raise ContractError("event.sequence", f"{item.sequence}, as its item", event.sequence)
                return event
            case _:
                return None

    def _duplicate(self, sequence: int, checksum: int | None) -> Fate:
        if checksum is None or self._checksums.get(sequence, checksum) == checksum:
            self.counts.duplicates += 1
            return Fate.DUPLICATE
        self.counts.divergences += 1
        return Fate.DIVERGENT

    def _refuse(self, item: Item, payload: bytes, error: ContractError) -> Fate:
        self.counts.refused += 1
        self.refusal = error
        sequence = item.sequence
        # Without a checksum it may have been damaged on the way: one more try shows.
        if item.HasField("payload_crc32") or sequence in self._refused_once:
            ids = _ids_in(item, payload, self._limits)
            self._put_ahead(Lost(sequence, sequence, GapReason.GAP_REASON_REFUSED, ids, len(payload)))
        else:
            self._refused_once.add(sequence)
        return Fate.REFUSED

    def declare_lost(self, first: int, last: int, reason: GapReason, ids: frozenset[int]) -> None:
        """Take the worker's word that some items cannot be had."""
        if last < self.expected:
            return
        first = max(first, self.expected)
        while isinstance(self._ahead.get(first), Arrived):  # what came after all is not lost
            first += 1
        if first > last:
            return
        self.known_last = max(self.known_last, last)
        self._pop_ahead(first)  # it was refused here before; its bytes cost credit all the same
        self._put_ahead(Lost(first, last, reason, ids))

    def in_order(self, may_come: Callable[[Arrived | Lost], bool]) -> deque[Arrived | Lost]:
        """Return what is next in order, and all that follows it, up to a hole or one that may not come yet."""
        ready: deque[Arrived | Lost] = deque()
        while (entry := self._ahead.get(self.expected)) is not None and may_come(entry):
            self._pop_ahead(self.expected)
            self.expected = entry.last_sequence + 1
            if isinstance(entry, Lost):
                self.counts.gaps += 1
                self.counts.lost += entry.last_sequence - entry.sequence + 1
                for covered in [each for each in self._ahead if each < self.expected]:
                    self._pop_ahead(covered)  # they cost credit all the same
            self._refused_once.discard(entry.sequence)
            ready.append(entry)
        if ready:
            self._asked_at = None
            self._attempts = 0
        return ready

    # Holes.

    def heard_of(self, last_sequence: int) -> None:
        """Take the worker's word that it sent everything up to a sequence."""
        self.known_last = max(self.known_last, min(last_sequence, self.credit.through_sequence))

    def missing(self, now: float) -> tuple[int, int] | None:
        """Return the range to ask for just now, if any; after the last attempt it is declared lost instead."""
        if self.known_last < self.expected or self.expected in self._ahead:
            return None
        if self._asked_at is not None and now - self._asked_at < self._settings.replay_timeout_ms / 1000:
            return None
        last = min(self._ahead, default=self.known_last + 1) - 1
        if self._attempts >= self._settings.replay_attempts:
            self.declare_lost(self.expected, last, GapReason.GAP_REASON_RETENTION, frozenset())
            # How much credit they took, only the worker knows: begin to count anew, together.
            self.wants_handshake = True
            return None
        self._asked_at = now
        self._attempts += 1
        self.counts.replays += 1
        return self.expected, last


def _ids_in(item: Item, payload: bytes, limits: Limits) -> frozenset[int]:
    """Return the requests that a refused payload names; none, if that cannot be said."""
    from tokenbus_contracts.codec import parse  # noqa: PLC0415 - what is refused is rare

    try:
        if item.payload_kind == PayloadKind.PAYLOAD_KIND_LOGPROB_BATCH:
            batch = parse(payload, limits)
            if batch.has_consistent_lengths() and batch.header.step_rows == batch.row_count:
                return frozenset(batch.request_ids.tolist())
    except ContractError:
        pass
    return frozenset()
