"""Pinned memory for results and device memory for kernels. Both kinds of memory are reused and bounded."""

import ctypes
import threading
from collections import OrderedDict, deque

import numpy as np
import numpy.typing as npt

from tokenbus_gpu_ops.cuda.driver import done, driver
from tokenbus_gpu_ops.plan import MAX_TOKENS

_LEAST_BYTES = 1 << 14
MAX_PINNED_BYTES = 1 << 28
"""The maximum pinned memory for one device in bytes, including referenced results and free blocks."""
_STREAMS_KEPT = 8
TICKET_BYTES = 4 * 2 * MAX_TOKENS
"""The size of all tickets in bytes. A token may need two tickets: one for `logits`, one for `other_logits`."""


class Pinned:
    """A block of pinned memory, with an event that marks the results in the block as complete."""

    __slots__ = ("address", "array", "event", "seen", "size")

    def __init__(self, size: int) -> None:
        cuda = driver()
        self.size = size
        self.seen = True
        """Whether an earlier check found that the GPU has finished with the block."""
        self.address = int(done(cuda.cuMemHostAlloc(size, cuda.CU_MEMHOSTALLOC_PORTABLE)))
        flags = cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING
        self.event = done(cuda.cuEventCreate(flags))
        self.array: npt.NDArray[np.uint8] = np.frombuffer(
            memoryview((ctypes.c_ubyte * size).from_address(self.address)), np.uint8
        )

    def is_idle(self) -> bool:
        if not self.seen:
            self.seen = not driver().cuEventQuery(self.event)[0]
        return self.seen

    def wait(self) -> None:
        if not self.seen:
            done(driver().cuEventSynchronize(self.event))
            self.seen = True

    def record(self, stream: int) -> None:
        self.seen = False
        done(driver().cuEventRecord(self.event, stream))


class Pool:
    """The pinned memory of one device. The GPU may still write to a free block, so `take` checks the block's event."""

    def __init__(self, max_bytes: int = MAX_PINNED_BYTES) -> None:
        self._free: dict[int, deque[Pinned]] = {}
        self._max_bytes = max_bytes
        self.bytes = 0
        """The number of allocated bytes, including free blocks."""

    def take(self, wanted: int) -> Pinned:
        """Return a block of at least `wanted` bytes."""
        size = max(_LEAST_BYTES, 1 << (wanted - 1).bit_length())
        free = self._free.setdefault(size, deque())
        # If the oldest free block is still busy, the newer free blocks are probably also busy.
        if free and free[0].is_idle():
            return free.popleft()
        if self.bytes + size > self._max_bytes:
            self._let_go(size)
        if self.bytes + size <= self._max_bytes:
            self.bytes += size
            return Pinned(size)
        if not free:
            raise MemoryError(
                f"results that are still referenced take {self.bytes} bytes of pinned memory, at most "
                f"{self._max_bytes} are allowed, and {size} more are needed: drop results, or copy the "
                "ones that you keep"
            )
        piece = free.popleft()
        piece.wait()
        return piece

    def give_back(self, piece: Pinned) -> None:
        self._free.setdefault(piece.size, deque()).append(piece)

    def _let_go(self, wanted: int) -> None:
        """Free unused blocks of sizes other than `wanted` until `wanted` bytes can be allocated."""
        for size, free in self._free.items():
            while size != wanted and free and self.bytes + wanted > self._max_bytes:
                piece = free.popleft()
                piece.wait()
                done(driver().cuEventDestroy(piece.event))
                done(driver().cuMemFreeHost(piece.address))
                self.bytes -= size


class Scratch:
    """The device memory of one stream. The calls of the stream use the memory one after another."""

    __slots__ = ("_last", "address", "size")

    def __init__(self) -> None:
        self._last: Pinned | None = None
        self.address = 0
        self.size = 0

    def grown_to(self, wanted: int, stream: int) -> int:
        """Return the address of a large enough block. The block begins with tickets, which are zero before a launch.

        Memory is allocated, cleared and freed in the order of the stream, so that no thread waits.
        """
        if wanted > self.size:
            cuda = driver()
            self.free(stream)
            size = 1 << (wanted - 1).bit_length()
            self.address = int(done(cuda.cuMemAllocAsync(size, stream)))
            self.size = size
            done(cuda.cuMemsetD8Async(self.address, 0, TICKET_BYTES, stream))
        return self.address

    def take_turn(self, stream: int, result: Pinned) -> None:
        """Make the stream wait for the last call that used this memory.

        Without this wait, a new stream with the handle of a destroyed stream could overwrite memory that is in use.
        """
        self._follow(stream)
        self._last = result

    def free(self, stream: int) -> None:
        if self.address:
            self._follow(stream)
            done(driver().cuMemFreeAsync(self.address, stream))
            self.address = self.size = 0

    def _follow(self, stream: int) -> None:
        if self._last is not None and not self._last.seen:
            done(driver().cuStreamWaitEvent(stream, self._last.event, 0))


class Scratches:
    """The device memory of recently used streams by handle."""

    def __init__(self) -> None:
        self._of: OrderedDict[int, Scratch] = OrderedDict()

    def of(self, stream: int) -> Scratch:
        """Return the memory of a stream. If necessary, the memory of the least recently used stream is evicted."""
        scratch = self._of.get(stream)
        if scratch is None:
            scratch = self._of[stream] = Scratch()
            if len(self._of) > _STREAMS_KEPT:
                self._of.popitem(last=False)[1].free(stream)
        else:
            self._of.move_to_end(stream)
        return scratch


LOCK = threading.Lock()
"""The lock that a thread holds while it assembles and queues a call, because calls share memory."""
