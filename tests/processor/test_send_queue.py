"""SendQueue and the frames in it: sent as a client's window allows, and kept until it acknowledges."""

from collections.abc import Sequence

import numpy as np
import pytest

from tests.in_process.builders import settings
from tokenbus.delivery import PendingAck
from tokenbus.processor.client_frames import OUTPUTS, Frame, output_frames
from tokenbus.processor.send_queue import Budget, SendQueue
from tokenbus.testing import RowShape, batch, row_shapes
from tokenbus_contracts import BatchKind, LogprobBatch, decode
from tokenbus_contracts.frames import read_frame, write_frame
from tokenbus_contracts.generated.client_pb2 import ServerFrame
from tokenbus_contracts.generated.request_pb2 import ErrorCode, RequestError

LIMITS = settings().limits


def frame(size: int = 10, pending_ack: PendingAck | None = None) -> Frame:
    return Frame(OUTPUTS, [bytes(size)], pending_ack or PendingAck())


def news(key: int = 1) -> Frame:
    error = RequestError(request_id=key, code=ErrorCode.ERROR_CODE_GAP, message="x")
    return Frame(write_frame(ServerFrame(error=error)))


def send_queue(frames: int = 4, size: int = 100_000, *, window_frames: int = 64, window_bytes: int = 1000) -> SendQueue:
    made = SendQueue(frames, size, Budget(size))
    made.connect(window_frames, window_bytes)
    return made


def read(made: Frame) -> ServerFrame:
    return read_frame(ServerFrame, made.body)


def sent(box: SendQueue) -> list[int]:
    numbers = []
    while (message := box.next_message()) is not None:
        numbers.append(read_frame(ServerFrame, message[0]).number)
        box.sent()
    return numbers


def keys(batches: Sequence[LogprobBatch]) -> list[list[int]]:
    return [each.request_ids.tolist() for each in batches]


def test_window_in_bytes_is_used_exactly() -> None:
    box = send_queue(window_bytes=20)
    for _ in range(3):
        box.put(frame(10))
    assert sent(box) == [1, 2]
    box.ack(1)
    assert sent(box) == [3]
    box = send_queue(window_bytes=19)
    for _ in range(2):
        box.put(frame(10))
    assert sent(box) == [1]


def test_acknowledging_what_was_not_sent_is_refused() -> None:
    box = send_queue()
    box.put(frame())
    assert not box.ack(1)
    sent(box)
    assert not box.ack(2)
    assert len(box) == 1
    assert box.ack(1)


def test_send_queue_is_over_full_beyond_its_bounds() -> None:
    box = send_queue(frames=2)
    for _ in range(2):
        box.put(frame(50))
        box.put(news())
        assert not box.is_over_full
    box.put(frame(0))
    assert box.is_over_full
    assert (box.outputs, len(box), box.bytes) == (3, 5, sum(each.cost for each in box.frames()))
    box = send_queue(frames=9, size=frame(100).cost)
    box.put(frame(100))
    assert not box.is_over_full
    box.put(news())
    assert box.is_over_full


def test_news_costs_what_it_takes_in_memory() -> None:
    """An error costs its bytes and what a frame takes beside them, so a client cannot pile up a million for nothing."""
    budget = Budget(10_000)
    box = SendQueue(4, 10_000, budget)
    made = news()
    assert made.cost > len(made.body) + 500
    while not box.is_over_full:
        box.put(news())
    assert len(box) <= 10_000 // 500 + 1
    assert budget.is_exceeded
    box.discard()
    assert budget.bytes == 0


def test_draft_follows_its_target() -> None:
    """What was drafted is the frame's second part, and the first one says that it is there (case 4)."""
    target, draft = batch(row_shapes([3, 5])), batch(row_shapes([3, 5]), kind=BatchKind.DRAFT)
    (made,) = output_frames(target, draft, PendingAck(), LIMITS)
    first, second = (decode(part) for part in made.parts)
    assert read(made).outputs.has_draft
    assert (first.header.draft_follows, second.header.draft_follows) == (True, False)
    assert (first.header.kind, second.header.kind) == (BatchKind.TARGET, BatchKind.DRAFT)
    assert made.size == len(made.parts[0]) + len(made.parts[1])


@pytest.mark.parametrize(("count", "sizes"), [(4, [4]), (5, [4, 1]), (8, [4, 4]), (9, [4, 4, 1])])
def test_more_rows_than_a_message_may_have_become_several_frames(count: int, sizes: list[int]) -> None:
    """A step may have more rows than a message: each frame has as many as may be, and none is lost (case 26)."""
    limits = settings({"limits.max_rows": 4}).limits
    wanted = row_shapes(range(1, count + 1))
    target = batch(wanted)
    draft = batch(wanted[::-1], indices=range(count)[::-1], kind=BatchKind.DRAFT)
    made = output_frames(target, draft, PendingAck(), limits)
    targets, drafts = ([decode(each.parts[part], limits) for each in made] for part in (0, 1))
    assert [each.row_count for each in targets] == sizes
    assert sum(keys(targets), []) == list(range(1, count + 1))  # noqa: RUF017 - a few
    assert [sorted(each) for each in keys(drafts)] == keys(targets)


def test_rows_of_one_request_are_found() -> None:
    target, draft = batch([RowShape(3), RowShape(5)]), batch([RowShape(3), RowShape(5)], kind=BatchKind.DRAFT)
    (made,) = output_frames(target, draft, PendingAck(), LIMITS)
    five = np.array([5], np.uint64)
    found = made.rows_of(five, LIMITS)
    assert [each.request_ids.tolist() for each in found if each is not None] == [[5], [5]]
    (bare,) = output_frames(target, draft.select(np.array([0])), PendingAck(), LIMITS)
    assert bare.rows_of(five, LIMITS)[1] is None
    (other,) = output_frames(batch([RowShape(4), RowShape(6)]), None, PendingAck(), LIMITS)
    box = send_queue(frames=9)
    for each in (other, made, news(5), bare, other):
        box.put(each)
    assert box.frames_of(five) == [made, bare]
    assert box.frames_of(np.array([4, 3], np.uint64)) == [other, made, bare, other]
    assert box.frames_of(np.array([9], np.uint64)) == []


def test_number_is_put_before_a_frame_as_protobuf_writes_it() -> None:
    made = news()
    box = send_queue(window_frames=400)
    for number in range(1, 301):
        box.put(made)
        message = box.next_message()
        frame = read(made)
        frame.number = number
        assert message == [write_frame(frame)]
        box.sent()
