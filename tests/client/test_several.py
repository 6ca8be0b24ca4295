"""OpenRequests over several processors: where a request goes, how it is found again, and what reaches it."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.client.peer import FIRST, INTERVAL, TIMEOUT, Peer, code_of, positions
from tests.in_process.builders import WORKER, generate_of
from tokenbus.testing import RowShape, batch
from tokenbus_contracts import RowStatus, encode
from tokenbus_contracts.frames import worker_hash
from tokenbus_contracts.generated.client_pb2 import ModelRoom, Outputs, Room
from tokenbus_contracts.generated.request_pb2 import Admitted, ErrorCode, RequestError
from tokenbus_contracts.generated.stream_pb2 import Goodbye, GoodbyeReason

GRACE = 2 * TIMEOUT + 2 * INTERVAL
SHORT_GRACE = INTERVAL + 2 * INTERVAL
"""That of a worker whose processor let go of it."""
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

    def pass_time(self, seconds: float, *heard: Peer) -> None:
        for _ in range(round(seconds)):
            for peer in (self.a, self.b):
                peer.now += 1
                if peer in heard:
                    peer.hear(heartbeat={"sent_at_ns": 1})
                list(peer.says_all())
            self.requests.look(self.a.now)

    @staticmethod
    def lose(peer: Peer) -> None:
        """Let a processor be silent for longer than its timeout."""
        peer.now += TIMEOUT + 1
        list(peer.says_all())

    def room(self, peer: Peer, arrivals: int = 1, workers: Sequence[int] = (), **models: int) -> None:
        found = [
            ModelRoom(model=name.replace("any", ""), free_requests=free, workers=1) for name, free in models.items()
        ]
        peer.hear(room=Room(arrivals=arrivals, models=found, workers=workers))


def error(peer: Peer, code: ErrorCode, key: int = 5, emitted: int = 0) -> None:
    """Let a processor say how a request ended."""
    retry = 1000 if code in (FULL, NO_WORKER) else 0
    found = RequestError(request_key=key, code=code, message="so", emitted_tokens=emitted, retry_after_ms=retry)
    peer.numbered(error=found)


def keys(peer: Peer, body: str) -> list[int]:
    """Return the requests that frames of a kind are about, of those that are sent just now."""
    return [getattr(frame, body).request_key for frame in peer.says_all() if frame.HasField(body)]


def anew(peer: Peer) -> list[tuple[int, int]]:
    """Return the ids and keys of the requests that are sent anew just now."""
    sent = [frame.generate for frame in peer.says_all() if frame.HasField("generate")]
    return [(each.first_request_key, each.request_key) for each in sent]


def over(peer: Peer) -> set[int]:
    return {key for frame in peer.says_all() for key in frame.ended.request_keys}


def begun(tokens: int = 2) -> tuple[Two, Any]:
    """Return a client with request 5 at `a`, which has had some tokens."""
    two = Two()
    two.room(two.a, any=9)
    source = two.requests.open(generate_of(5))
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
    two.room(two.a, arrivals=2, small=7)
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
    two = Two()
    two.room(two.a, any=1)
    sources = [two.requests.open(generate_of(key)) for key in (5, 6)]
    for key in (5, 6):
        two.a.numbered(error=RequestError(request_key=key, code=FULL, message="closes"))
    assert keys(two.b, "generate") == [5, 6]
    for key in (5, 6):
        error(two.b, NO_WORKER, key)
    assert [source.has_ended for source in sources] == [False, False]
    two.pass_time(1, two.a, two.b)
    two.room(two.b, arrivals=2, any=1)
    two.b.rows(RowShape(5, 0, 1, RowStatus.FINISHED_LENGTH))
    assert sources[0].has_ended
    error(two.b, FULL, 6)
    two.a.hear(goodbye=Goodbye(reason=GoodbyeReason.GOODBYE_REASON_RESTARTING))
    assert not sources[1].has_ended
    for _ in range(round(TIMEOUT) + 1):
        two.pass_time(1, two.b)
        error(two.b, FULL, 6)
    assert code_of(sources[1]) == FULL


def test_new_request_waits_for_the_workers_of_a_lost_processor() -> None:
    two = Two()
    two.room(two.a, workers=[1, 2], any=9)
    two.room(two.b)
    two.pass_time(2 * TIMEOUT + 1, two.b)
    sources = [two.requests.open(generate_of(key)) for key in (5, 6)]
    assert keys(two.b, "generate") == [5, 6]
    for key in (5, 6):
        error(two.b, NO_WORKER, key)
    assert [source.has_ended for source in sources] == [False, False]
    two.room(two.b, arrivals=2, workers=[1], any=9)
    assert keys(two.b, "generate") == [5, 6]
    two.b.rows(RowShape(5, 0, 1, RowStatus.FINISHED_LENGTH))
    assert sources[0].has_ended
    error(two.b, NO_WORKER, 6)
    assert not sources[1].has_ended
    two.pass_time(2 * GRACE, two.b)
    error(two.b, NO_WORKER, 6)
    assert code_of(sources[1]) == NO_WORKER


def test_worker_that_comes_while_a_request_waits_at_another_processor_gets_it() -> None:
    two = Two()
    two.room(two.a, any=1)
    source = two.requests.open(generate_of(5))
    assert keys(two.a, "generate") == [5]
    error(two.a, NO_WORKER)
    assert keys(two.b, "generate") == [5]
    two.room(two.a, arrivals=2, any=1)
    error(two.b, NO_WORKER)
    assert keys(two.a, "generate") == [5]
    assert not source.has_ended


@pytest.mark.parametrize("is_known_by", ["rows", "admission"])
def test_request_goes_on_where_its_worker_is_seen(is_known_by: str) -> None:
    """Its home may stand still for less than its timeout, again and again: it does not say that it lost the worker."""
    two = Two()
    two.room(two.a, any=9)
    source, had = two.requests.open(generate_of(5)), 0
    assert keys(two.a, "generate") == [5]
    two.a.numbered(admitted=Admitted(request_key=5, worker_id=WORKER, epoch=1))
    if is_known_by == "rows":
        two.a.numbered(encode(batch([RowShape(5, 0, 2)], selection=True, worker_id="other")), outputs=Outputs())
        had = 2
    worker = worker_hash("other" if had else WORKER)
    two.room(two.b, arrivals=2, workers=[7], any=1)
    assert keys(two.b, "resume") == []
    two.room(two.b, arrivals=3, workers=[7, worker], any=1)
    asked = [frame.resume for frame in two.b.says_all() if frame.HasField("resume")]
    assert [(each.request_key, each.next_position, each.only_if_here) for each in asked] == [(5, had, True)]
    two.room(two.b, arrivals=4, workers=[worker], any=1)
    assert keys(two.b, "resume") == []
    two.b.rows(RowShape(5, had, 2))
    error(two.a, LOST)
    two.b.rows(RowShape(5, had + 2, 1, RowStatus.FINISHED_LENGTH))
    assert source.status is RowStatus.FINISHED_LENGTH


def test_search_ends_with_the_first_error_when_no_processor_has_the_request() -> None:
    two, source = begun()
    error(two.a, LOST, emitted=7)
    error(two.b, UNKNOWN)
    error(two.a, UNKNOWN)
    two.pass_time(GRACE, two.a, two.b)
    assert not source.has_ended
    two.requests.look(two.a.now + 1)
    assert (keys(two.a, "resume"), keys(two.b, "resume")) == ([5], [5])
    error(two.a, UNKNOWN)
    assert not source.has_ended
    error(two.b, UNKNOWN)
    assert source.error is not None
    assert (source.error.code, source.error.emitted_tokens, source.generated_tokens) == (LOST, 2, 7)


def test_search_ends_in_time_when_a_processor_does_not_come_back() -> None:
    """One that is away might still have the request: it is waited for, as long as the client's patience lasts."""
    two, source = begun()
    two.pass_time(GRACE + TIMEOUT + 2, two.b)
    error(two.b, UNKNOWN)
    assert not source.has_ended
    two.pass_time(PATIENCE, two.b)
    assert code_of(source) == ErrorCode.ERROR_CODE_DEADLINE
    assert source.error.message == "no processor answered for 30000 ms"


def test_loss_of_a_worker_is_not_put_off_by_processors_that_come_and_go() -> None:
    two, source = begun()
    error(two.a, LOST)
    looks = 0
    while not source.has_ended and looks < PATIENCE:
        two.a.session.disconnected(two.a.now)
        two.pass_time(1, two.b)
        looks += 1
        error(two.b, UNKNOWN)
        two.a.welcome(processor_id=f"a-{looks}")
    assert code_of(source) == LOST
    assert 2 * GRACE <= looks <= 2 * GRACE + 2


def test_worker_counts_as_lost_only_once_a_processor_has_stayed() -> None:
    two, source = begun()
    error(two.a, LOST)
    for life in range(2 * round(GRACE)):
        for peer, other in ((two.a, two.b), (two.b, two.a)):
            peer.session.disconnected(peer.now)
            two.pass_time(1, other)
            error(other, UNKNOWN)
            peer.welcome(processor_id=f"{life}")
    assert not source.has_ended
    two.pass_time(GRACE, two.b)
    error(two.b, UNKNOWN)
    assert code_of(source) == LOST


def sent_anew() -> tuple[Two, Any, int]:
    """Return a client whose request `a` took with it and which `b` was sent, with the key that it was sent under."""
    two = Two()
    two.room(two.a, any=1)
    source = two.requests.open(generate_of(5))
    assert keys(two.a, "generate") == [5]
    two.lose(two.a)
    ((request_id, key),) = anew(two.b)
    assert request_id == 5
    return two, source, key


def test_processors_hear_that_the_first_try_is_over_before_the_second_is_sent() -> None:
    two = Two()
    two.room(two.a, any=1)
    two.requests.open(generate_of(5))
    assert keys(two.a, "generate") == [5]
    two.lose(two.a)
    said = list(two.b.says_all())
    assert [list(frame.ended.request_keys) for frame in said] == [[5], []]
    assert said[1].generate.first_request_key == 5


def test_request_that_never_reached_its_processor_is_sent_anew() -> None:
    two = Two()
    two.room(two.a, any=9)
    two.room(two.b)
    two.requests.open(generate_of(5))
    assert keys(two.a, "generate") == [5]
    two.a.session.disconnected(two.a.now)
    two.a.welcome(processor_id="a", resumed=True)
    assert keys(two.a, "resume") == [5]
    error(two.a, UNKNOWN)
    assert [request_id for request_id, _ in anew(two.a) + anew(two.b)] == [5]


def test_request_that_is_aborted_before_a_processor_answers_ends_when_that_is_lost() -> None:
    two = Two()
    source = two.requests.open(generate_of(5))
    list(two.b.says_all())
    two.requests.abort(5)
    two.lose(two.a)
    assert source.status is RowStatus.ABORTED
    assert over(two.b) == {5}


def test_request_is_sent_anew_each_time_that_its_processor_is_lost() -> None:
    two, source, key = sent_anew()
    seen = [5, key]
    for life in range(20):
        lost, next_one = (two.a, two.b) if life % 2 else (two.b, two.a)
        two.lose(lost)
        assert anew(next_one) == []  # it is away, too
        next_one.welcome(processor_id=f"life {life}")
        (again,) = anew(next_one)
        assert again[0] == 5
        error(next_one, UNKNOWN, seen[-1])
        assert anew(next_one) == []
        seen.append(again[1])
    assert len({*seen}) == len(seen)
    next_one.rows(RowShape(seen[-1], 0, 1, RowStatus.FINISHED_LENGTH))
    assert source.status is RowStatus.FINISHED_LENGTH


def test_request_that_ends_each_worker_that_gets_it_is_not_sent_to_all_of_them() -> None:
    two = Two()
    two.room(two.a, any=9)
    source = two.requests.open(generate_of(5))
    (key,) = keys(two.a, "generate")
    two.room(two.b, any=99)
    for _ in range(4):
        assert source.error is None
        error(two.a, LOST, key)
        (key,) = keys(two.b, "generate")
        two.a, two.b = two.b, two.a
        two.room(two.b, any=999)
    error(two.a, LOST, key)
    assert anew(two.a) + anew(two.b) == []
    assert source.error is not None
    assert (source.error.code, source.error.request_key) == (LOST, 5)
    assert not two.requests.open_count


def test_new_request_waits_for_a_worker_that_has_just_left_its_processor() -> None:
    two = Two()
    two.room(two.a, workers=[1], any=9)
    two.room(two.b)
    two.room(two.a)
    source = two.requests.open(generate_of(5))
    for peer in (two.a, two.b):
        error(peer, NO_WORKER)
    assert not source.has_ended
    two.pass_time(SHORT_GRACE + 1, two.a, two.b)
    for peer in (two.a, two.b):
        error(peer, NO_WORKER)
    assert code_of(source) == NO_WORKER


def test_first_try_of_a_request_that_was_sent_anew_is_ended_where_it_is_seen() -> None:
    two, source, key = sent_anew()
    two.b.rows(RowShape(key, 0, 2))
    two.a.says()
    two.a.welcome(resumed=True, processor_id="a")
    assert over(two.a) == {5}
    two.a.hear(number=1, admitted=Admitted(request_key=5, worker_id="other", epoch=3, prompt_tokens=1))
    first = encode(batch([RowShape(5, 0, 4)], worker_id="other", epoch=3, selection=True))
    two.a.hear(first, number=2, outputs=Outputs())
    assert keys(two.a, "abort") == [5]
    error(two.a, LOST)
    both = [RowShape(5, 2, 2), RowShape(key, 2, 1, RowStatus.FINISHED_LENGTH)]
    two.b.numbered(encode(batch(both, selection=True)), outputs=Outputs())
    assert positions(source) == [(0, 2), (2, 1)]
    assert source.status is RowStatus.FINISHED_LENGTH
    assert keys(two.b, "abort") == []


def test_request_that_was_sent_anew_is_asked_for_and_ended_under_its_last_key() -> None:
    two, source, key = sent_anew()
    two.b.rows(RowShape(key, 0, 2))
    list(two.a.says_all())
    two.a.welcome(resumed=True, processor_id="a")
    error(two.b, LOST, key)
    assert keys(two.b, "resume") == [key]
    two.requests.abort(5)
    two.b.numbered(admitted=Admitted(request_key=key, worker_id="w", epoch=1))
    assert keys(two.b, "abort") == [key]
    two.b.numbered(error=RequestError(request_key=key, code=ErrorCode.ERROR_CODE_ENGINE, message="so"))
    assert source.error is not None
    assert source.error.request_key == 5


def test_closed_request_is_ended_where_it_turns_up() -> None:
    """One whose consumer left, and whose processor is lost, is not looked for: its rows are answered with an abort."""
    two, _ = begun()
    two.requests.discard(5)
    assert two.requests.open_count == 1
    two.a.hear(goodbye=Goodbye(reason=GoodbyeReason.GOODBYE_REASON_RESTARTING))
    assert two.requests.open_count == 0
    assert keys(two.b, "resume") == []
    two.b.rows(RowShape(5, 2, 1))
    assert keys(two.b, "abort") == [5]


def test_request_of_another_client_is_looked_for_everywhere() -> None:
    two = Two()
    source = two.requests.resume(5, 3, include_drafts=False)
    assert (keys(two.a, "resume"), keys(two.b, "resume")) == ([5], [5])
    error(two.a, UNKNOWN)
    two.b.rows(RowShape(5, 3, 1, RowStatus.FINISHED_LENGTH))
    assert source.status is RowStatus.FINISHED_LENGTH


def test_requests_of_a_processor_that_died_are_looked_for_within_an_interval() -> None:
    """Its connection broke and it does not answer: the others are asked, and new requests go to them at once."""
    two, _ = begun()
    two.room(two.b, any=1)
    two.a.session.disconnected(two.a.now)
    assert two.a.bodies() == ["hello"]
    two.requests.open(generate_of(6))
    assert keys(two.b, "generate") == [6]
    two.a.now += two.a.session.seconds_to_wait(two.a.now)
    assert two.a.now < FIRST + INTERVAL
    assert two.a.bodies() == []
    assert keys(two.b, "resume") == [5]


def test_processors_hear_which_requests_have_ended() -> None:
    two, _ = begun()
    two.a.rows(RowShape(5, 2, 1, RowStatus.FINISHED_STOP))
    two.room(two.b, arrivals=2)
    assert [list(frame.ended.request_keys) for frame in two.b.says_all() if frame.HasField("ended")] == [[5]]
    two.room(two.b, arrivals=3)
    assert "ended" not in two.b.bodies()
    for key in (6, 7):
        two.requests.open(generate_of(key))
        two.a.rows(RowShape(key, 0, 1, RowStatus.FINISHED_STOP))
    two.requests.open(generate_of(6))
    two.room(two.b, arrivals=4)
    assert [list(frame.ended.request_keys) for frame in two.b.says_all() if frame.HasField("ended")] == [[7]]
    two.b.welcome(processor_id="b-2")
    assert [sorted(frame.ended.request_keys) for frame in two.b.says_all() if frame.HasField("ended")] == [[5, 7]]


def test_request_that_was_closed_and_whose_worker_has_left_has_ended_wherever_that_comes() -> None:
    two, _ = begun()
    two.requests.discard(5)
    assert keys(two.a, "abort") == [5]
    error(two.a, LOST)
    assert not two.requests.is_open(5)
    two.room(two.b, arrivals=2, any=9)
    assert over(two.b) == {5}


def test_request_that_was_closed_while_it_was_looked_for_has_ended_wherever_its_worker_comes() -> None:
    two, _ = begun()
    two.requests.lost(two.a.session)
    two.requests.discard(5)
    for arrivals in (2, 3):
        two.room(two.b, arrivals=arrivals)
        assert [list(frame.ended.request_keys) for frame in two.b.says_all() if frame.HasField("ended")] == [[5]]


def test_what_is_not_acked_has_not_ended() -> None:
    """While the output stream is full, a processor may be asked for those rows again."""
    two, _ = begun()
    two.a.rows(RowShape(5, 2, 1, RowStatus.FINISHED_STOP))
    two.requests.is_paused = True
    two.room(two.b, arrivals=2)
    assert "ended" not in two.b.bodies()
    two.requests.is_paused = False
    two.room(two.b, arrivals=3)
    assert [list(frame.ended.request_keys) for frame in two.b.says_all() if frame.HasField("ended")] == [[5]]


def test_processor_that_stood_still_has_not_stayed() -> None:
    two, source = begun()
    error(two.a, LOST)
    two.requests.sessions.remove(two.a.session)
    two.requests.lost(two.a.session)
    for _ in range(8):
        two.pass_time(GRACE - 2, two.b)
        error(two.b, UNKNOWN)
        two.pass_time(TIMEOUT + 1, two.a)
        two.b.welcome(resumed=True, processor_id="b")
        error(two.b, UNKNOWN)
    assert not source.has_ended
