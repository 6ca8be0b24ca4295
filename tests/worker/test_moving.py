"""WorkerSession with several processors: when it leaves one, for how long it asks the next, and what it says there."""

import pytest

from tests.worker.peer import FIRST, INTERVAL, TIMEOUT, Peer
from tokenbus.bus.link import SessionState
from tokenbus_contracts.frames import read_frame
from tokenbus_contracts.generated.stream_pb2 import GoodbyeReason, Refusal, RefusalReason, WorkerFrame

MOVED = GoodbyeReason.GOODBYE_REASON_MOVED
NO_PLACE = RefusalReason.REFUSAL_REASON_TOO_MANY_WORKERS


def peer_of(processors: int = 2, *, is_open: bool = True) -> Peer:
    peer = Peer(3, processors=processors)
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


def move(peer: Peer) -> WorkerFrame:
    return read_frame(WorkerFrame, peer.session.move(peer.now)[0])


def test_worker_with_one_processor_never_leaves_it() -> None:
    peer = peer_of(1)
    for _ in range(100):
        peer.now += 1
        for frame in peer.says_all():
            assert not frame.HasField("hello") or frame.hello.processors == 0
        assert not peer.session.is_leaving(peer.now)


def test_processor_whose_connection_broke_is_left_unless_it_answers_soon() -> None:
    """It is greeted again at once; one that only lost the connection keeps the worker, and a dead one does not."""
    peer = peer_of()
    peer.session.disconnected(peer.now)
    assert peer.must_say().HasField("hello")
    peer.now += INTERVAL / 4
    peer.welcome()
    assert leaves_after(peer) > TIMEOUT
    peer = peer_of()
    peer.session.disconnected(peer.now)
    assert leaves_after(peer) < INTERVAL
    move(peer)
    peer.session.disconnected(peer.now)
    assert peer.must_say().hello.processors == 2
    assert leaves_after(peer) == INTERVAL


def test_silent_processor_is_left_with_all_that_is_retained() -> None:
    peer = peer_of()
    peer.session.requests.add(5)
    peer.hear(ack={"through_sequence": 1})
    waited = leaves_after(peer)
    assert TIMEOUT <= waited <= TIMEOUT + INTERVAL
    assert peer.says() is None, "nothing more for this one"
    assert move(peer).goodbye.reason == MOVED
    said = peer.must_say()
    assert (said.epoch, said.hello.processors, said.hello.first_sequence) == (7, 2, 2)
    assert list(said.hello.request_keys) == [5]
    peer.welcome(resume_from=2)
    assert peer.sequences() == [2, 3]


@pytest.mark.parametrize("processors", [2, 3])
def test_each_is_asked_briefly_and_then_longer(processors: int) -> None:
    """Where none answers, the first round takes an interval for each, and each later one twice that, to the timeout."""
    peer = peer_of(processors)
    leaves_after(peer)
    waits = []
    for _ in range(3 * processors):
        move(peer)
        waits.append(leaves_after(peer))
    assert waits == [1.0] * (processors - 1) + [2.0] * processors + [TIMEOUT] * (processors + 1)
    assert peer.session.moves == 3 * processors


def test_first_processor_that_answers_is_taken() -> None:
    peer = peer_of(is_open=False)
    assert leaves_after(peer) == INTERVAL
    move(peer)
    peer.must_say()
    peer.welcome()
    peer.now += INTERVAL
    peer.welcome()
    assert not peer.session.is_leaving(peer.now)
    assert peer.state() is SessionState.OPEN


def test_processor_without_a_place_is_left_and_all_full_ones_are_asked_in_turn() -> None:
    """Too many workers: the next one at once; once all have refused, it waits, so that no two are asked without end."""
    peer = peer_of(is_open=False)
    peer.hear(refusal=Refusal(reason=NO_PLACE, message="the processor is closing"))
    assert peer.session.is_leaving(peer.now)
    move(peer)
    waits = []
    for _ in range(5):
        peer.must_say()
        peer.hear(refusal=Refusal(reason=NO_PLACE, message="full"))
        waits.append(leaves_after(peer))
        move(peer)
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
