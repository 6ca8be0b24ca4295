"""A request that another connection took up, and how far a request came here and at its processor."""

import pytest

from tests.client.peer import code_of, opened
from tests.in_process.builders import generate_of
from tokenbus.delivery import RequestFailedError
from tokenbus.testing import RowShape, row_shapes
from tokenbus_contracts import RowStatus
from tokenbus_contracts.generated.request_pb2 import ErrorCode, RequestError

TAKEN_UP = RequestError(
    request_id=5, code=ErrorCode.ERROR_CODE_TAKEN_UP, message="another connection has it", emitted_tokens=9
)


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("has_rows", [False, True])
def test_request_that_was_taken_up_is_let_go(*, resumed: bool, has_rows: bool) -> None:
    peer = opened()
    tokens = peer.requests.open(generate_of(5))
    list(peer.says_all())
    if has_rows:
        peer.rows(RowShape(5, 0, 2))
    peer.numbered(error=TAKEN_UP)
    assert code_of(tokens) == ErrorCode.ERROR_CODE_TAKEN_UP
    peer.rows(RowShape(5, 2, 2))
    peer.requests.end_overdue(2**64)
    peer.welcome(resumed=resumed)
    peer.rows(RowShape(5, 0, 2))
    assert {frame.WhichOneof("body") for frame in peer.says_all()} <= {"confirm", "heartbeat"}


def test_strays_forget_the_oldest_first() -> None:
    """However many requests ended here, rows of the one that was taken up last are still no reason for an abort."""
    peer = opened()
    peer.rows(*row_shapes(range(100, 600)))
    peer.requests.open(generate_of(5))
    peer.numbered(error=TAKEN_UP)
    for first in (1000, 1500):
        peer.rows(*row_shapes(range(first, first + 500)))
    list(peer.says_all())
    peer.rows(RowShape(5))
    assert "abort" not in peer.bodies()
    assert len(peer.requests._ignored_ids) <= 1024


@pytest.mark.parametrize(("position", "rows", "came"), [(0, 2, 2), (30, 0, 30), (30, 2, 32)])
async def test_error_counts_the_tokens_that_came_here(position: int, rows: int, came: int) -> None:
    peer = opened()
    tokens = peer.requests.resume(5, position, include_drafts=False)
    if rows:
        peer.rows(RowShape(5, position, rows))
    lost = RequestError(request_id=5, code=ErrorCode.ERROR_CODE_WORKER_LOST, message="gone", emitted_tokens=40)
    peer.numbered(error=lost)
    assert tokens.error is not None
    assert tokens.error.emitted_tokens == came
    taken = [(await anext(tokens)).position for _ in range(rows)]
    assert taken == list(range(position, came))
    with pytest.raises(RequestFailedError, match=rf"gone \(after {came} tokens; 40 were generated\)") as failed:
        await anext(tokens)
    assert (failed.value.emitted_tokens, failed.value.generated_tokens) == (came, 40)


@pytest.mark.parametrize("by_columns", [False, True])
def test_rows_beyond_what_can_be_resumed_end_their_request(*, by_columns: bool) -> None:
    peer = opened()
    if by_columns:
        peer.requests.open_stream(lambda _output: None)
    far, other = peer.requests.resume(5, 2**31 - 2, include_drafts=False), peer.requests.open(generate_of(6))
    peer.rows(RowShape(5, 2**31 - 2, 1), RowShape(6, 0, 1))
    assert not far.has_ended
    peer.rows(RowShape(5, 2**31 - 1, 1), RowShape(6, 1, 1))
    assert far.error is not None
    assert far.error.message == "the number of tokens exceeds the limit: at most 2147483647 tokens, got 2147483648"
    list(peer.says_all())
    peer.welcome()
    assert [frame.resume.next_position for frame in peer.says_all() if frame.HasField("resume")] == [2]
    peer.rows(RowShape(6, 2, 1, RowStatus.FINISHED_LENGTH))
    assert other.status is RowStatus.FINISHED_LENGTH
