"""What a client is sent: its rows of each step, errors and events, each encoded once as a frame."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tokenbus.delivery import PendingAck
from tokenbus_contracts import Limits, LogprobBatch, decode
from tokenbus_contracts.frames import write_frame
from tokenbus_contracts.generated.client_pb2 import Outputs, ServerFrame
from tokenbus_contracts.wire import write

RequestIds = npt.NDArray[np.uint64]
OUTPUTS = write_frame(ServerFrame(outputs=Outputs()))
"""The frame before a target batch that is alone."""
_OUTPUTS_WITH_DRAFT = write_frame(ServerFrame(outputs=Outputs(has_draft=True)))
_NUMBER_TAG = bytes([ServerFrame.DESCRIPTOR.fields_by_name["number"].number << 3])

_HEADER_BYTES = 512
"""More than a header has, and each column before its elements."""
_ID_BYTES = 8
_OVERHEAD = 512
"""What a frame costs in memory beside its bytes, in bytes, measured."""


class Frame:
    """One frame and its parts, encoded once; its number is put before it when it is sent."""

    __slots__ = ("body", "cost", "ids", "number", "ordinal", "parts", "pending_ack", "size")

    def __init__(
        self, body: bytes, parts: Sequence[bytes] = (), pending_ack: PendingAck | None = None, ids: bytes = b""
    ) -> None:
        self.body = body
        self.parts = parts
        """The batches behind the frame; without them it says how a request ended, or has a prompt's scores."""
        self.pending_ack = pending_ack
        """Of the rows, or the prompt's scores, in it: what an engine made."""
        self.ids = ids
        self.size = sum(map(len, parts)) if parts or pending_ack is None else len(body)
        """What it takes of a client's window, in bytes."""
        self.cost = len(self.body) + sum(map(len, parts)) + len(ids) + _OVERHEAD
        """What it is charged with, in bytes."""
        self.ordinal = self.number = 0
        """Its numbers, each counted from one: in its queue, and in the connection that it was sent in."""

    @property
    def is_output(self) -> bool:
        """Whether it has what an engine made; others say how requests ended."""
        return self.pending_ack is not None

    @property
    def owner(self) -> int:
        """The request of the frame's rows; 0 if they belong to several requests."""
        return int.from_bytes(self.ids, "little") if self.is_output and len(self.ids) == _ID_BYTES else 0

    def rows_of(self, ids: RequestIds, limits: Limits) -> tuple[LogprobBatch, LogprobBatch | None]:
        """Return the rows of some requests in it, and what was drafted for them."""
        batches = [decode(part, limits) for part in self.parts]
        target, *draft = [batch.select(np.flatnonzero(np.isin(batch.request_ids, ids))) for batch in batches]
        return target, draft[0] if draft and draft[0].row_count else None

    def numbered(self, number: int) -> list[bytes]:
        """Return the message that it is sent as, with its number in the connection."""
        return [_numbered(number) + self.body, *self.parts]


def output_frames(
    target: LogprobBatch, draft: LogprobBatch | None, pending_ack: PendingAck, limits: Limits
) -> list[Frame]:
    """Return a client's rows of a step: one frame, or more where a step has more rows or bytes than a message may."""
    frames = []
    ends = [target.row_count]
    if (
        target.row_count > limits.max_rows
        or _may_exceed(target, limits)
        or (draft is not None and _may_exceed(draft, limits))
    ):
        ends = target.runs(limits.max_rows, room_in(limits), None if draft is None else _beside(target, draft))
    for begin, end in pairwise([0, *ends] if target.row_count else []):
        rows = target
        if len(ends) > 1:
            rows = target.select(np.arange(begin, end))
        drafts = draft
        if draft is not None and rows is not target:
            drafts = draft.select(np.flatnonzero(np.isin(draft.request_ids, rows.request_ids)))
        # Not checked again: the rows are of batches that the processor decoded, and the client checks what it reads.
        parts = [write(_selection(rows, drafts is not None), limits)]
        if drafts is not None:
            parts.append(write(_selection(drafts, follows=False), limits))
        body = OUTPUTS if drafts is None else _OUTPUTS_WITH_DRAFT
        frames.append(Frame(body, parts, pending_ack, rows.request_ids.tobytes()))
    return frames


def room_in(limits: Limits) -> int:
    """Return how many bytes of rows a message has room for."""
    return max(1, limits.max_message_bytes - _HEADER_BYTES)


def _may_exceed(rows: LogprobBatch, limits: Limits) -> bool:
    """Tell whether rows may be more than a message has room for: those of one message of the stream are not."""
    return not rows.is_message and rows.nbytes > room_in(limits)


def _beside(target: LogprobBatch, draft: LogprobBatch) -> npt.NDArray[np.intp]:
    found = np.zeros(target.row_count, np.intp)
    order = np.argsort(target.request_ids)
    places = np.searchsorted(target.request_ids, draft.request_ids, sorter=order)
    known = np.isin(draft.request_ids, target.request_ids)
    found[order[places[known]]] = draft.row_bytes()[known]
    return found


def reached_in(frames: list[Frame], limits: Limits) -> dict[int, int]:
    """Return the requests that have rows in some frames, and how far each had come by them, in tokens."""
    reached: dict[int, int] = {}
    for frame in frames:
        if not frame.parts:
            for request_id in np.frombuffer(frame.ids, np.uint64).tolist():
                reached.setdefault(request_id, 0)
        elif frame.pending_ack is not None:
            batch = decode(frame.parts[0], limits)
            ends = (batch.positions + batch.token_counts).tolist()
            reached.update(zip(batch.request_ids.tolist(), ends, strict=True))
    return reached


def _numbered(number: int) -> bytes:
    """Return the field `number` of a ServerFrame as protobuf writes it, before all others."""
    encoded = bytearray(_NUMBER_TAG)
    while number > 0x7F:  # noqa: PLR2004 - seven bits a byte
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _selection(batch: LogprobBatch, follows: bool) -> LogprobBatch:  # noqa: FBT001 - private, and named at the call
    return batch.headed(batch.header._replace(selection=True, draft_follows=follows))
