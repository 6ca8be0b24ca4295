"""OpenRequests over several processors: where a request goes, and where it goes on when its processor is away."""

from typing import Any

import pytest

from tests.client.peer import TIMEOUT, Peer, code_of, positions
from tests.in_process.builders import generate_of, ids
from tokenbus.client.tokens import Turn
from tokenbus.testing import RowShape
from tokenbus_contracts import RowStatus
from tokenbus_contracts.generated.client_pb2 import ModelRoom, Room
from tokenbus_contracts.generated.request_pb2 import ErrorCode, Generate, RequestError
from tokenbus_contracts.generated.stream_pb2 import Goodbye, GoodbyeReason

ANY, OFF = 0, 1
CONTINUE_AFTER = 2.0
PATIENCE = 30.0
UNKNOWN, LOST = ErrorCode.ERROR_CODE_UNKNOWN_REQUEST, ErrorCode.ERROR_CODE_WORKER_LOST
FULL, NO_WORKER = ErrorCode.ERROR_CODE_OVERLOADED, ErrorCode.ERROR_CODE_NO_WORKER


class Two:
    """A client of two processors, `a` and `b`, which the test plays."""

    def __init__(self, *, are_open: bool = True) -> None:
        self.a = Peer(has_several=True)
        self.requests = self.a.requests
        self.b = Peer(requests=self.requests)
        for peer, name in ((self.a, "a"), (self.b, "b")):
            if are_open:
                assert peer.says() is not None
                peer.welcome(processor_id=name)
                list(peer.says_all())

    def pass_time(self, seconds: float, *heard: Peer) -> list[Generate]:
        found = []
        for _ in range(round(seconds)):
            for peer in (self.a, self.b):
                peer.now += 1
                if peer in heard:
                    peer.hear(heartbeat={"sent_at_ns": 1})
            self.requests.look(self.a.now)
            found += [*sent(self.a), *sent(self.b)]
        return found

    def room(self, peer: Peer, **models: int) -> None:
        found = [
            ModelRoom(model=name.replace("any", ""), free_requests=free, workers=1) for name, free in models.items()
        ]
        peer.hear(room=Room(models=found))


def error(peer: Peer, code: ErrorCode, key: int = 5, emitted: int = 0) -> None:
    retry = 1000 if code in (FULL, NO_WORKER) else 0
    found = RequestError(request_id=key, code=code, message="so", emitted_tokens=emitted, retry_after_ms=retry)
    peer.numbered(error=found)


def keys(peer: Peer, body: str) -> list[int]:
    return [getattr(frame, body).request_id for frame in peer.says_all() if frame.HasField(body)]


def sent(peer: Peer) -> list[Generate]:
    return [frame.generate for frame in peer.says_all() if frame.HasField("generate")]


def over(peer: Peer) -> set[int]:
    return {key for frame in peer.says_all() for key in frame.ended.request_ids}


def begun(tokens: int = 2, policy: int = ANY) -> tuple[Two, Any]:
    two = Two()
    two.room(two.a, any=9)
    source = two.requests.open(generate_of(5, continuation_policy=policy))
    assert keys(two.a, "generate") == [5]
    two.a.rows(RowShape(5, 0, tokens))
    list(two.a.says_all())
    return two, source


def test_new_requests_go_where_there_is_room() -> None:
    """What was sent since the processor said so is counted, and one without a worker for the model gets none."""
    two = Two()
    two.room(two.a, small=3)
    two.room(two.b, small=1, large=1)
    for key, model in enumerate(["small"] * 4 + ["large"] * 2, 1):
        two.requests.open(generate_of(key, model=model))
    at_a, at_b = keys(two.a, "generate"), keys(two.b, "generate")
    assert set(at_a) == {1, 2, 3}
    assert set(at_b) == {4, 5, 6}
    two.room(two.a, small=7)
    two.requests.open(generate_of(7, model="small"))
    assert keys(two.a, "generate") == [7]


@pytest.mark.parametrize("code", [FULL, NO_WORKER])
def test_request_that_one_does_not_take_goes_to_the_other(code: ErrorCode) -> None:
    two = Two()
    two.room(two.a, any=1)
    source = two.requests.open(generate_of(5))
    error(two.a, code)
    assert keys(two.b, "generate") == [5]
    assert not source.has_ended
    error(two.b, code)
    assert code_of(source) == code
    assert len(two.requests) == 0


def test_request_waits_for_the_workers_of_a_processor_that_closes() -> None:
    """They come to another one; once the closed one has been away for too long, the refusal counts."""
    two = Two()
    two.room(two.a, any=1)
    sources = [two.requests.open(generate_of(key)) for key in (5, 6)]
    for key in (5, 6):
        two.a.numbered(error=RequestError(request_id=key, code=FULL, message="closes"))
    assert keys(two.b, "generate") == [5, 6]
    for key in (5, 6):
        error(two.b, NO_WORKER, key)
    assert [source.has_ended for source in sources] == [False, False]
    two.room(two.b, any=1)
    assert keys(two.b, "generate") == [5, 6]
    two.b.rows(RowShape(5, 0, 1, RowStatus.FINISHED_LENGTH))
    assert sources[0].has_ended
    two.a.hear(goodbye=Goodbye(reason=GoodbyeReason.GOODBYE_REASON_RESTARTING))
    for _ in range(round(PATIENCE) + 1):
        error(two.b, FULL, 6)
        two.pass_time(1, two.b)
    assert code_of(sources[1]) == FULL


def test_worker_that_comes_while_a_request_waits_at_another_processor_gets_it() -> None:
    two = Two()
    two.room(two.a, any=1)
    source = two.requests.open(generate_of(5))
    assert keys(two.a, "generate") == [5]
    error(two.a, NO_WORKER)
    assert keys(two.b, "generate") == [5]
    two.room(two.a, any=1)
    error(two.b, NO_WORKER)
    assert keys(two.a, "generate") == [5]
    assert not source.has_ended


@pytest.mark.parametrize("how", ["silent", "disconnected", "goodbye"])
def test_request_of_a_processor_that_stays_away_goes_on_at_another(how: str) -> None:
    two, source = begun()
    if how == "disconnected":
        two.a.session.disconnected(two.a.now)
    elif how == "goodbye":
        two.a.hear(goodbye=Goodbye(reason=GoodbyeReason.GOODBYE_REASON_RESTARTING))
    assert two.pass_time(CONTINUE_AFTER - 1, two.b) == []
    (again,) = two.pass_time(1, two.b)
    assert (again.first_request_id, list(again.continuation.token_ids)) == (5, ids(5, 0, 2))
    two.b.rows(RowShape(again.request_id, 2, 1, RowStatus.FINISHED_LENGTH))
    assert positions(source) == [(0, 2), (2, 1)]
    assert source.turns == [Turn(0, 5), Turn(2, again.request_id, "unknown_request")]


def test_time_in_which_the_client_stood_still_is_no_silence() -> None:
    two, source = begun()
    two.pass_time(1, two.a, two.b)
    two.a.now = two.b.now = two.a.now + 2 * CONTINUE_AFTER
    two.requests.look(two.a.now)
    assert sent(two.b) == []
    assert len(source.turns) == 1


def test_processor_that_is_back_in_time_goes_on() -> None:
    two, source = begun()
    two.a.session.disconnected(two.a.now)
    assert two.pass_time(CONTINUE_AFTER - 1, two.b) == []
    two.a.welcome(processor_id="a-2")
    assert keys(two.a, "resume") == [5]
    two.a.rows(RowShape(5, 2, 1, RowStatus.FINISHED_LENGTH))
    assert len(source.turns) == 1


def test_processor_that_returns_hears_that_older_turns_are_over() -> None:
    """What it still sends of them is no token: each is told once to end it."""
    two, source = begun()
    (again,) = two.pass_time(CONTINUE_AFTER, two.b)
    two.pass_time(TIMEOUT, two.b)
    two.a.welcome(processor_id="a", resumed=True)
    assert over(two.a) == {5}
    two.a.rows(RowShape(5, 2, 4))
    assert keys(two.a, "abort") == [5]
    error(two.a, LOST)
    two.b.rows(RowShape(again.request_id, 2, 1, RowStatus.FINISHED_LENGTH))
    assert positions(source) == [(0, 2), (2, 1)]
    assert source.status is RowStatus.FINISHED_LENGTH


def test_processors_hear_that_the_first_turn_is_over_before_the_second_is_sent() -> None:
    two, _ = begun()
    two.a.now = two.b.now = two.a.now + CONTINUE_AFTER
    two.b.hear(heartbeat={"sent_at_ns": 1})
    two.requests.look(two.a.now)
    said = [frame for frame in two.b.says_all() if not frame.HasField("heartbeat")]
    assert [list(frame.ended.request_ids) for frame in said] == [[5], []]
    assert said[1].generate.first_request_id == 5


def test_request_that_cannot_be_continued_waits_for_its_processor() -> None:
    two, source = begun(policy=OFF)
    assert two.pass_time(PATIENCE, two.b) == []
    assert not source.has_ended
    two.a.welcome(processor_id="a-2")
    assert keys(two.a, "resume") == [5]
    two.a.session.disconnected(two.a.now)
    assert two.pass_time(PATIENCE + 2, two.b) == []
    assert code_of(source) == ErrorCode.ERROR_CODE_DEADLINE
    assert source.error.message == "no processor answered for 30000 ms"


def test_request_without_another_processor_waits_for_its_own() -> None:
    two, source = begun()
    two.b.session.disconnected(two.b.now)
    assert two.pass_time(TIMEOUT + 2) == []
    two.a.welcome(processor_id="a", resumed=True)
    two.a.rows(RowShape(5, 2, 1, RowStatus.FINISHED_LENGTH))
    assert source.status is RowStatus.FINISHED_LENGTH


@pytest.mark.parametrize("policy", [ANY, OFF])
def test_request_that_never_reached_its_processor_is_sent_under_another_id(policy: int) -> None:
    """A worker that the client does not hear of may run it under the first one. It has lost nothing yet."""
    two = Two()
    two.room(two.a, any=1)
    two.requests.open(generate_of(5, continuation_policy=policy))
    assert keys(two.a, "generate") == [5]
    (again,) = two.pass_time(CONTINUE_AFTER, two.b)
    assert again.first_request_id == 5
    assert again.request_id != 5


def test_aborted_request_ends_when_its_processor_stays_away() -> None:
    two, source = begun()
    two.requests.abort(5)
    assert two.pass_time(CONTINUE_AFTER, two.b) == []
    assert source.status is RowStatus.ABORTED


def test_closed_request_is_ended_where_it_turns_up() -> None:
    two, _ = begun()
    two.requests.discard(5)
    assert two.requests.open_count == 1
    two.pass_time(TIMEOUT + 1, two.b)
    assert two.requests.open_count == 0
    two.a.welcome(processor_id="a-2")
    assert over(two.a) == {5}


def test_lost_worker_costs_a_turn_at_once() -> None:
    """At any of the processors, as with one alone."""
    two, source = begun()
    two.room(two.b, any=99)
    error(two.a, LOST)
    (again,) = sent(two.b)
    two.b.rows(RowShape(again.request_id, 2, 1, RowStatus.FINISHED_LENGTH))
    assert source.status is RowStatus.FINISHED_LENGTH


def test_request_of_another_client_is_asked_for_at_each_processor() -> None:
    two = Two()
    source = two.requests.resume(5, 3, include_drafts=False)
    assert (keys(two.a, "resume"), keys(two.b, "resume")) == ([5], [])
    error(two.a, UNKNOWN)
    assert keys(two.b, "resume") == [5]
    two.b.rows(RowShape(5, 3, 1, RowStatus.FINISHED_LENGTH))
    assert source.status is RowStatus.FINISHED_LENGTH
    unknown = two.requests.resume(6, 3, include_drafts=False)
    for peer in (two.a, two.b):
        error(peer, UNKNOWN, 6)
    assert code_of(unknown) == UNKNOWN


def test_processors_hear_which_requests_have_ended() -> None:
    """Each time that they meet, but for what is not acked while the output stream is full."""
    two, _ = begun()
    two.a.rows(RowShape(5, 2, 1, RowStatus.FINISHED_STOP))
    two.requests.is_paused = True
    two.b.welcome(processor_id="b-2")
    assert over(two.b) == set()
    two.requests.is_paused = False
    two.b.welcome(processor_id="b-3")
    assert over(two.b) == {5}
    two.requests.open(generate_of(5))
    two.b.welcome(processor_id="b-4")
    assert over(two.b) == set()
