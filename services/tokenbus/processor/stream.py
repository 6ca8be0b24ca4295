"""Stream: restores the order of a worker's items, and finds missing items, without sockets and clocks."""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from zlib import crc32

from tokenbus.delivery.ack_tracker import AckTracker
from tokenbus.processor.speculation import Speculation
from tokenbus.settings import ProcessorSettings
from tokenbus_contracts import ContractError, LogprobBatch, decode
from tokenbus_contracts.codec import parse
from tokenbus_contracts.frames import read_frame
from tokenbus_contracts.generated.request_pb2 import RequestEvent
from tokenbus_contracts.generated.stream_pb2 import Credit, GapReason, Hello, Item, PayloadKind
from tokenbus_contracts.limits import Limits


@dataclass(slots=True)
class ReceivedItem:
    """One item as it was received."""

    sequence: int
    contents: LogprobBatch | RequestEvent | None
    """Decoded payload, or None if the payload kind belongs to a newer minor version."""
    kind: PayloadKind
    payload: bytes
    last_sequence: int

    @property
    def size(self) -> int:
        return len(self.payload)


@dataclass(slots=True)
class LostItems:
    """A range of lost items; without request ids, any request of the stream may have lost rows."""

    sequence: int
    last_sequence: int
    reason: GapReason
    request_ids: frozenset[int]
    size: int = 0
    """Bytes of credit that the lost items used."""


class ItemOutcome(StrEnum):
    """Outcome of receiving an item."""

    TAKEN = "taken"
    DUPLICATE = "duplicate"
    DIVERGENT = "divergent"
    """An earlier item with the same sequence had other bytes."""
    DAMAGED = "damaged"
    """The checksum is wrong, and the worker is asked for the item again."""
    REFUSED = "refused"
    """The item violates the contract."""
    FLOOD = "flood"
    """The item exceeds the credit."""


@dataclass(slots=True)
class StreamCounts:
    """Counts for all streams of one worker; counts whose names contain no unit are numbers of items."""

    taken: int = 0
    bytes: int = 0
    """Payload bytes, including the bytes of repeated items."""
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
    """The items of one worker incarnation, which is identified by worker id and epoch."""

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
        self._ahead: dict[int, ReceivedItem | LostItems] = {}
        self._checksums: OrderedDict[int, int] = OrderedDict()
        self._asked_at: float | None = None
        self._attempts = 0
        self._refused_once: set[int] = set()
        self._ahead_bytes = 0
        self.credit = Credit()
        """Credit of this connection: the last sequence that may be sent, and the total bytes since the hello.

        Both values are totals, so the next credit message replaces a lost one.
        """
        self._used_bytes = 0
        self.refusal: ContractError | None = None
        self.wants_handshake = False
        self.produced_at_ns = 0
        """Time when the last delivered step was produced, by the worker's clock, or zero if unknown."""

    @property
    def lag(self) -> int:
        """Number of items that were sent but are not yet in order."""
        return max(0, self.known_last - self.expected + 1)

    @property
    def in_order_through(self) -> int:
        """Last sequence up to which no item is missing."""
        return self.expected - 1

    @property
    def credit_left(self) -> int:
        return max(0, self.credit.through_sequence - self.known_last)

    @property
    def is_credit_due(self) -> bool:
        """Whether the used credit is large enough to be worth a credit message."""
        most_items, most_bytes = self._settings.credit_items, self._settings.credit_bytes
        items = self.in_order_through + most_items - self.credit.through_sequence
        size = self._used_bytes + most_bytes - self.credit.bytes
        return items >= max(1, most_items // 4) or size >= max(1, most_bytes // 4)

    def open_connection(self) -> None:
        """Begin a connection, in which the worker continues at the expected sequence with full credit."""
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
        self.credit.through_sequence = self.in_order_through + self._settings.credit_items
        self.credit.bytes = self._used_bytes + self._settings.credit_bytes

    def receive(self, item: Item, payload: bytes) -> ItemOutcome:
        """Receive one item; raises ContractError if the item states another length than its payload has."""
        sequence = item.sequence
        if item.payload_bytes != len(payload):
            raise ContractError("item.payload_bytes", f"{len(payload)}, its size", item.payload_bytes)
        if sequence > self.credit.through_sequence:
            return ItemOutcome.FLOOD
        self.counts.bytes += len(payload)
        checksum = crc32(payload) if item.HasField("payload_crc32") else None
        if checksum is not None and item.payload_crc32 != checksum:
            self.counts.damaged += 1
            self.known_last = max(self.known_last, sequence)
            return ItemOutcome.DAMAGED
        if sequence < self.expected or sequence in self._ahead:
            return self._duplicate(sequence, checksum)
        if self._ahead_bytes + len(payload) > self._settings.credit_bytes:
            return ItemOutcome.FLOOD
        self.known_last = max(self.known_last, sequence)
        try:
            contents = self._read(item, payload)
        except ContractError as error:
            return self._refuse(item, payload, error)
        if checksum is not None:
            self._checksums[sequence] = checksum
            if len(self._checksums) > self._settings.credit_items:
                self._checksums.popitem(last=False)
        self._put_ahead(ReceivedItem(sequence, contents, item.payload_kind, payload, sequence))
        self.counts.taken += 1
        return ItemOutcome.TAKEN

    def _put_ahead(self, entry: ReceivedItem | LostItems) -> None:
        self._ahead[entry.sequence] = entry
        self._ahead_bytes += entry.size

    def _pop_ahead(self, sequence: int) -> ReceivedItem | LostItems | None:
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

    def _duplicate(self, sequence: int, checksum: int | None) -> ItemOutcome:
        if checksum is None or self._checksums.get(sequence, checksum) == checksum:
            self.counts.duplicates += 1
            return ItemOutcome.DUPLICATE
        self.counts.divergences += 1
        return ItemOutcome.DIVERGENT

    def _refuse(self, item: Item, payload: bytes, error: ContractError) -> ItemOutcome:
        self.counts.refused += 1
        self.refusal = error
        sequence = item.sequence
        # An item without a checksum may be damaged, so the worker is asked for it once more.
        if item.HasField("payload_crc32") or sequence in self._refused_once:
            ids = _ids_in(item, payload, self._limits)
            self._put_ahead(LostItems(sequence, sequence, GapReason.GAP_REASON_REFUSED, ids, len(payload)))
        else:
            self._refused_once.add(sequence)
        return ItemOutcome.REFUSED

    def declare_lost(self, first: int, last: int, reason: GapReason, ids: frozenset[int]) -> None:
        """Mark a range of items as lost, except for the items that have arrived."""
        if last < self.expected:
            return
        first = max(first, self.expected)
        while isinstance(self._ahead.get(first), ReceivedItem):  # this item has arrived after all
            first += 1
        if first > last:
            return
        self.known_last = max(self.known_last, last)
        self._pop_ahead(first)  # a refused item at this position has used credit
        self._put_ahead(LostItems(first, last, reason, ids))

    def in_order(self, may_come: Callable[[ReceivedItem | LostItems], bool]) -> deque[ReceivedItem | LostItems]:
        """Return the next items in order, up to a missing item or an item that must wait."""
        ready: deque[ReceivedItem | LostItems] = deque()
        while (entry := self._ahead.get(self.expected)) is not None and may_come(entry):
            self._pop_ahead(self.expected)
            self.expected = entry.last_sequence + 1
            if isinstance(entry, LostItems):
                self.counts.gaps += 1
                self.counts.lost += entry.last_sequence - entry.sequence + 1
                for covered in [each for each in self._ahead if each < self.expected]:
                    self._pop_ahead(covered)  # the covered items have used credit
            self._refused_once.discard(entry.sequence)
            ready.append(entry)
        if ready:
            self._asked_at = None
            self._attempts = 0
        return ready

    def heard_of(self, last_sequence: int) -> None:
        self.known_last = max(self.known_last, min(last_sequence, self.credit.through_sequence))

    def missing(self, now: float) -> tuple[int, int] | None:
        """Return the range of missing items to request now, or None if nothing is due.

        After the last attempt, the range is declared lost.
        """
        if self.known_last < self.expected or self.expected in self._ahead:
            return None
        if self._asked_at is not None and now - self._asked_at < self._settings.replay_timeout_ms / 1000:
            return None
        last = min(self._ahead, default=self.known_last + 1) - 1
        if self._attempts >= self._settings.replay_attempts:
            self.declare_lost(self.expected, last, GapReason.GAP_REASON_RETENTION, frozenset())
            # Only the worker knows how much credit the lost items used, so a new handshake resets the credit.
            self.wants_handshake = True
            return None
        self._asked_at = now
        self._attempts += 1
        self.counts.replays += 1
        return self.expected, last


def _ids_in(item: Item, payload: bytes, limits: Limits) -> frozenset[int]:
    """Return the request ids in a refused payload, or an empty set if the payload cannot be parsed."""
    try:
        if item.payload_kind == PayloadKind.PAYLOAD_KIND_LOGPROB_BATCH:
            batch = parse(payload, limits)
            if batch.has_consistent_lengths() and batch.header.step_rows == batch.row_count:
                return frozenset(batch.request_ids.tolist())
    except ContractError:
        pass
    return frozenset()
