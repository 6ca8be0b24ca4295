"""ClientSession: requests go out, their tokens come in once and in order, and every request has an end."""

import pytest

from tests.client.peer import HELLO_FIRST, Peer, opened, positions
from tests.in_process.builders import generate_of, ids
from tokenbus.client import RequestEnd, StepRows
from tokenbus.testing import RowShape
from tokenbus_contracts import ContractError, RowStatus
from tokenbus_contracts.generated.client_pb2 import Outputs
from tokenbus_contracts.generated.request_pb2 import Admitted, ErrorCode, RequestError
from tokenbus_contracts.generated.stream_pb2 import Refusal

FINISHED, ABORTED = RowStatus.FINISHED_LENGTH, RowStatus.ABORTED
BROKEN = RequestError(request_id=5, code=ErrorCode.ERROR_CODE_ENGINE, message="broke")


def test_nothing_is_asked_before_the_handshake() -> None:
    """What is wanted while there is no connection is asked for when there is one, and once (case 19)."""
    peer = Peer()
    peer.requests.open(generate_of(5))
    peer.requests.resume(6, 3, include_drafts=True)
    peer.session.watch("w", lambda *_: None)
    assert peer.bodies() == ["hello"]
    peer.welcome()
    first, second, third = peer.says_all()
    assert first.generate.request_id == 5
    resume = second.resume
    assert (resume.request_id, resume.next_position, resume.include_draft_logprobs) == (6, 3, True)
    assert third.watch.worker_id == "w"


@pytest.mark.parametrize("field", ["top_logprobs", "request_id", "prompt"])
def test_request_that_breaks_its_bounds_is_refused_where_it_is_asked_for(field: str) -> None:
    peer = opened()
    generate = generate_of(5)
    if field == "prompt":
        generate.ClearField("tokens")
    else:
        setattr(generate, field, 500 if field == "top_logprobs" else 0)
    with pytest.raises(ContractError):
        peer.requests.open(generate)
    with pytest.raises(ContractError):
        peer.requests.resume(0, 0, include_drafts=False)
    assert peer.session.outstanding == 0
    assert peer.bodies() == []


def test_repeated_and_overlapping_rows_are_taken_once() -> None:
    """Rows that were there before are left out, and those that overlap keep what is new (case 14, 17)."""
    peer = opened()
    tokens = peer.requests.open(generate_of(5))
    for position, count in ((0, 2), (0, 2), (1, 1), (1, 3)):
        peer.rows(RowShape(5, position, count))
    peer.rows(RowShape(5, 3, 0, RowStatus.IDLE))
    peer.rows(RowShape(5, 4, 0, RowStatus.PREEMPTED))
    assert positions(tokens) == [(0, 2), (1, 3), (4, 0)]
    assert peer.requests.repeated == 3
    peer.rows(RowShape(5, 4, 0, FINISHED))
    assert tokens.status is FINISHED


def test_hole_ends_the_request_and_says_what_is_missing() -> None:
    """Tokens that never came end their request with an error that names them, and the client aborts it (case 21)."""
    peer = opened()
    tokens, other = peer.requests.open(generate_of(5)), peer.requests.open(generate_of(6))
    list(peer.says_all())
    peer.rows(RowShape(5, 0, 2), RowShape(6, 0, 2))
    peer.rows(RowShape(5, 3, 1), RowShape(6, 2, 1))
    assert tokens.error is not None
    assert (tokens.error.code, tokens.error.emitted_tokens) == (ErrorCode.ERROR_CODE_GAP, 2)
    assert tokens.error.message == "tokens 2 to 2 never came from the processor"
    assert positions(other) == [(0, 2), (2, 1)]
    assert "abort" in peer.bodies()


def test_consumer_that_leaves_too_much_waiting_is_ended() -> None:
    """As many rows as may wait do; one more ends the request as slow, with what waits still to be taken (case 20)."""
    peer = opened(most=2)
    tokens = peer.requests.open(generate_of(5))
    for position in range(2):
        peer.rows(RowShape(5, position, 1))
    assert not tokens.has_ended
    list(peer.says_all())
    peer.rows(RowShape(5, 2, 1))
    assert tokens.error is not None
    assert (tokens.error.code, tokens.error.emitted_tokens) == (ErrorCode.ERROR_CODE_SLOW_CLIENT, 3)
    assert len(tokens) == 3
    assert peer.bodies() == ["abort", "confirm"]


def test_abort_is_asked_once_and_the_end_comes_as_usual() -> None:
    peer = opened()
    tokens = peer.requests.open(generate_of(5))
    list(peer.says_all())
    for _ in range(2):
        peer.requests.abort(5)
    assert peer.bodies() == ["abort"]
    peer.rows(RowShape(5, 0, 0, ABORTED))
    assert tokens.status is ABORTED


def test_request_that_is_not_open_here_may_be_aborted() -> None:
    """Another client of the same owner may have it; the processor knows."""
    peer = opened()
    peer.requests.abort(99)
    assert [frame.abort.request_id for frame in peer.says_all() if frame.HasField("abort")] == [99]


# Acks.


@pytest.mark.parametrize(
    ("window", "count"),
    [({"window_frames": 16}, 2), ({"window_frames": 17}, 3), ({"window_frames": 1}, 1), ({"window_bytes": 1}, 1)],
)
def test_frames_are_acked_together(window: dict[str, int], count: int) -> None:
    """While requests are open, an ack is sent for an eighth of the window, in frames or in bytes."""
    peer = opened(**window)
    peer.requests.open(generate_of(5))
    list(peer.says_all())
    for position in range(2 * count):
        peer.rows(RowShape(5, position, 1))
        is_much = (position + 1) % count == 0
        assert [frame.confirm.through_number for frame in peer.says_all()] == [position + 1] * is_much


def test_few_frames_are_acked_after_a_while() -> None:
    peer = opened()
    peer.requests.open(generate_of(5))
    list(peer.says_all())
    peer.rows(RowShape(5, 0, 1))
    assert peer.bodies() == []
    wait = peer.session.seconds_to_wait(peer.now)
    assert wait == pytest.approx(0.05)
    peer.now += wait / 2
    peer.rows(RowShape(5, 1, 1))
    assert peer.bodies() == []
    peer.requests.is_paused = True
    peer.now += wait
    assert peer.session.seconds_to_wait(peer.now) > wait
    assert peer.bodies() == []
    peer.requests.is_paused = False
    assert [frame.confirm.through_number for frame in peer.says_all()] == [2]
    assert peer.session.seconds_to_wait(peer.now) > wait


def test_frame_that_comes_again_is_dropped() -> None:
    peer = opened()
    tokens = peer.requests.open(generate_of(5))
    peer.rows(RowShape(5, 0, 1))
    peer.number = 0
    peer.rows(RowShape(5, 1, 1))
    assert positions(tokens) == [(0, 1)]
    assert peer.requests.repeated == 1


def test_frame_that_is_missing_is_asked_for() -> None:
    """A number that was skipped is a frame that was lost: after a hello all that was not acked comes (case 17)."""
    peer = opened()
    tokens = peer.requests.open(generate_of(5))
    list(peer.says_all())
    peer.number = 1
    peer.rows(RowShape(5, 1, 1))
    assert positions(tokens) == []
    assert peer.bodies() == ["hello"]
    peer.welcome(resumed=True)
    for position in range(2):
        peer.rows(RowShape(5, position, 1))
    assert positions(tokens) == [(0, 1), (1, 1)]


@pytest.mark.parametrize("parts", [[], [b"x", b"y"]])
def test_outputs_without_their_batches_are_refused(parts: list[bytes]) -> None:
    peer = opened()
    with pytest.raises(ContractError, match="2 parts"):
        peer.numbered(*parts, outputs=Outputs(has_draft=False))
    with pytest.raises(ContractError, match="a frame, and its batches"):
        peer.session.receive([], peer.now)


# Watching, and whole outputs.


def test_whole_outputs_are_shown_with_their_drafts() -> None:
    """A caller that wants outputs as columns gets each step's rows, and what was drafted for them beside (case 4)."""
    peer = opened()
    seen: list[StepRows | RequestEnd] = []
    peer.requests.open_stream(seen.append)
    tokens = [peer.requests.open(generate_of(key)) for key in (5, 6)]
    peer.rows(RowShape(5, 0, 2), RowShape(6, 0, 1), drafted=[RowShape(5, 0, 3)])
    (rows,) = seen
    assert isinstance(rows, StepRows)
    target, draft = rows
    assert target.request_ids.tolist() == [5, 6]
    assert draft is not None
    assert draft.request_ids.tolist() == [5]
    assert [len(each) for each in tokens] == [0, 0]


def test_columns_have_each_row_and_each_token_once() -> None:
    """What is sent again is left out of the columns, and so are the tokens that were there before (case 14, 17)."""
    peer = opened()
    outputs: list[StepRows | RequestEnd] = []
    peer.requests.open_stream(outputs.append)
    for key in (5, 6):
        peer.requests.open(generate_of(key))
    peer.rows(RowShape(5, 0, 2), RowShape(6, 0, 1))
    peer.rows(RowShape(5, 0, 2), RowShape(6, 0, 1))
    peer.rows(RowShape(5, 1, 2), RowShape(6, 0, 1), RowShape(9, 0, 1))
    seen = [output.target for output in outputs if isinstance(output, StepRows)]
    found = [(batch.request_ids.tolist(), batch.positions.tolist(), batch.token_counts.tolist()) for batch in seen]
    assert found == [([5, 6], [0, 0], [2, 1]), ([5], [2], [1])]
    assert seen[1].token_ids.tolist() == ids(5, 2, 3)


# What is known after the connection broke.


def test_same_processor_is_not_asked_for_what_it_knows() -> None:
    peer = opened()
    peer.requests.open(generate_of(5))
    peer.requests.open(generate_of(6))
    list(peer.says_all())
    peer.numbered(admitted=Admitted(request_id=5, worker_id="w", epoch=1, prompt_tokens=1))
    peer.requests.abort(5)
    peer.hear(refusal=Refusal(reason=HELLO_FIRST, message="again"))
    peer.says()
    peer.welcome(resumed=True)
    again = [frame for frame in peer.says_all() if not frame.HasField("heartbeat")]
    assert [frame.WhichOneof("body") for frame in again[-2:]] == ["abort", "generate"]
    assert again[-1].generate.request_id == 6


@pytest.mark.parametrize("resumed", [False, True])
def test_other_processor_is_asked_for_the_rest_of_everything(resumed: bool) -> None:  # noqa: FBT001 - pytest names it
    peer = opened()
    peer.requests.open(generate_of(5, include_draft_logprobs=True))
    peer.requests.open(generate_of(6))
    list(peer.says_all())
    peer.rows(RowShape(5, 0, 2))
    peer.requests.abort(6)
    peer.session.watch("w", lambda *_: None)
    peer.hear(refusal=Refusal(reason=HELLO_FIRST, message="again"))
    peer.says()
    peer.welcome(resumed=resumed, processor_id="other")
    first, second, third, fourth = peer.says_all()
    assert (first.resume.request_id, first.resume.next_position) == (5, 2)
    assert first.resume.include_draft_logprobs
    assert (second.resume.request_id, second.resume.next_position) == (6, 0)
    assert (third.abort.request_id, fourth.watch.worker_id) == (6, "w")


def test_aborted_request_that_nobody_has_is_not_asked_for_anew() -> None:
    peer = opened()
    tokens = peer.requests.open(generate_of(5))
    list(peer.says_all())
    peer.requests.abort(5)
    peer.hear(refusal=Refusal(reason=HELLO_FIRST, message="again"))
    peer.says()
    peer.welcome(processor_id="other")
    list(peer.says_all())
    peer.hear(error=RequestError(request_id=5, code=ErrorCode.ERROR_CODE_UNKNOWN_REQUEST, message="nobody has it"))
    assert "generate" not in peer.bodies()
    assert tokens.status is ABORTED
    assert peer.session.outstanding == 0


def test_aborted_request_that_nobody_was_asked_for_ends_at_once() -> None:
    peer = Peer()
    tokens = peer.requests.open(generate_of(5))
    peer.requests.abort(5)
    assert tokens.status is ABORTED
    assert peer.session.outstanding == 0
    peer.says()
    peer.welcome()
    assert peer.bodies() == ["heartbeat"]


def test_request_that_nobody_has_is_asked_for_anew() -> None:
    """What was asked for and never came anywhere is asked for once more; what had come somewhere ends (case 21)."""
    peer = opened()
    fresh, taken = peer.requests.open(generate_of(5)), peer.requests.open(generate_of(6))
    list(peer.says_all())
    peer.rows(RowShape(6, 0, 2))
    list(peer.says_all())
    for key in (5, 6):
        unknown = RequestError(request_id=key, code=ErrorCode.ERROR_CODE_UNKNOWN_REQUEST, message="nobody has it")
        peer.numbered(error=unknown)
    (sent,) = [frame.generate for frame in peer.says_all() if frame.HasField("generate")]
    assert sent.first_request_id == 5
    assert sent.request_id != 5  # a worker that comes later may bring the first one
    peer.rows(RowShape(sent.request_id, 0, 1))
    assert positions(fresh) == [(0, 1)]
    assert not fresh.has_ended
    assert taken.error is not None
    assert taken.error.emitted_tokens == 2
