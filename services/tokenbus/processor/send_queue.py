"""SendQueue: frames for one client, sent as the client's window allows and kept until they are acknowledged."""

from collections import deque

import numpy as np

from tokenbus.delivery import AckTracker
from tokenbus.processor.client_frames import Frame, RequestIds


class Budget:
    """The total bytes in all clients' send queues, and the limit on this total."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0

    @property
    def is_exceeded(self) -> bool:
        return self.bytes > self.max_bytes


class SendQueue:
    """The unacknowledged frames of one client, oldest first, limited in number and in bytes."""

    def __init__(self, max_frames: int, max_bytes: int, budget: Budget) -> None:
        self._max_frames = max_frames
        self._max_bytes = max_bytes
        self._budget = budget
        self._sent: deque[Frame] = deque()
        self._waiting: deque[Frame] = deque()
        self._window_frames = 0
        self._window_bytes = 0
        self._next_number = 1
        self._sent_bytes = 0
        self.outputs = 0
        """Number of frames with rows or prompt scores."""
        self.last_ordinal = 0
        """Ordinal of the last frame, counted from one across all connections."""
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._sent) + len(self._waiting)

    @property
    def is_over_full(self) -> bool:
        """Whether the queue exceeds its limits, because the client reads too slowly."""
        return self.outputs > self._max_frames or self.bytes > self._max_bytes

    def still_holds(self, ordinal: int) -> bool:
        """Return whether a frame with this ordinal is unacknowledged; the frame must not have been dropped."""
        frames = self._sent or self._waiting
        return bool(frames) and ordinal >= frames[0].ordinal

    @property
    def has_room_in_window(self) -> bool:
        return not self._waiting and self._fits(0)

    def connect(self, window_frames: int, window_bytes: int) -> None:
        """Begin a connection: all unacknowledged frames are sent again, and numbered from one."""
        self._window_frames, self._window_bytes = window_frames, window_bytes
        self._waiting, self._sent = deque(self.frames()), deque()
        self._next_number = 1
        self._sent_bytes = 0

    def put(self, frame: Frame) -> None:
        if frame.pending_ack is not None:
            frame.pending_ack.keep()
            frame.pending_ack.holders.append(self)
        self._waiting.append(frame)
        self.last_ordinal += 1
        frame.ordinal = self.last_ordinal
        self.outputs += frame.is_output
        self.bytes += frame.cost
        self._budget.bytes += frame.cost

    def next_message(self) -> list[bytes] | None:
        if not self._waiting or not self._fits(self._waiting[0].size):
            return None
        frame = self._waiting[0]
        return frame.numbered(self._next_number)

    def sent(self) -> None:
        """Mark the frame of the last `next_message` as sent."""
        frame = self._waiting.popleft()
        frame.number = self._next_number
        self._next_number += 1
        self._sent_bytes += frame.size
        self._sent.append(frame)

    def ack(self, through: int) -> bool:
        """Remove the frames up to a number, or return False if no frame with this number was sent."""
        if through >= self._next_number:
            return False
        while self._sent and self._sent[0].number <= through:
            frame = self._sent.popleft()
            self._sent_bytes -= frame.size
            self._release(frame)
        return True

    def discard(self) -> None:
        for frame in (*self._sent, *self._waiting):
            self._release(frame)
        self._sent.clear()
        self._waiting.clear()
        self._sent_bytes = 0

    def drop_outputs(self) -> list[Frame]:
        """Remove and return the frames with rows or prompt scores; all other frames are sent again."""
        frames = self.frames()
        self.discard()
        for frame in frames:
            if not frame.is_output:
                self.put(frame)
        return [frame for frame in frames if frame.is_output]

    def largest(self) -> set[int]:
        """Return the largest requests whose frames must be dropped until the queue is at most half full.

        Of the limits on frames and on bytes, only the one that is closer to being reached counts. Frames with rows of
        several requests cannot be dropped; if they fill more than half of the queue, an empty set is returned.
        """
        of = self.bytes / self._max_bytes < self.outputs / self._max_frames
        left, bound = ((self.bytes, self._max_bytes), (self.outputs, self._max_frames))[of]
        most = min(left, bound) / 2
        own: dict[int, list[int]] = {}
        for frame in self.frames():
            if frame.owner:
                sums = own.setdefault(frame.owner, [0, 0])
                sums[0] += frame.cost
                sums[1] += 1
        found = set[int]()
        for request_id, sums in sorted(own.items(), key=lambda each: each[1][of], reverse=True):
            found.add(request_id)
            left -= sums[of]
            if left <= most:
                return found
        return set()

    def drop_own(self, request_ids: set[int]) -> list[Frame]:
        """Remove and return the frames whose rows all belong to one of the given requests."""
        dropped = [frame for frame in self.frames() if frame.owner in request_ids]
        for frame in dropped:
            self._release(frame)
        self._sent_bytes -= sum(frame.size for frame in self._sent if frame.owner in request_ids)
        self._sent = deque(frame for frame in self._sent if frame.owner not in request_ids)
        self._waiting = deque(frame for frame in self._waiting if frame.owner not in request_ids)
        return dropped

    def frames(self) -> list[Frame]:
        return [*self._sent, *self._waiting]

    def frames_of(self, ids: RequestIds) -> list[Frame]:
        """Return the frames with rows of the given requests, oldest first, without decoding them."""
        frames = [frame for frame in self.frames() if frame.ids]
        if not frames:
            return []
        ends = np.cumsum([len(frame.ids) for frame in frames]) // 8
        found = np.isin(np.frombuffer(b"".join(frame.ids for frame in frames), np.uint64), ids)
        return [frames[place] for place in np.unique(np.searchsorted(ends, np.flatnonzero(found), "right")).tolist()]

    def held_of(self, acks: AckTracker) -> tuple[int, int]:
        """Return the number and the total bytes of a stream's items that have frames in this queue."""
        waiting = {frame.pending_ack for frame in self.frames() if frame.pending_ack is not None}
        held = [each for each in waiting if each.stream is acks]
        return sum(each.items for each in held), sum(each.bytes for each in held)

    def _fits(self, size: int) -> bool:
        return len(self._sent) < self._window_frames and (
            not self._sent or self._sent_bytes + size <= self._window_bytes
        )

    def _release(self, frame: Frame) -> None:
        self.outputs -= frame.is_output
        self.bytes -= frame.cost
        self._budget.bytes -= frame.cost
        if frame.pending_ack is not None:
            frame.pending_ack.holders.remove(self)
            frame.pending_ack.release()
