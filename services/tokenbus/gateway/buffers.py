"""Bounded buffers: SendQueue for the bytes of one client, Buffers for all clients, Backlog for received steps."""

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
"""Writes a chunk to a socket, or returns False if the socket is full. Also receives the rows' publication times."""
_CHUNK_BYTES, _BUFFER_BYTES = 65_536, 8192
"""Size of a sent chunk, and size of a buffer for rows, both in bytes. A full buffer is not grown but replaced."""
_ALL = 2**31
_FREED_SHARE = 8
"""An eviction frees an eighth of the bound for all answers. Otherwise each further byte would evict an answer."""
COLLECTED_BYTES = 256
_TIME_BYTES = 8
_MOST_PARTS = 32
"""Number of parts that are joined into one object, because many small objects fragment the memory."""
_LEAST_ROWS, _FEW_SHARE = 16, 4
"""In a step of at least 16 rows, delivered rows are freed once less than a quarter of the rows still wait."""
_LEAST_FREED = 16 * 2**20


class Buffers:
    """Counts the bytes of all answers, and evicts the largest answers if the total exceeds the bound."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.size = 0
        self.reserved = 0
        self.evicted = 0
        self.turns = AdmissionLimiter(1)
        """Allows one part of a large answer per tick of the event loop, so that streams are not delayed."""
        self._highest = 0
        """The largest size since memory was last returned to the system."""
        self._holders: dict[Answer, None] = {}
        self._is_evicting = False

    def join(self, holder: "Answer") -> None:
        self._holders[holder] = None

    def leave(self, holder: "Answer") -> None:
        self._holders.pop(holder, None)

    def grow(self, count: int) -> None:
        """Add `count`, which may be negative, to the size. If the size exceeds the bound, evict answers."""
        if count < 0:
            self._highest = max(self._highest, self.size)
        self.size += count
        if self.size > self.most:
            sizes = {each: each.queue.size for each in self._holders}
            self._evict(sizes, self.size - self.most + self.most // _FREED_SHARE, 1, _ALL)

    def trim(self, beside: int) -> None:
        """If many bytes were freed, return them to the system, because the C library would keep them.

        `beside` is the number of bytes in other buffers.
        """
        size = self.size + beside
        self._highest = max(self._highest, size)
        if self._highest - size >= _LEAST_FREED:
            self._highest = size
            malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
            if malloc_trim is not None:  # only glibc has this function
                malloc_trim(0)

    def evict(self, wanted: int, beside: Mapping["Answer", int]) -> None:
        """Evict the largest answers until `wanted` bytes are freed.

        The size of an answer includes the unread bytes of its socket. `beside` maps answers to bytes in other buffers.
        """
        sizes = {each: each.queue.size + each.queue.unsent() + beside.get(each, 0) for each in self._holders}
        self._evict(sizes, wanted, 1, _ALL)

    def evict_unread(self, least: int) -> None:
        """Evict the unfinished answer with the most unread bytes, unless these are fewer than `least`."""
        self._evict({each: each.queue.unread for each in self._holders}, least, least, 1)

    def _evict(self, sizes: dict["Answer", int], wanted: int, at_least: int, most: int) -> None:
        if self._is_evicting:  # the end of an answer frees bytes, which calls this method again
            return
        self._is_evicting = True
        # Among answers of the same size, evict the newest answer, because the older answers fit without it.
        newest_first = list(reversed(sizes.items()))
        try:
            for holder, size in sorted(newest_first, key=lambda pair: pair[1], reverse=True)[:most]:
                if wanted <= 0 or size < at_least:
                    break
                wanted -= size
                self.evicted += 1
                # The evicted answer's socket may stay full, so the next eviction must choose another answer.
                self.leave(holder)
                holder.evict(size)
        finally:
            self._is_evicting = False


class Collected:
    """Collects copies of bytes in buffers whose capacity is counted."""

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
        """Count the memory of the last buffer. If the buffer is full, begin a new one. Return the growth in bytes."""
        last = self.last
        grown, self._counted = getsizeof(last) - self._counted, getsizeof(last)
        if len(last) >= _BUFFER_BYTES:
            # Move the last byte to the new buffer, because `collect` writes no separator into an empty buffer.
            self.last, self._counted = last[-1:], 0
            self._buffers.append(self.last)
            del last[-1:]
        return grown

    def begin_with(self, other: "Collected") -> None:
        """Move the bytes of `other` in front of these bytes."""
        before = list(other.taken())
        if before and self:
            before[-1] += self.separator
        self._buffers = before + self._buffers

    def taken(self) -> Iterator[bytearray]:
        """Remove and yield each filled buffer. Nothing may be added afterwards."""
        buffers, self._buffers = self._buffers[::-1], [bytearray()]
        while buffers:
            if buffer := buffers.pop():
                yield buffer


def collect(lists: Iterable[Collected], pieces: Iterable[bytes | memoryview]) -> int:
    """Append one piece to each list, after a separator if the list has pieces. Return the number of copied bytes."""
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
    """Bytes to send, with the publication times of the rows in them."""

    data: bytes
    produced_at_ns: list[int]
    is_last: bool


class _Chunk:
    """Waiting bytes, with the publication times of the rows in them."""

    __slots__ = ("length", "parts", "produced_at_ns", "size")

    def __init__(self) -> None:
        self.parts: list[bytes | bytearray] = []
        self.produced_at_ns: list[int] = []
        self.length = self.size = 0


class SendQueue:
    """Bytes that wait for one client's socket.

    Arriving rows add bytes, and one task removes bytes as the client reads.

    Once `write` is set, a chunk is written to the socket directly. The chunk is queued only if the socket is full.
    Waking a task for each row would cost as much as writing the row.
    """

    def __init__(self, most: int, on_full: Callable[[], None], buffers: Buffers) -> None:
        self._most = most
        self._on_full = on_full
        self._buffers = buffers
        self._parts: deque[Iterator[bytes]] = deque()
        self._chunks: deque[_Chunk] = deque()
        self._gathered: list[tuple[bytes, int]] | None = None
        """Chunks that `flush` will write together, or None if each chunk is written separately."""
        self._is_full = False
        self._reserved = 0
        self._waiter: asyncio.Future[None] | None = None
        self.is_closed = False
        self.write: Write | None = None
        self.direct: ChunkWriter | None = None
        """The writer to the connection if chunks are written uncompressed, else None."""
        self.unsent: Callable[[], int] = lambda: 0
        """A function that returns the number of bytes in the socket that the client has not read."""
        self.is_sent = False
        self.is_broken = False
        """Whether bytes were dropped, so that the remaining bytes are useless."""
        self.size = 0
        """Number of bytes of memory that the waiting bytes and the collected answer use."""

    @property
    def length(self) -> int:
        return sum(chunk.length for chunk in self._chunks)

    @property
    def has_parts(self) -> bool:
        """Whether the next bytes are a part that `take` must still compute, which may take some milliseconds."""
        return bool(self._parts)

    @property
    def unread(self) -> int:
        """Number of bytes of a stream that the client could have read already; 0 after the end of the stream."""
        if self.is_closed:
            return 0
        return self.unsent() + (self.size if self._chunks else 0)

    def put(self, chunk: bytes, produced_at_ns: int = 0) -> None:
        """Add a row's chunk. Chunks after `close` are ignored."""
        if self.is_closed:
            return
        # If the task has no `_waiter`, it is sending earlier chunks, and new chunks must wait behind these.
        may_pass = self.write is not None and self._waiter is not None and not (self._chunks or self._parts)
        if may_pass and self._gathered is not None:
            self._gathered.append((chunk, produced_at_ns))
            return
        if may_pass and self.write is not None and self.write(chunk, produced_at_ns):
            return
        self._queue(chunk, produced_at_ns)

    def descriptor(self) -> int:
        """Return the file descriptor for the event writer's next chunk, or -1 if the event writer may not send."""
        is_idle = self._waiter is not None and not (self._chunks or self._parts or self.is_closed)
        return self.direct.descriptor() if self.direct is not None and is_idle else -1

    def put_parts(self, parts: Iterator[bytes]) -> None:
        """Add parts that are sent before the waiting chunks. Each part is computed when the client can read it."""
        if not self.is_closed:
            self._parts.append(parts)
            self._wake()

    def gather(self) -> None:
        """Collect chunks until `flush` writes them together. The caller must not await before `flush`."""
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
        """Add a part of an answer at the end. Return the growth of memory, which the caller must count."""
        size = len(part)
        if not size:
            return 0
        if size > _CHUNK_BYTES:  # small chunks are freed one by one while they are sent
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
        """Reduce the counted memory to the size of the waiting chunks."""
        self._free_reserved()
        self.hold(sum(chunk.size for chunk in self._chunks) - self.size)

    def hold(self, count: int) -> None:
        """Add `count`, which may be negative, to the memory of the waiting bytes and of the unfinished answer."""
        self.size += count
        self._buffers.grow(count)
        if self.size > self._most and not self._is_full:
            self._is_full = True
            self._on_full()

    def keep(self, count: int) -> None:
        """Count bytes that the answer keeps in order to repeat them at its end.

        Kept bytes do not count towards the bound of this queue.
        """
        self._most += 2 * count
        self.hold(count)

    def reserve(self, count: int) -> None:
        """Charge bytes in advance, until the answer is written or dropped.

        Reserved bytes do not count towards the bound of this queue.
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
        """Break the cycle of references with the answer."""
        self._on_full = lambda: None

    def _free_reserved(self) -> None:
        if not self._reserved:
            return
        reserved, self._reserved = self._reserved, 0
        self._buffers.reserved -= reserved
        self._most -= reserved
        self.hold(-reserved)

    def close(self) -> None:
        """Ignore further chunks. The waiting bytes are still sent."""
        self.is_closed = True
        self._wake()

    async def ready(self) -> None:
        while not (self._chunks or self._parts or self.is_closed):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def take(self, most: int = _CHUNK_BYTES) -> Sending:
        """Remove and return the next part or about `most` bytes of chunks."""
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
    """A first-in first-out queue of received steps and request ends.

    A step that has left the queue counts towards the size until all its rows are delivered. Delivered rows of such
    steps are freed only while the backlog is larger than `compacted_bytes`, because freeing rows takes long.
    """

    def __init__(self, compacted_bytes: int = 0) -> None:
        self._compacted_bytes = compacted_bytes
        self._entries: deque[tuple[StepRows | RequestEnd, int]] = deque()
        """The steps and request ends in the queue, each with a size in bytes."""
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
        """Count a waiting row, which keeps its whole step in memory."""
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
        """If few rows of a step still wait, free the step's delivered rows.

        One waiting row would otherwise keep the step's rows for all other answers in memory.
        """
        rows = step.batch.row_count
        if self.size <= self._compacted_bytes:
            return
        if step.waiting and rows >= _LEAST_ROWS and len(step.waiting) * _FEW_SHARE < rows:
            self.size += step.compacted().size - step.size

    def weights(self) -> Counter[int]:
        """Return the size in bytes of each request's rows in the backlog, by request id."""
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
