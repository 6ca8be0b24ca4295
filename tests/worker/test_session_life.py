"""WorkerSession: the handshake, heartbeats, refusals, requests, and its end."""

from itertools import pairwise

import pytest

from tests.in_process.builders import EPOCH, generate_of
from tests.worker.peer import FIRST, INTERVAL, TIMEOUT, Peer, opened
from tokenbus.bus.link import SessionState
from tokenbus.worker.session import NO_TURN
from tokenbus_contracts import ContractError
from tokenbus_contracts.frames import read_frame, write_frame
from tokenbus_contracts.generated import stream_pb2 as pb
from tokenbus_contracts.generated.request_pb2 import Abort, Generate


def test_welcome_that_cannot_be_is_refused() -> None:
    peer = Peer(items=2)
    peer.says()
    with pytest.raises(ContractError, match="at most 3, the next item"):
        peer.welcome(resume_from=4)
    with pytest.raises(ContractError, match="above heartbeat_interval_ms, 1000"):
        peer.welcome(heartbeat_timeout_ms=1000)
    assert (peer.state(), peer.session.handshakes, peer.session.credit) == (SessionState.GREETING, 0, (0, 0))
    peer.welcome(resume_from=3, heartbeat_timeout_ms=1001)
    assert peer.state() is SessionState.OPEN


def test_heartbeat_once_an_interval_with_the_last_sequence() -> None:
    peer = opened(items=2, heartbeat_interval_ms=500)
    peer.hear(heartbeat=pb.Heartbeat(sent_at_ns=77))
    assert peer.sequences() == [1, 2]
    peer.now += 0.49
    assert peer.says() is None
    assert peer.session.seconds_to_wait(peer.now) == pytest.approx(0.01)
    peer.now = FIRST + 0.5
    frame = peer.must_say()
    beat = frame.heartbeat
    assert (beat.last_sequence, beat.echo_ns, beat.sent_at_ns) == (2, 77, int((FIRST + 0.5) * 1e9))
    assert peer.says() is None


def test_stalled_engine_is_told_and_says_no_hello_while_its_worker_would_be_lost() -> None:
    peer = opened()
    peer.session._introduction.longest_step_ms = 1000
    stalled_ms = 0
    peer.session.stalled_ms = lambda _: stalled_ms
    for stalled_ms in (2000, 0, 1000 * int(TIMEOUT) + 1000):
        peer.now += 1
        peer.hear(credit=pb.Credit())
        assert peer.must_say().heartbeat.stalled_ms == stalled_ms
    peer.welcome()
    assert peer.must_say().heartbeat.stalled_ms == stalled_ms, "at once: the processor may not have heard it yet"
    peer.session.disconnected(peer.now)
    assert peer.must_say().HasField("hello")
    stalled_ms += 1
    for _ in range(3):
        peer.now += TIMEOUT
        assert peer.says() is None
        assert peer.session.seconds_to_wait(peer.now) > 0
    stalled_ms = 0
    peer.now += 1
    assert peer.must_say().HasField("hello")


def test_silent_processor_is_greeted_again_after_the_timeout() -> None:
    peer = opened(items=1)
    assert peer.sequences() == [1]
    peer.now = FIRST + TIMEOUT
    frame = peer.must_say()
    assert frame.HasField("heartbeat")
    peer.now += 0.01
    frame = peer.must_say()
    assert frame.HasField("hello")
    assert peer.state() is SessionState.GREETING


def test_any_frame_is_a_sign_of_life() -> None:
    peer = opened()
    for _ in range(5):
        peer.now += TIMEOUT
        peer.hear(credit=pb.Credit())
        frame = peer.must_say()
        assert frame.HasField("heartbeat")


def test_refused_worker_asks_again_after_the_timeout() -> None:
    peer = Peer()
    peer.says()
    refusal = pb.Refusal(reason=pb.RefusalReason.REFUSAL_REASON_LIMITS, message="too wide")
    peer.hear(refusal=refusal)
    assert peer.state() is SessionState.REFUSED
    assert peer.session.refusal == refusal
    peer.now += TIMEOUT - 0.01
    assert peer.says() is None
    peer.now = FIRST + TIMEOUT
    assert peer.says() is not None
    assert peer.state() is SessionState.GREETING
    peer.welcome()
    assert peer.session.refusal is None


def test_demand_for_a_hello_is_met_at_once_and_only_once() -> None:
    peer = opened()
    again = pb.Refusal(reason=pb.RefusalReason.REFUSAL_REASON_HELLO_FIRST, message="who are you")
    peer.hear(refusal=again)
    frame = peer.must_say()
    assert frame.HasField("hello")
    peer.hear(refusal=again)
    assert peer.says() is None


def test_processor_that_leaves_is_greeted_after_an_interval() -> None:
    peer = opened(items=1)
    peer.hear(goodbye=pb.Goodbye(reason=pb.GoodbyeReason.GOODBYE_REASON_RESTARTING))
    assert peer.says() is None
    peer.now += INTERVAL
    frame = peer.must_say()
    assert frame.HasField("hello")


def test_requests_are_handed_over_once() -> None:
    peer = opened()
    got: list[Generate | Abort] = []
    peer.on_request = got.append
    for _ in range(2):
        peer.hear(generate=generate_of(9))
        peer.hear(abort=Abort(request_id=9))
    assert got == [generate_of(9), Abort(request_id=9), Abort(request_id=9)]
    assert peer.session.requests.keys() == {9}


def test_request_that_finds_no_room_is_not_believed_to_be_here() -> None:
    peer = opened()

    def refuse(_request: Generate | Abort) -> None:
        raise ContractError("generate", "at most 2 requests", 3)

    peer.on_request = refuse
    with pytest.raises(ContractError):
        peer.hear(generate=generate_of(9))
    assert not peer.session.requests


def test_frames_before_the_handshake_change_nothing() -> None:
    peer = Peer(items=2)
    peer.says()
    peer.hear(credit=pb.Credit(through_sequence=2, bytes=2))
    peer.hear(ack=pb.Ack(through_sequence=1))
    peer.hear(generate=generate_of(9))
    assert peer.session.outstanding == 2
    assert not peer.session.requests
    peer.welcome(through=0)
    assert peer.sequences() == []


def test_message_of_several_parts_is_refused() -> None:
    peer = opened()
    for parts in ([], [write_frame(pb.ProcessorFrame(ack=pb.Ack())), b""]):
        with pytest.raises(ContractError, match="one part"):
            peer.session.receive(parts, peer.now)


def test_goodbye_is_the_last_word() -> None:
    peer = opened(items=2, through=1)
    assert peer.sequences() == [1]
    frame = read_frame(pb.WorkerFrame, peer.session.goodbye(pb.GoodbyeReason.GOODBYE_REASON_STOPPED, "done")[0])
    assert (frame.epoch, frame.goodbye.last_sequence, frame.goodbye.message) == (EPOCH, 1, "done")
    peer.welcome()
    peer.now += TIMEOUT
    assert peer.says() is None
    assert peer.state() is SessionState.LEFT


def test_waiting_is_never_longer_than_an_interval() -> None:
    peer = Peer()
    assert peer.session.seconds_to_wait(FIRST) == 0
    peer.says()
    peer.hear(refusal=pb.Refusal(reason=pb.RefusalReason.REFUSAL_REASON_LIMITS, message="no"))
    assert peer.session.seconds_to_wait(peer.now) == INTERVAL
    peer.welcome()
    assert peer.says() is not None
    waits = [peer.session.seconds_to_wait(peer.now + past) for past in (0.0, 0.5, 1.0, 9.0)]
    assert waits == pytest.approx([1.0, 0.5, 0.0, 0.0])
    assert all(later <= earlier for earlier, later in pairwise(waits))


def test_hello_names_what_is_retained_and_what_is_open_now() -> None:
    peer = opened(items=3)
    peer.hear(generate=generate_of(9))
    peer.session.requests[4] = NO_TURN
    assert peer.sequences() == [1, 2, 3]
    peer.hear(ack=pb.Ack(through_sequence=2))
    peer.hear(refusal=pb.Refusal(reason=pb.RefusalReason.REFUSAL_REASON_HELLO_FIRST, message="again"))
    frame = peer.must_say()
    assert (frame.hello.first_sequence, frame.hello.next_sequence) == (3, 4)
    assert list(frame.hello.request_ids) == [4, 9]
