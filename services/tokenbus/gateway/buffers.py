"""What waits in the gateway, bounded in bytes: a client's outbox, the sum of all, and steps not handed out yet."""

import asyncio
import ctypes
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from sys import getsizeof
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from tokenbus.client import RequestEnd, StepRows
from tokenbus.gateway.fairness import AdmissionLimiter
from tokenbus.gateway.rendered_step import RenderedStep, WaitingRow, size_of
from tokenbus_contracts import LogprobBatch

if TYPE_CHECKING:
    from tokenbus.gateway.answer import Answer
    from tokenbus.gateway.connection import ChunkWriter

Write = Callable[..., bool]
"""Writes a chunk to a socket at once, given when its rows were published; returns whether the socket had room."""
_CHUNK_BYTES, _BUFFER_BYTES = 65_536, 8192
"""Sizes of a chunk that is sent, and of a buffer that collects rows: growing copies a buffer."""
_ALL = 2**31
_FREED_SHARE = 8
"""An eighth of the bound is freed at once, so that not every byte that comes evicts an answer."""
COLLECTED_BYTES = 256
"""Memory of the objects around collected bytes."""
_TIME_BYTES = 8
_MOST_PARTS = 32
"""A chunk joins this many parts: small objects would keep the freed memory around them from the system."""
_LEAST_ROWS, _FEW_SHARE = 16, 4
"""Of steps from so many rows on the others are freed when fewer than a quarter wait."""
_LEAST_FREED = 16 * 2**20
"""From so many freed bytes on they are given back to the system."""
_NOTHING: Mapping["Answer", int] = MappingProxyType({})


class Buffers:
    """The bytes that all answers hold together; above the bound the answers that hold the most are evicted."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.size = 0
        self.reserved = 0
        """How much of the size is for what is still to come."""
        self.evicted = 0
        self.turns = AdmissionLimiter(1)
        """Turns to write a part of a large answer: one in each turn of the event loop, so that streams go on."""
        self._highest = 0
        """The largest size since freed bytes were given back to the system."""
        self._holders: dict[Answer, None] = {}
        self._is_evicting = False

    def join(self, holder: "Answer") -> None:
        """Add an answer to those that may be evicted."""
        self._holders[holder] = None

    def leave(self, holder: "Answer") -> None:
        """Remove an answer, which has freed what it held, or is about to."""
        self._holders.pop(holder, None)

    def grow(self, count: int) -> None:
        """Add to the size (or subtract, if negative), and evict answers above the bound."""
        if count < 0:
            self._highest = max(self._highest, self.size)
        self.size += count
        if self.size > self.most:
            sizes = {each: each.outbox.size for each in self._holders}
            self._evict(sizes, self.size - self.most + self.most // _FREED_SHARE, 1, _ALL)

    def trim(self, beside: int) -> None:
        """Give freed bytes back to the system, if they are many: the C library would keep them for later.

        `beside` is how many bytes are held elsewhere now.
        """
        size = self.size + beside
        self._highest = max(self._highest, size)
        if self._highest - size >= _LEAST_FREED:
            self._highest = size
            _give_back()

    def evict(self, wanted: int, *, beside: Mapping["Answer", int] = _NOTHING) -> None:
        """Evict the largest answers until `wanted` bytes are freed.

        An answer's size includes what its socket holds, and what `beside` says is held for it elsewhere.
        """
        sizes = {each: each.outbox.size + each.outbox.unsent() + beside.get(each, 0) for each in self._holders}
        self._evict(sizes, wanted, 1, _ALL)

    def evict_unread(self, least: int) -> None:
        """Evict the answer of which its client leaves the most unread while more is written, from `least` bytes on."""
        self._evict({each: each.outbox.unread for each in self._holders}, least, least, 1)

    def _evict(self, sizes: dict["Answer", int], wanted: int, at_least: int, most: int) -> None:
        if self._is_evicting:  # an answer that ends frees bytes, which comes here again
            return
        self._is_evicting = True
        # Of those with the same size the newest first: what went well before they came goes on.
        newest_first = list(reversed(sizes.items()))
        try:
            for holder, size in sorted(newest_first, key=lambda pair: pair[1], reverse=True)[:most]:
                if wanted <= 0 or size < at_least:
                    break
                wanted -= size
                self.evicted += 1
                # Its socket may stay full: the next time another one is to end, and this one counts once.
                self.leave(holder)
                holder.evict(size)
        finally:
            self._is_evicting = False


class Collected:
    """Bytes that are collected in buffers whose capacity is counted: nothing is kept of the objects that were added."""

    __slots__ = ("_buffers", "_counted", "last", "separator")

    def __init__(self, separator: bytes = b",") -> None:
        self.separator = separator
        self.last = bytearray()
        """The last buffer."""
        self._buffers = [self.last]
        self._counted = 0
        """Memory of the last buffer when it was counted."""

    def __bool__(self) -> bool:
        return bool(self._buffers[0])

    @property
    def length(self) -> int:
        """How many bytes were collected."""
        return sum(map(len, self._buffers))

    def grown(self) -> int:
        """Count the last buffer, and begin another one if it is full; return the growth of memory, in bytes."""
        last = self.last
        grown, self._counted = getsizeof(last) - self._counted, getsizeof(last)
        if len(last) >= _BUFFER_BYTES:
            # The new buffer takes the last byte: `collect` writes a separator into a buffer that is not empty.
            self.last, self._counted = last[-1:], 0
            self._buffers.append(self.last)
            del last[-1:]
        return grown

    def begin_with(self, other: "Collected") -> None:
        """Take what another one has, to stand before what is here."""
        before = list(other.taken())
        if before and self:
            before[-1] += self.separator
        self._buffers = before + self._buffers

    def taken(self) -> Iterator[bytearray]:
        """Yield the buffers that are not empty; each is kept here no longer, and nothing may be added."""
        buffers, self._buffers = self._buffers[::-1], [bytearray()]
        while buffers:
            if buffer := buffers.pop():
                yield buffer


def collect(lists: Iterable[Collected], pieces: Iterable[bytes | memoryview]) -> int:
    """Copy one piece to each list, behind a separator; return the number of bytes."""
    size = 0
    for list_, data in zip(lists, pieces, strict=False):
        if data:
            last = list_.last
            if last:
                last += list_.separator
            last += data
            size += len(data)
    return size


class Sending(NamedTuple):
    """What is to be sent at once."""

    data: bytes
    produced_at_ns: list[int]
    is_last: bool


class _Chunk:
    """Waiting bytes, and the times when their rows were published."""

    __slots__ = ("length", "parts", "produced_at_ns", "size")

    def __init__(self) -> None:
        self.parts: list[bytes | bytearray] = []
        self.produced_at_ns: list[int] = []
        self.length = self.size = 0
        """The number of bytes in the parts, and the memory of the parts."""


class Outbox:
    """What waits for one client's socket: filled as rows come, emptied by one task as the client reads.

    Once that task has set `write`, chunks go to the socket directly, and wait here only while it is full: waking a task
    for each row costs as much as writing it.
    """

    def __init__(self, most: int, on_full: Callable[[], None], buffers: Buffers) -> None:
        self._most = most
        self._on_full = on_full
        self._buffers = buffers
        self._parts: deque[Iterator[bytes]] = deque()
        """Parts to send before the chunks."""
        self._chunks: deque[_Chunk] = deque()
        self._gathered: list[tuple[bytes, int]] | None = None
        """Chunks that go to the socket together; None: each goes alone."""
        self._is_full = False
        self._reserved = 0
        self._waiter: asyncio.Future[None] | None = None
        self.is_closed = False
        self.write: Write | None = None
        self.direct: ChunkWriter | None = None
        """The connection, where chunks are written as they are."""
        self.unsent: Callable[[], int] = lambda: 0
        """Returns how many bytes the socket holds that its client has not read."""
        self.is_sent = False
        """Whether the last chunk was given to the socket."""
        self.is_broken = False
        """Whether something was dropped without which the rest is useless."""
        self.size = 0
        """What waits here and what its answer holds, in bytes of memory."""

    @property
    def length(self) -> int:
        """How many bytes wait to be sent."""
        return sum(chunk.length for chunk in self._chunks)

    @property
    def has_parts(self) -> bool:
        """Whether what is sent next is made then, which may take some milliseconds."""
        return bool(self._parts)

    @property
    def unread(self) -> int:
        """How many bytes its client could have read, while more is to come; an answer that is not whole has none."""
        if self.is_closed:
            return 0
        return self.unsent() + (self.size if self._chunks else 0)

    def put(self, chunk: bytes, produced_at_ns: int = 0) -> None:
        """Add a row's chunk; ignored after `close`."""
        if self.is_closed:
            return
        # While the task sends what waited before, it has no waiter: what comes then must wait behind.
        may_pass = self.write is not None and self._waiter is not None and not (self._chunks or self._parts)
        if may_pass and self._gathered is not None:
            self._gathered.append((chunk, produced_at_ns))
            return
        if may_pass and self.write is not None and self.write(chunk, produced_at_ns):
            return
        self._queue(chunk, produced_at_ns)

    def descriptor(self) -> int:
        """Return the file descriptor that the next chunk may be written to without coming here; below zero: none."""
        is_idle = self._waiter is not None and not (self._chunks or self._parts or self.is_closed)
        return self.direct.descriptor() if self.direct is not None and is_idle else -1

    def put_parts(self, parts: Iterator[bytes]) -> None:
        """Add parts that are made one by one as the client reads, before the chunks that wait."""
        if not self.is_closed:
            self._parts.append(parts)
            self._wake()

    def gather(self) -> None:
        """Write what is put from now on at once, when `flush` is called, which no await may precede."""
        self._gathered = []

    def flush(self) -> None:
        """Write what was gathered."""
        gathered, self._gathered = self._gathered, None
        if not gathered:
            return
        data = b"".join([chunk for chunk, _ in gathered])
        if self.write is None or not self.write(data, *(at for _, at in gathered)):
            for chunk, produced_at_ns in gathered:
                self._queue(chunk, produced_at_ns)

    def _queue(self, data: bytes, produced_at_ns: int) -> None:
        held = self.append(data)
        if produced_at_ns and held:
            self._chunks[-1].produced_at_ns.append(produced_at_ns)
            held += _TIME_BYTES
        self._wake()
        self.hold(held)

    def append(self, part: bytes | bytearray) -> int:
        """Add a part of an answer behind the waiting ones; return the growth of memory, which the caller counts."""
        size = len(part)
        if not size:
            return 0
        if size > _CHUNK_BYTES:  # a whole answer is freed as it is sent
            return sum(self.append(part[at : at + _CHUNK_BYTES]) for at in range(0, size, _CHUNK_BYTES))
        if not self._chunks or self._chunks[-1].length + size > _CHUNK_BYTES:
            self._chunks.append(_Chunk())
        chunk, held = self._chunks[-1], getsizeof(part)
        chunk.parts.append(part)
        if len(chunk.parts) == _MOST_PARTS:
            chunk.parts = [bytearray().join(chunk.parts)]
            held = getsizeof(chunk.parts[0]) - chunk.size
        chunk.length += size
        chunk.size += held
        return held

    def settle(self) -> None:
        """Count what waits, and nothing else."""
        self._free_reserved()
        self.hold(sum(chunk.size for chunk in self._chunks) - self.size)

    def hold(self, count: int) -> None:
        """Add to the size (or subtract, if negative): bytes that wait here, or in an answer that is not whole yet."""
        self.size += count
        self._buffers.grow(count)
        if self.size > self._most and not self._is_full:
            self._is_full = True
            self._on_full()

    def keep(self, count: int) -> None:
        """Count what the answer keeps to send it again at its end; neither makes the outbox full."""
        self._most += 2 * count
        self.hold(count)

    def reserve(self, count: int) -> None:
        """Count what is still to come, until the answer is written or dropped; it does not make the outbox full."""
        self._reserved += count
        self._buffers.reserved += count
        self._most += count
        self.hold(count)

    def drop(self) -> None:
        """Throw away what waits."""
        self._free_reserved()
        self._parts.clear()
        self._chunks.clear()
        if self._gathered is not None:
            self._gathered.clear()
        self.hold(-self.size)

    def _free_reserved(self) -> None:
        if not self._reserved:
            return
        reserved, self._reserved = self._reserved, 0
        self._buffers.reserved -= reserved
        self._most -= reserved
        self.hold(-reserved)

    def close(self) -> None:
        """Add nothing more; what waits is still sent."""
        self.is_closed = True
        self._wake()

    async def ready(self) -> None:
        """Wait for a chunk, or for the end."""
        while not (self._chunks or self._parts or self.is_closed):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def take(self, most: int = _CHUNK_BYTES) -> Sending:
        """Remove and return a part, or about `most` bytes of chunks; what stays can still be dropped."""
        while self._parts:
            part = next(self._parts[0], b"")
            if part:
                return Sending(part, [], is_last=False)
            self._parts.popleft()
        taken: list[bytes | bytearray] = []
        times: list[int] = []
        size = held = 0
        while self._chunks and (not taken or size + self._chunks[0].length <= most):
            chunk = self._chunks.popleft()
            taken += chunk.parts
            times += chunk.produced_at_ns
            size += chunk.length
            held += chunk.size + _TIME_BYTES * len(chunk.produced_at_ns)
        self.hold(-held)
        return Sending(b"".join(taken), times, self.is_closed and not self._chunks)

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class _Entry(NamedTuple):
    output: StepRows | RequestEnd
    size: int


class Backlog:
    """Steps and ends that came from the bus and were not handed out yet; first in, first out.

    Rows that were taken from here and wait for a turn count, too, with all of their step. From `compacted_bytes` on,
    rows of a step that do not wait are freed: below that it costs more than it frees.
    """

    def __init__(self, compacted_bytes: int = 0) -> None:
        self._compacted_bytes = compacted_bytes
        self._entries: deque[_Entry] = deque()
        self.size = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def begins_with_error(self) -> bool:
        """Whether what has waited the longest is a request's error."""
        output = self._entries[0].output
        return isinstance(output, RequestEnd) and output.error is not None

    def append(self, output: StepRows | RequestEnd) -> None:
        """Add a step's rows, or a request's end."""
        batches = () if isinstance(output, RequestEnd) else output
        size = sum(map(size_of, filter(None, batches)))
        self._entries.append(_Entry(output, size))
        self.size += size

    def popleft(self) -> StepRows | RequestEnd:
        """Return what has waited the longest."""
        output, size = self._entries.popleft()
        self.size -= size
        return output

    def hold(self, row: WaitingRow) -> None:
        """Count a row that waits: while one does, all of its step takes memory."""
        if not row.step.waiting:
            self.size += row.step.size
        row.step.waiting[row] = None

    def free(self, row: WaitingRow) -> None:
        """Count a row that waits no more."""
        del row.step.waiting[row]
        if not row.step.waiting:
            self.size -= row.step.size
        else:
            self.fit(row.step)

    def fit(self, step: RenderedStep) -> None:
        """Free the rows of a step of which few wait: else one answer that is behind would hold those of all others."""
        rows = step.batch.row_count
        if self.size <= self._compacted_bytes:
            return
        if step.waiting and rows >= _LEAST_ROWS and len(step.waiting) * _FEW_SHARE < rows:
            self.size += step.compacted().size - step.size

    def weights(self) -> Counter[int]:
        """Return how many bytes wait for each request, without rows that were taken."""
        weights: Counter[int] = Counter()
        steps = (output for output, _ in self._entries if isinstance(output, StepRows))
        for batch in (batch for step in steps for batch in step if batch is not None):
            weights.update(dict(zip(batch.request_ids.tolist(), batch.row_bytes().tolist(), strict=True)))
        return weights

    def keep(self, wanted: Container[int]) -> None:
        """Free the rows of requests that are not wanted any more."""
        entries, self._entries = self._entries, deque()
        self.size -= sum(entry.size for entry in entries)
        for output, _ in entries:
            if isinstance(output, RequestEnd):
                self.append(output)
                continue
            target, draft = output
            kept = selected(target, wanted)
            if kept is not None:
                self.append(StepRows(kept, None if draft is None else selected(draft, wanted)))


def selected(batch: LogprobBatch, wanted: Container[int]) -> LogprobBatch | None:
    """Return a batch of the rows of the wanted request ids, or None if there is none."""
    places = [place for place, key in enumerate(batch.request_ids.tolist()) if key in wanted]
    if len(places) == batch.row_count:
        return batch
    return batch.select(places) if places else None


def _give_back() -> None:
    """Give memory that is free back to the system, if the C library is glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
