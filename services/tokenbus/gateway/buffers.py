"""SendQueue: bytes that wait for one client. Buffers: the sum of all. Backlog: received steps. All are bounded."""

import asyncio
import ctypes
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from sys import getsizeof
from typing import TYPE_CHECKING, NamedTuple

from tokenbus.client import RequestEnd, StepRows
from tokenbus.gateway.fairness import AdmissionLimiter
from tokenbus.gateway.rendered_step import RenderedStep, WaitingRow, size_of
from tokenbus_contracts import LogprobBatch

if TYPE_CHECKING:
    from tokenbus.gateway.answer import Answer
    from tokenbus.gateway.connection import ChunkWriter

Write = Callable[..., bool]
"""Writes a chunk to a socket, with the publication times of its rows; returns whether the socket had room."""
_CHUNK_BYTES, _BUFFER_BYTES = 65_536, 8192
"""The size of a chunk to send, and of a buffer that collects rows (a growing buffer would be copied)."""
_ALL = 2**31
_FREED_SHARE = 8
"""An eighth of the bound is freed at a time; otherwise each further byte would evict an answer."""
COLLECTED_BYTES = 256
_TIME_BYTES = 8
_MOST_PARTS = 32
"""The number of parts joined into one object: many small objects would keep the memory around them in use."""
_LEAST_ROWS, _FEW_SHARE = 16, 4
"""If a step has at least 16 rows and fewer than a quarter of them wait, the other rows are freed."""
_LEAST_FREED = 16 * 2**20


class Buffers:
    """The bytes of all answers together; above the bound the largest answers are evicted."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.size = 0
        self.reserved = 0
        self.evicted = 0
        self.turns = AdmissionLimiter(1)
        """Turns to write a part of a large answer; one turn per tick of the event loop, so that streams go on."""
        self._highest = 0
        """The largest size since freed bytes were last returned to the system."""
        self._holders: dict[Answer, None] = {}
        self._is_evicting = False

    def join(self, holder: "Answer") -> None:
        self._holders[holder] = None

    def leave(self, holder: "Answer") -> None:
        self._holders.pop(holder, None)

    def grow(self, count: int) -> None:
        """Add to the size (or subtract, if negative), and evict answers above the bound."""
        if count < 0:
            self._highest = max(self._highest, self.size)
        self.size += count
        if self.size > self.most:
            sizes = {each: each.queue.size for each in self._holders}
            self._evict(sizes, self.size - self.most + self.most // _FREED_SHARE, 1, _ALL)

    def trim(self, beside: int) -> None:
        """Return freed bytes to the system if there are many; the C library would keep them.

        `beside` is the number of bytes held elsewhere.
        """
        size = self.size + beside
        self._highest = max(self._highest, size)
        if self._highest - size >= _LEAST_FREED:
            self._highest = size
            malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
            if malloc_trim is not None:  # the C library is glibc
                malloc_trim(0)

    def evict(self, wanted: int, beside: Mapping["Answer", int]) -> None:
        """Evict the largest answers until `wanted` bytes are freed.

        An answer's size includes the unread bytes of its socket, and the bytes held elsewhere, `beside`.
        """
        sizes = {each: each.queue.size + each.queue.unsent() + beside.get(each, 0) for each in self._holders}
        self._evict(sizes, wanted, 1, _ALL)

    def evict_unread(self, least: int) -> None:
        """Evict the unfinished answer with the most unread bytes, if it has at least `least` of them."""
        self._evict({each: each.queue.unread for each in self._holders}, least, least, 1)

    def _evict(self, sizes: dict["Answer", int], wanted: int, at_least: int, most: int) -> None:
        if self._is_evicting:  # an answer that ends frees bytes, which calls this again
            return
        self._is_evicting = True
        # Among answers of the same size the newest one is evicted first: without it, the older ones had room.
        newest_first = list(reversed(sizes.items()))
        try:
            for holder, size in sorted(newest_first, key=lambda pair: pair[1], reverse=True)[:most]:
                if wanted <= 0 or size < at_least:
                    break
                wanted -= size
                self.evicted += 1
                # Its socket may stay full, so the next eviction must choose another answer.
                self.leave(holder)
                holder.evict(size)
        finally:
            self._is_evicting = False


class Collected:
    """Collected bytes, in buffers whose capacity is counted; they are copies of the added objects."""

    __slots__ = ("_buffers", "_counted", "last", "separator")

    def __init__(self, separator: bytes = b",") -> None:
        self.separator = separator
        self.last = bytearray()
        self._buffers = [self.last]
        self._counted = 0

    def __bool__(self) -> bool:
        return bool(self._buffers[0])

    @property
    def length(self) -> int:
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
        """Move the bytes of another object in front of these."""
        before = list(other.taken())
        if before and self:
            before[-1] += self.separator
        self._buffers = before + self._buffers

    def taken(self) -> Iterator[bytearray]:
        """Yield the filled buffers, and remove each before it is yielded; nothing may be added afterwards."""
        buffers, self._buffers = self._buffers[::-1], [bytearray()]
        while buffers:
            if buffer := buffers.pop():
                yield buffer


def collect(lists: Iterable[Collected], pieces: Iterable[bytes | memoryview]) -> int:
    """Copy one piece to each list, after a separator; return the number of bytes."""
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
    """Bytes to send, and the publication times of their rows."""

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


class SendQueue:
    """Bytes that wait for one client's socket.

    They are added as rows arrive, and one task removes them as the client reads.

    Once that task has set `write`, chunks go to the socket directly, and wait here only while it is full: waking a
    task for each row costs as much as writing it.
    """

    def __init__(self, most: int, on_full: Callable[[], None], buffers: Buffers) -> None:
        self._most = most
        self._on_full = on_full
        self._buffers = buffers
        self._parts: deque[Iterator[bytes]] = deque()
        self._chunks: deque[_Chunk] = deque()
        self._gathered: list[tuple[bytes, int]] | None = None
        """The chunks to be written together; None: each chunk is written by itself."""
        self._is_full = False
        self._reserved = 0
        self._waiter: asyncio.Future[None] | None = None
        self.is_closed = False
        self.write: Write | None = None
        self.direct: ChunkWriter | None = None
        """The connection, if chunks are written to it uncompressed."""
        self.unsent: Callable[[], int] = lambda: 0
        """Returns the number of bytes in the socket that its client has not read."""
        self.is_sent = False
        self.is_broken = False
        """Whether bytes were dropped, so that the rest is useless."""
        self.size = 0
        """Memory of the waiting bytes and of the collected answer."""

    @property
    def length(self) -> int:
        return sum(chunk.length for chunk in self._chunks)

    @property
    def has_parts(self) -> bool:
        """Whether the next bytes are made only when they are sent, which may take some milliseconds."""
        return bool(self._parts)

    @property
    def unread(self) -> int:
        """Number of bytes that its client could have read; 0 for a whole answer, or if nothing more will follow."""
        if self.is_closed:
            return 0
        return self.unsent() + (self.size if self._chunks else 0)

    def put(self, chunk: bytes, produced_at_ns: int = 0) -> None:
        """Add a row's chunk; ignored after `close`."""
        if self.is_closed:
            return
        # While the task sends earlier chunks, it does not wait for new ones, so new chunks must wait behind them.
        may_pass = self.write is not None and self._waiter is not None and not (self._chunks or self._parts)
        if may_pass and self._gathered is not None:
            self._gathered.append((chunk, produced_at_ns))
            return
        if may_pass and self.write is not None and self.write(chunk, produced_at_ns):
            return
        self._queue(chunk, produced_at_ns)

    def descriptor(self) -> int:
        """Return the file descriptor to which the event writer may send the next chunk; negative: there is none."""
        is_idle = self._waiter is not None and not (self._chunks or self._parts or self.is_closed)
        return self.direct.descriptor() if self.direct is not None and is_idle else -1

    def put_parts(self, parts: Iterator[bytes]) -> None:
        """Add parts that are made one by one as the client reads, before the waiting chunks."""
        if not self.is_closed:
            self._parts.append(parts)
            self._wake()

    def gather(self) -> None:
        """Collect chunks until `flush` writes them together; there must be no await in between."""
        self._gathered = []

    def flush(self) -> None:
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
        """Add a part of an answer after the waiting ones; return the growth of memory, which the caller counts."""
        size = len(part)
        if not size:
            return 0
        if size > _CHUNK_BYTES:  # a whole answer is freed while it is sent
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
        """Count only the waiting chunks from now on."""
        self._free_reserved()
        self.hold(sum(chunk.size for chunk in self._chunks) - self.size)

    def hold(self, count: int) -> None:
        """Add to the size (or subtract, if negative): memory of waiting bytes or of an unfinished answer."""
        self.size += count
        self._buffers.grow(count)
        if self.size > self._most and not self._is_full:
            self._is_full = True
            self._on_full()

    def keep(self, count: int) -> None:
        """Count bytes that the answer keeps to send them again at its end.

        They do not count towards the queue's bound.
        """
        self._most += 2 * count
        self.hold(count)

    def reserve(self, count: int) -> None:
        """Charge bytes in advance, until the answer is written or dropped.

        They do not count towards the queue's bound.
        """
        self._reserved += count
        self._buffers.reserved += count
        self._most += count
        self.hold(count)

    def drop(self) -> None:
        self._free_reserved()
        self._parts.clear()
        self._chunks.clear()
        if self._gathered is not None:
            self._gathered.clear()
        self.hold(-self.size)

    def release(self) -> None:
        """Forget its answer, which refers to it."""
        self._on_full = lambda: None

    def _free_reserved(self) -> None:
        if not self._reserved:
            return
        reserved, self._reserved = self._reserved, 0
        self._buffers.reserved -= reserved
        self._most -= reserved
        self.hold(-reserved)

    def close(self) -> None:
        """Add nothing more; the waiting bytes are still sent."""
        self.is_closed = True
        self._wake()

    async def ready(self) -> None:
        while not (self._chunks or self._parts or self.is_closed):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def take(self, most: int = _CHUNK_BYTES) -> Sending:
        """Remove and return a part, or about `most` bytes of chunks; the rest can still be dropped."""
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


class Backlog:
    """Received steps, and ends of requests, that are not yet delivered; first in, first out.

    Rows that have left the backlog and wait for a turn also count, with their whole step. Above `compacted_bytes`,
    the other rows of such a step are freed; below it, freeing costs more than it saves.
    """

    def __init__(self, compacted_bytes: int = 0) -> None:
        self._compacted_bytes = compacted_bytes
        self._entries: deque[tuple[StepRows | RequestEnd, int]] = deque()
        """Each with its size in bytes."""
        self.size = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def begins_with_error(self) -> bool:
        output, _ = self._entries[0]
        return isinstance(output, RequestEnd) and output.error is not None

    def append(self, output: StepRows | RequestEnd) -> None:
        batches = () if isinstance(output, RequestEnd) else output
        size = sum(map(size_of, filter(None, batches)))
        self._entries.append((output, size))
        self.size += size

    def popleft(self) -> StepRows | RequestEnd:
        output, size = self._entries.popleft()
        self.size -= size
        return output

    def hold(self, waiting: WaitingRow) -> None:
        """Count a waiting row: while a row waits, its whole step takes memory."""
        if not waiting.step.waiting:
            self.size += waiting.step.size
        waiting.step.waiting[waiting] = None

    def free(self, waiting: WaitingRow) -> None:
        del waiting.step.waiting[waiting]
        if not waiting.step.waiting:
            self.size -= waiting.step.size
        else:
            self.fit(waiting.step)

    def fit(self, step: RenderedStep) -> None:
        """If few rows of a step wait, free its other rows.

        Otherwise one late answer would hold the rows of all others.
        """
        rows = step.batch.row_count
        if self.size <= self._compacted_bytes:
            return
        if step.waiting and rows >= _LEAST_ROWS and len(step.waiting) * _FEW_SHARE < rows:
            self.size += step.compacted().size - step.size

    def weights(self) -> Counter[int]:
        """Return the memory of each request's rows in the backlog."""
        weights: Counter[int] = Counter()
        steps = (output for output, _ in self._entries if isinstance(output, StepRows))
        for batch in (batch for step in steps for batch in step if batch is not None):
            weights.update(dict(zip(batch.request_ids.tolist(), batch.row_bytes().tolist(), strict=True)))
        return weights

    def keep(self, wanted: Container[int]) -> None:
        entries, self._entries = self._entries, deque()
        self.size -= sum(size for _, size in entries)
        for output, _ in entries:
            if isinstance(output, RequestEnd):
                self.append(output)
                continue
            target, draft = output
            kept = selected(target, wanted)
            if kept is not None:
                self.append(StepRows(kept, None if draft is None else selected(draft, wanted)))


def selected(batch: LogprobBatch, wanted: Container[int]) -> LogprobBatch | None:
    rows = [row for row, request_id in enumerate(batch.request_ids.tolist()) if request_id in wanted]
    if len(rows) == batch.row_count:
        return batch
    return batch.select(rows) if rows else None
