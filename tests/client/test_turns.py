"""A request that loses its worker asks for another turn; its client decides, and accepts rows of that turn alone."""

from typing import Any

import pytest

from tests.client.peer import Peer, code_of, opened, positions
from tests.in_process.builders import generate_of, ids
from tokenbus.client.requests import OpenRequests
from tokenbus.client.tokens import RequestTokens, Turn
from tokenbus.testing import RowShape, batch
from tokenbus_contracts import RowStatus, encode
from tokenbus_contracts.generated.client_pb2 import ClientFrame, Outputs
from tokenbus_contracts.generated.request_pb2 import Admitted, ContinuationPolicy, ErrorCode, Generate, RequestError

ANY = 0
LOST, ENGINE, GAP = ErrorCode.ERROR_CODE_WORKER_LOST, ErrorCode.ERROR_CODE_ENGINE, ErrorCode.ERROR_CODE_GAP
NO_WORKER, INVALID = ErrorCode.ERROR_CODE_NO_WORKER, ErrorCode.ERROR_CODE_INVALID_REQUEST


def begun(tokens: int = 2, **fields: Any) -> tuple[Peer, RequestTokens]:  # noqa: ANN401 - as the message has them
    peer = opened()
    source = peer.requests.open(generate_of(5, 9, **({"continuation_policy": ANY} | fields)))
    list(peer.says_all())
    if tokens:
        peer.rows(RowShape(5, 0, tokens))
    list(peer.says_all())
    return peer, source


def end(peer: Peer, code: ErrorCode, key: int = 5) -> list[ClientFrame]:
    retry = 1000 if code == NO_WORKER else 0
    peer.numbered(error=RequestError(request_id=key, code=code, message="so it is", retry_after_ms=retry))
    return list(peer.says_all())


def asked(frames: list[ClientFrame]) -> Generate:
    (found,) = [frame.generate for frame in frames if frame.HasField("generate")]
    return found


@pytest.mark.parametrize(
    ("code", "reason"), [(LOST, "worker_lost"), (ENGINE, "engine"), (GAP, "gap"), (3, "unknown_request")]
)
def test_next_turn_goes_on_behind_the_accepted_tokens(code: ErrorCode, reason: str) -> None:
    """It has a fresh id, and the client ends the turn before it first."""
    peer, source = begun(top_logprobs=2, deadline_ms=50)
    peer.numbered(admitted=Admitted(request_id=5, worker_id="w", epoch=1, deadline_unix_ms=77, weight_version=6))
    said = end(peer, code)
    assert [list(frame.ended.request_ids) for frame in said] == [[5], []]
    generate = asked(said)
    assert generate.request_id not in (0, 5)
    assert generate.first_request_id == 5
    assert list(generate.continuation.token_ids) == ids(5, 0, 2)
    assert (generate.continuation.turn, generate.continuation.reason) == (1, code)
    assert (generate.deadline_ms, generate.deadline_unix_ms) == (0, 77)
    assert (generate.top_logprobs, list(generate.tokens.token_ids)) == (2, [0, 1, 2])
    peer.rows(RowShape(generate.request_id, 2, 3, RowStatus.FINISHED_STOP))
    assert positions(source) == [(0, 2), (2, 3)]
    assert source.status is RowStatus.FINISHED_STOP
    assert source.turns == [Turn(0, 5, "", "w", 6), Turn(2, generate.request_id, reason)]


def test_rows_of_an_earlier_turn_are_dropped() -> None:
    """As when its worker is heard again: each is told once to end it, and gives no token."""
    peer, source = begun()
    first = asked(end(peer, LOST)).request_id
    second = asked(end(peer, LOST, first)).request_id
    for key in (5, first):
        peer.rows(RowShape(key, 2, 1))
        assert [frame.abort.request_id for frame in peer.says_all() if frame.HasField("abort")] == [key]
        peer.numbered(error=RequestError(request_id=key, code=LOST, message="late"))
    peer.rows(RowShape(second, 2, 1, RowStatus.FINISHED_LENGTH))
    assert positions(source) == [(0, 2), (2, 1)]
    assert (source.error, peer.requests.late) == (None, 2)


def test_three_losses_without_a_token_end_it() -> None:
    """It may be what kills its workers; a token in between begins the count anew."""
    peer, source = begun()
    key = 5
    for tokens in (0, 1, 0):
        key = asked(end(peer, LOST, key)).request_id
        if tokens:
            peer.rows(RowShape(key, 2, 1))
    key = asked(end(peer, ENGINE, key)).request_id
    assert not [frame for frame in end(peer, LOST, key) if frame.HasField("generate")]
    assert source.error is not None
    assert (source.error.code, source.error.emitted_tokens, source.error.request_id) == (LOST, 3, 5)
    assert not peer.requests.open_count


def test_losses_that_are_no_fault_of_the_request_are_not_counted() -> None:
    peer, source = begun()
    key = 5
    for _ in range(9):
        key = asked(end(peer, ErrorCode.ERROR_CODE_UNKNOWN_REQUEST, key)).request_id
    assert not source.has_ended


def test_cached_tokens_are_those_of_the_prompt() -> None:
    """A later turn's count, which is of the prompt and the accepted tokens, is ignored once a token has come."""
    peer, source = begun(0)
    peer.numbered(admitted=Admitted(request_id=5, worker_id="w", epoch=1, cached_tokens=3))
    peer.rows(RowShape(5, 0, 2))
    key = asked(end(peer, LOST)).request_id
    peer.numbered(admitted=Admitted(request_id=key, worker_id="w", epoch=1, cached_tokens=9))
    assert source.cached_tokens == 3


@pytest.mark.parametrize("code", [INVALID, ErrorCode.ERROR_CODE_DEADLINE, ErrorCode.ERROR_CODE_SLOW_CLIENT, NO_WORKER])
def test_other_errors_end_it(code: ErrorCode) -> None:
    peer, source = begun()
    assert not [frame for frame in end(peer, code) if frame.HasField("generate")]
    assert code_of(source) == code


def test_aborted_or_resumed_or_unwilling_request_is_not_continued() -> None:
    peer, aborted = begun()
    peer.requests.abort(5)
    end(peer, LOST)
    assert code_of(aborted) == LOST
    peer = opened()
    resumed = peer.requests.resume(5, 2, include_drafts=False)
    end(peer, LOST)
    assert code_of(resumed) == LOST
    peer = opened()
    unwilling = peer.requests.open(generate_of(5, 9))
    peer.rows(RowShape(5, 0, 2))
    end(peer, LOST)
    assert code_of(unwilling) == LOST


def test_state_that_the_engine_lost_is_computed_elsewhere() -> None:
    peer, source = begun()
    peer.rows(RowShape(5, 2, 0, RowStatus.UNRECOVERABLE))
    assert asked(list(peer.says_all())).continuation.reason == ENGINE
    assert not source.has_ended


def test_engine_that_cannot_go_on_leaves_the_first_error() -> None:
    peer, source = begun()
    key = asked(end(peer, LOST)).request_id
    end(peer, INVALID, key)
    assert source.error is not None
    assert (source.error.code, source.error.message) == (LOST, "so it is; not continued: so it is")


def test_turn_waits_for_a_worker() -> None:
    """The only one may be starting again: each look asks anew, until the client's patience is over."""
    peer, source = begun()
    said = end(peer, LOST)
    looks = 0
    while not source.has_ended:
        assert not [frame for frame in end(peer, NO_WORKER, asked(said).request_id) if frame.HasField("generate")]
        peer.now += 1
        peer.requests.look(peer.now)
        said, looks = list(peer.says_all()), looks + 1
    assert looks == 31
    assert code_of(source) == LOST


def test_turn_without_a_processor_is_sent_to_the_next_life() -> None:
    peer, source = begun()
    end(peer, LOST)
    peer.session.disconnected(peer.now)
    list(peer.says_all())
    peer.welcome(processor_id="q")
    said = list(peer.says_all())
    (resume,) = [frame.resume for frame in said if frame.HasField("resume")]
    generate = asked(end(peer, ErrorCode.ERROR_CODE_UNKNOWN_REQUEST, resume.request_id))
    assert list(generate.continuation.token_ids) == ids(5, 0, 2)
    assert not source.has_ended


def test_prompt_is_scored_again_before_the_first_token_alone() -> None:
    peer, _ = begun(0, prompt_scoring={})
    generate = asked(end(peer, LOST))
    assert generate.HasField("prompt_scoring")
    assert not generate.continuation.token_ids
    peer, _ = begun(2, prompt_scoring={})
    generate = asked(end(peer, LOST))
    assert not generate.HasField("prompt_scoring")


def test_turn_with_the_same_weights_is_not_asked_for_again() -> None:
    """It names the version of the last token. Once no processor has a worker with that version, the request ends."""
    peer, source = begun(0, continuation_policy=ContinuationPolicy.CONTINUATION_POLICY_SAME_WEIGHTS)
    for position in range(2):
        made = batch([RowShape(5, position, 1)], selection=True)
        peer.numbered(encode(made.headed(made.header._replace(weight_version=3 + position))), outputs=Outputs())
    generate = asked(end(peer, LOST))
    assert generate.continuation.weight_version == 4
    end(peer, NO_WORKER, generate.request_id)
    assert source.error is not None
    assert (source.error.code, source.error.message) == (LOST, "so it is; not continued: so it is")


def test_prompt_and_tokens_together_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenbus.client.open_request._MOST_TOKENS", 4)
    peer, source = begun()
    end(peer, LOST)
    assert code_of(source) == LOST


def test_ids_of_turns_are_drawn_at_random() -> None:
    drawn = {OpenRequests(1, 1.0)._new_id() for _ in range(99)}
    assert len(drawn) == 99
    assert max(drawn) > 1 << 56
