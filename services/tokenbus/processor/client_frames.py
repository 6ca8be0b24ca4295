"""Frames for clients, each encoded once: the rows of a step, errors and events."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tokenbus.delivery import PendingAck
from tokenbus_contracts import Limits, LogprobBatch, decode
from tokenbus_contracts.frames import write_frame
from tokenbus_contracts.generated.client_pb2 import Outputs, ServerFrame
from tokenbus_contracts.header import BatchHeader
from tokenbus_contracts.wire import varint, write

RequestIds = npt.NDArray[np.uint64]
OUTPUTS = write_frame(ServerFrame(outputs=Outputs()))
"""Encoded frame body of a target batch without a draft batch."""
_OUTPUTS_WITH_DRAFT = write_frame(ServerFrame(outputs=Outputs(has_draft=True)))
_NUMBER_TAG = bytes([ServerFrame.DESCRIPTOR.fields_by_name["number"].number << 3])

_HEADER_BYTES = 512
"""Maximum size of the header and the column keys of a message, in bytes."""
_ID_BYTES = 8
_OVERHEAD = 512
"""Measured memory of a frame object, in bytes, besides its contents."""


class Frame:
    """A frame with its encoded batches; the frame's number is prepended when it is sent."""

    __slots__ = ("body", "cost", "ids", "number", "ordinal", "parts", "pending_ack", "size")

    def __init__(
        self, body: bytes, parts: Sequence[bytes] = (), pending_ack: PendingAck | None = None, ids: bytes = b""
    ) -> None:
        self.body = body
        self.parts = parts
        """Encoded batches, or nothing for an error, an event or prompt scores."""
        self.pending_ack = pending_ack
        """Pending ack of the frame's rows or prompt scores, or None for other frames."""
        self.ids = ids
        self.size = sum(map(len, parts)) if parts or pending_ack is None else len(body)
        """Bytes by which the frame fills the client's window."""
        self.cost = len(self.body) + sum(map(len, parts)) + len(ids) + _OVERHEAD
        """Bytes that the frame adds to the size of the send queue."""
        self.ordinal = self.number = 0
        """Numbers of the frame, counted from one: `ordinal` in its send queue, and `number` in its connection."""

    @property
    def is_output(self) -> bool:
        """Whether the frame has rows or prompt scores."""
        return self.pending_ack is not None

    @property
    def owner(self) -> int:
        """The request id if all rows of the frame belong to one request, otherwise 0."""
        return int.from_bytes(self.ids, "little") if self.is_output and len(self.ids) == _ID_BYTES else 0

    def rows_of(self, ids: RequestIds, limits: Limits) -> tuple[LogprobBatch, LogprobBatch | None]:
        batches = [decode(part, limits) for part in self.parts]
        target, *draft = [batch.select(np.flatnonzero(np.isin(batch.request_ids, ids))) for batch in batches]
        return target, draft[0] if draft and draft[0].row_count else None

    def numbered(self, number: int) -> list[bytes]:
        return [_NUMBER_TAG + varint(number) + self.body, *self.parts]


def output_frames(
    target: LogprobBatch, draft: LogprobBatch | None, pending_ack: PendingAck, limits: Limits
) -> list[Frame]:
    """Return a client's rows of a step as one frame, or as several frames if one message would exceed the limits."""
    frames = []
    ends = [target.row_count]
    if target.row_count > limits.max_rows or _may_exceed(target, limits) or (draft and _may_exceed(draft, limits)):
        ends = target.runs(limits.max_rows, room_in(limits), None if draft is None else _beside(target, draft))
    for begin, end in pairwise([0, *ends] if target.row_count else []):
        rows = target
        if len(ends) > 1:
            rows = target.select(np.arange(begin, end))
        drafts = draft
        if draft is not None and rows is not target:
            drafts = draft.select(np.flatnonzero(np.isin(draft.request_ids, rows.request_ids)))
        # The rows are not validated here, because the processor decoded them, and the client validates them again.
        parts = [write(rows.headed(selection_header(rows, draft_follows=drafts is not None)), limits)]
        if drafts is not None:
            parts.append(write(drafts.headed(selection_header(drafts)), limits))
        body = OUTPUTS if drafts is None else _OUTPUTS_WITH_DRAFT
        frames.append(Frame(body, parts, pending_ack, rows.request_ids.tobytes()))
    return frames


def room_in(limits: Limits) -> int:
    return max(1, limits.max_message_bytes - _HEADER_BYTES)


def _may_exceed(rows: LogprobBatch, limits: Limits) -> bool:
    """Return whether rows may be too large for one message; rows that arrived as one message never are."""
    return not rows.is_message and rows.nbytes > room_in(limits)


def _beside(target: LogprobBatch, draft: LogprobBatch) -> npt.NDArray[np.intp]:
    found = np.zeros(target.row_count, np.intp)
    order = np.argsort(target.request_ids)
    places = np.searchsorted(target.request_ids, draft.request_ids, sorter=order)
    known = np.isin(draft.request_ids, target.request_ids)
    found[order[places[known]]] = draft.row_bytes()[known]
    return found


def emitted_in(frames: list[Frame], limits: Limits) -> dict[int, int]:
    """Return the requests with rows in the frames, and the number of tokens emitted up to these rows."""
    emitted: dict[int, int] = {}
    for frame in frames:
        if not frame.parts:
            for request_id in np.frombuffer(frame.ids, np.uint64).tolist():
                emitted.setdefault(request_id, 0)
        elif frame.pending_ack is not None:
            batch = decode(frame.parts[0], limits)
            ends = (batch.positions + batch.token_counts).tolist()
            emitted.update(zip(batch.request_ids.tolist(), ends, strict=True))
    return emitted


def selection_header(batch: LogprobBatch, *, draft_follows: bool = False) -> BatchHeader:
    return batch.header._replace(selection=True, draft_follows=draft_follows)
