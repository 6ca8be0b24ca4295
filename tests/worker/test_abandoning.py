"""WorkerSession with several processors: which it asks and when, and how it abandons one for another."""

import pytest

from tests.in_process.builders import BATCH, EPOCH, generate_of
from tests.worker.peer import FIRST, INTERVAL, TIMEOUT, Peer
from tokenbus.bus.link import SessionState
from tokenbus.worker.session import NO_TURN
from tokenbus_contracts.generated.request_pb2 import Abort, Generate
from tokenbus_contracts.generated.stream_pb2 import Goodbye, GoodbyeReason, Refusal, RefusalReason

ABANDON_AFTER = 5.0
NO_PLACE = RefusalReason.REFUSAL_REASON_TOO_MANY_WORKERS
RESTARTING = GoodbyeReason.GOODBYE_REASON_RESTARTING


def peer_of(processors: int = 2, items: int = 3, *, is_open: bool = True) -> Peer:
    peer = Peer(items, processors=processors, abandon_after=ABANDON_AFTER)
    assert peer.says() is not None
    if is_open:
        peer.welcome()
        list(peer.says_all())
    return peer


def leaves_after(peer: Peer) -> float:
    begin = peer.now
    while not peer.session.is_leaving(peer.now):
        list(peer.says_all())
        assert peer.now < begin + 100
        peer.now += 0.25
    return peer.now - begin


def abandoned() -> tuple[Peer, list[int]]:
    peer, aborts = peer_of(), []
    for key in (5, 6):
        peer.hear(generate=generate_of(key))
    peer.on_request = lambda request: aborts.append(request.request_id) if isinstance(request, Abort) else None
    peer.session.disconnected(peer.now)
    leaves_after(peer)
    peer.session.move(peer.now)
    peer.must_say()
    peer.welcome(processor_id="q")
    return peer, aborts


def test_worker_with_one_processor_never_leaves_it() -> None:
    peer = peer_of(1)
    for _ in range(100):
        peer.now += 1
        list(peer.says_all())
        assert not peer.session.is_leaving(peer.now)


@pytest.mark.parametrize("how", ["silent", "disconnected"])
def test_processor_that_is_away_is_waited_for(how: str) -> None:
    """Its retained rows and requests go to that alone: it resumes them if it is back in time."""
    peer = peer_of()
    if how == "disconnected":
        peer.session.disconnected(peer.now)
    waited = leaves_after(peer)
    assert ABANDON_AFTER <= waited <= ABANDON_AFTER + INTERVAL
    assert peer.says() is None, "nothing more for this one"


def test_processor_that_says_goodbye_is_left_at_once() -> None:
    peer = peer_of()
    peer.hear(goodbye=Goodbye(reason=RESTARTING))
    assert peer.session.is_leaving(peer.now)


def test_old_processor_that_answers_first_has_all_again() -> None:
    """Meanwhile the others hear of a new epoch, which has nothing yet."""
    peer = peer_of()
    peer.session.requests[5] = NO_TURN
    leaves_after(peer)
    peer.session.move(peer.now)
    asked = peer.must_say()
    assert (asked.epoch, asked.hello.first_sequence, asked.hello.next_sequence) == (EPOCH + 1, 1, 1)
    assert not asked.hello.request_ids
    assert leaves_after(peer) == INTERVAL
    peer.session.move(peer.now)
    asked = peer.must_say()
    assert (asked.epoch, asked.hello.next_sequence, list(asked.hello.request_ids)) == (EPOCH, 4, [5])
    peer.welcome(resume_from=2)
    assert peer.sequences() == [2, 3]


def test_another_processor_that_answers_gets_a_new_epoch() -> None:
    peer, aborts = abandoned()
    assert sorted(aborts) == [5, 6]
    assert (len(peer.retention), peer.retention.next_sequence, peer.session.requests) == (0, 1, {})
    peer.retention.keep(BATCH, b"new")
    assert peer.sequences() == [1]
    peer.now += INTERVAL
    assert peer.must_say().epoch == EPOCH + 1


def test_new_requests_wait_until_those_that_were_given_up_have_ended() -> None:
    """No step can have rows of both."""
    peer, _ = abandoned()
    taken: list[Generate | Abort] = []
    peer.on_request = taken.append
    peer.hear(generate=generate_of(7))
    peer.hear(abort=Abort(request_id=7))
    peer.session.ended([5], peer.now)
    assert not taken
    peer.session.ended([6], peer.now)
    assert [(type(each), each.request_id) for each in taken] == [(Generate, 7), (Abort, 7)]
    assert peer.session.requests.keys() == {7}


@pytest.mark.parametrize("processors", [2, 3])
def test_each_is_asked_briefly_and_then_longer(processors: int) -> None:
    """Where none answers, the first round takes an interval for each, and each later one twice that, to the timeout."""
    peer = peer_of(processors)
    leaves_after(peer)
    waits = []
    for _ in range(3 * processors):
        peer.session.move(peer.now)
        waits.append(leaves_after(peer))
    assert waits == [1.0] * (processors - 1) + [2.0] * processors + [TIMEOUT] * (processors + 1)


def test_first_processor_that_answers_is_taken() -> None:
    peer = peer_of(is_open=False)
    assert leaves_after(peer) == INTERVAL
    peer.session.move(peer.now)
    asked = peer.must_say()
    assert (asked.epoch, asked.hello.next_sequence) == (EPOCH, 4)
    peer.welcome()
    peer.now += INTERVAL
    peer.welcome()
    assert not peer.session.is_leaving(peer.now)
    assert peer.state() is SessionState.OPEN
    assert peer.sequences() == [1, 2, 3]


def test_processor_without_a_place_is_left_and_all_full_ones_are_asked_in_turn() -> None:
    """Too many workers: the next one at once; once all have refused, it waits, so that no two are asked without end."""
    peer = peer_of(is_open=False)
    peer.hear(refusal=Refusal(reason=NO_PLACE, message="the processor is closing"))
    assert peer.session.is_leaving(peer.now)
    peer.session.move(peer.now)
    waits = []
    for _ in range(5):
        peer.must_say()
        peer.hear(refusal=Refusal(reason=NO_PLACE, message="full"))
        waits.append(leaves_after(peer))
        peer.session.move(peer.now)
    assert waits == [1.0, 2.0, 2.0, TIMEOUT, TIMEOUT]


@pytest.mark.parametrize(
    "reason",
    [
        RefusalReason.REFUSAL_REASON_EPOCH_OUTDATED,
        RefusalReason.REFUSAL_REASON_WORKER_ID_TAKEN,
        RefusalReason.REFUSAL_REASON_LIMITS,
    ],
)
def test_what_is_wrong_with_a_worker_is_not_taken_elsewhere(reason: RefusalReason) -> None:
    """A life that is over, an id that is taken and limits that are too wide stay where somebody sees the refusal."""
    peer = peer_of(is_open=False)
    peer.hear(refusal=Refusal(reason=reason, message="no"))
    assert not peer.session.is_leaving(peer.now + 1000)
    assert peer.now == FIRST


def test_processor_that_refuses_a_worker_with_another_home_is_left() -> None:
    peer = peer_of()
    leaves_after(peer)
    peer.session.move(peer.now)
    peer.must_say()
    peer.hear(refusal=Refusal(reason=RefusalReason.REFUSAL_REASON_WORKER_ID_TAKEN, message="no"))
    assert leaves_after(peer) <= 2 * INTERVAL
