"""WorkerSession: which items go out, in which order, with how much credit, and which go out again."""

from typing import Any

import pytest

from tests.in_process.builders import BATCH, EPOCH, generate_of
from tests.worker.peer import Peer, opened
from tokenbus.worker import session
from tokenbus_contracts import ContractError
from tokenbus_contracts.frames import read_frame
from tokenbus_contracts.generated import stream_pb2 as pb


def test_nothing_goes_out_before_the_handshake() -> None:
    """Items wait until a processor has answered the hello: none arrives before the handshake (case 19)."""
    peer = Peer(items=2)
    frame = peer.must_say()
    assert (frame.epoch, frame.hello.first_sequence, frame.hello.next_sequence) == (EPOCH, 1, 3)
    assert peer.says() is None
    peer.welcome()
    assert peer.sequences() == [1, 2]


def test_worker_that_leaves_says_so_at_once_and_to_every_processor() -> None:
    peer = opened(items=2)
    peer.session.take_no_more()
    frame = peer.must_say()
    assert frame.heartbeat.takes_no_more
    assert peer.sequences() == [1, 2]
    peer.hear(refusal=pb.Refusal(reason=pb.RefusalReason.REFUSAL_REASON_HELLO_FIRST, message="again"))
    frame = peer.must_say()
    assert frame.hello.max_requests == 0
    peer.welcome()
    frame = peer.must_say()
    assert frame.heartbeat.takes_no_more


def test_credit_in_items_is_used_exactly() -> None:
    """As many items go out as credit allows, and the next one goes with the next grant (case 20)."""
    peer = opened(items=5, through=2)
    assert peer.sequences() == [1, 2]
    assert peer.session.credit == (0, 998)
    peer.hear(credit=pb.Credit(through_sequence=3, bytes=1000))
    assert peer.sequences() == [3]


def test_credit_in_bytes_is_used_exactly() -> None:
    """An item goes out when its bytes fit exactly into what was granted, and not with one byte less (case 20)."""
    peer = Peer()
    peer.retention.keep(BATCH, bytes(10))
    peer.retention.keep(BATCH, bytes(5))
    peer.says()
    peer.welcome(size=14)
    assert peer.sequences() == [1]
    peer.hear(credit=pb.Credit(through_sequence=100, bytes=15))
    assert peer.sequences() == [2]
    assert peer.session.credit == (98, 0)


def test_grants_that_come_late_or_twice_change_nothing() -> None:
    peer = opened(items=5, through=3, size=3)
    peer.hear(credit=pb.Credit(through_sequence=3, bytes=3))
    peer.hear(credit=pb.Credit(through_sequence=1, bytes=1))
    assert peer.sequences() == [1, 2, 3]


def test_items_are_sent_as_they_were_kept() -> None:
    peer = opened(items=1)
    message = peer.session.next_message(peer.now)
    assert message is not None
    item = read_frame(pb.WorkerFrame, message[0]).item
    kept = peer.retention.find(1)
    assert (item.sequence, item.payload_kind, item.payload_bytes) == (1, BATCH, 1)
    assert item.payload_crc32 == kept.checksum  # type: ignore[union-attr]
    assert message[1] is kept.payload  # type: ignore[union-attr]


def test_replay_sends_the_same_bytes_and_runs_to_its_end() -> None:
    """What is asked for again goes out whole, in order, and as the same messages as the first time (case 16, 17)."""
    peer = opened(items=4)
    first = [peer.session.next_message(peer.now) for _ in range(4)]
    peer.hear(replay=pb.ReplayRequest(first_sequence=2, last_sequence=4))
    again = [peer.session.next_message(peer.now) for _ in range(3)]
    assert again == first[1:]
    assert peer.says() is None
    assert peer.session.replayed == 3


def test_replay_needs_no_credit_and_goes_before_new_items() -> None:
    peer = opened(items=4, through=3)
    assert peer.sequences() == [1, 2, 3]
    peer.hear(replay=pb.ReplayRequest(first_sequence=2, last_sequence=3))
    peer.hear(credit=pb.Credit(through_sequence=4, bytes=1000))
    assert peer.sequences() == [2, 3, 4]
    assert peer.session.credit == (0, 996)


def test_acknowledged_items_are_not_replayed() -> None:
    peer = opened(items=4)
    assert peer.sequences() == [1, 2, 3, 4]
    peer.hear(replay=pb.ReplayRequest(first_sequence=1, last_sequence=3))
    peer.hear(replay=pb.ReplayRequest(first_sequence=1, last_sequence=1))
    peer.hear(ack=pb.Ack(through_sequence=2))
    assert peer.sequences() == [3]


@pytest.mark.parametrize(("first", "last"), [(2, 4), (3, 2), (4, 4)])
def test_replay_of_what_was_not_sent_is_refused(first: int, last: int) -> None:
    peer = opened(items=5, through=3)
    assert peer.sequences() == [1, 2, 3]
    with pytest.raises(ContractError, match="up to 3"):
        peer.hear(replay=pb.ReplayRequest(first_sequence=first, last_sequence=last))
    assert peer.says() is None
    peer.hear(replay=pb.ReplayRequest(first_sequence=3, last_sequence=3))
    assert peer.sequences() == [3]


def test_hello_names_as_many_requests_as_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_MAX_REQUEST_IDS", 3)
    peer = Peer()
    peer.session.requests.update(dict.fromkeys(range(1, 5), session.NO_TURN))
    assert peer.must_say().hello.request_ids == [1, 2, 3]


def test_replays_that_wait_are_bounded() -> None:
    peer = opened(items=1)
    assert peer.sequences() == [1]
    for _ in range(65):
        peer.hear(replay=pb.ReplayRequest(first_sequence=1, last_sequence=1))
    assert peer.sequences() == [1] * 64


def test_new_handshake_forgets_replays() -> None:
    peer = opened(items=3)
    assert peer.sequences() == [1, 2, 3]
    peer.hear(replay=pb.ReplayRequest(first_sequence=1, last_sequence=3))
    peer.welcome(resume_from=3)
    assert peer.sequences() == [3]


def test_welcome_says_where_to_go_on_and_counts_bytes_anew() -> None:
    """After a reconnect, items go on from `resume_from`, and bytes count from there (case 17)."""
    peer = opened(items=4, size=4)
    assert peer.sequences() == [1, 2, 3, 4]
    peer.welcome(resume_from=3, size=1)
    assert peer.sequences() == [3]
    assert peer.session.handshakes == 2
    peer.hear(credit=pb.Credit(through_sequence=100, bytes=2))
    assert peer.sequences() == [4]


def test_resuming_from_what_is_gone_is_answered_with_a_gap() -> None:
    """What left the retention is named as lost, first and last, and then items follow; it ends there (case 17, 18)."""
    peer = opened(items=4)
    assert peer.sequences() == [1, 2, 3, 4]
    peer.hear(ack=pb.Ack(through_sequence=2))
    peer.welcome(resume_from=1)
    gap, *rest = peer.says_all()
    assert (gap.gap.first_sequence, gap.gap.last_sequence) == (1, 2)
    assert gap.gap.reason == pb.GapReason.GAP_REASON_RETENTION
    assert [frame.item.sequence for frame in rest] == [3, 4]


def test_dropped_items_are_told_as_a_gap_with_their_requests() -> None:
    """Items that found no room become a gap in their place, with their requests, and cost no bytes (case 21)."""
    peer = Peer(items=1)
    peer.retention.drop([5, 3])
    peer.retention.drop([4])
    peer.retention.keep(BATCH, b"x")
    peer.says()
    peer.welcome(size=2)
    first, gap, last = peer.says_all()
    assert (first.item.sequence, last.item.sequence) == (1, 4)
    assert (gap.gap.first_sequence, gap.gap.last_sequence, list(gap.gap.request_ids)) == (2, 3, [3, 4, 5])


def test_run_of_dropped_items_longer_than_the_credit_is_told() -> None:
    """A gap is sent however many items it covers: credit for one is enough, or the loss would never be reported."""
    peer = Peer(items=1)
    for key in range(1, 21):
        peer.retention.drop([key])
    peer.retention.keep(BATCH, b"x")
    peer.says()
    peer.welcome(through=2)
    _, gap = peer.says_all()
    assert (gap.gap.first_sequence, gap.gap.last_sequence) == (2, 21)
    peer.hear(credit=pb.Credit(through_sequence=22, bytes=1000))
    assert peer.sequences() == [22]


def test_dropped_items_wait_for_credit_too() -> None:
    peer = Peer(items=2)
    peer.retention.drop([7])
    peer.says()
    peer.welcome(through=2)
    assert [frame.WhichOneof("body") for frame in peer.says_all()] == ["item", "item"]


def test_dropped_items_in_a_replay_are_told_again() -> None:
    peer = Peer(items=1)
    peer.retention.drop([7])
    peer.retention.drop([8])
    peer.retention.keep(BATCH, b"x")
    peer.says()
    peer.welcome()
    assert len(list(peer.says_all())) == 3
    peer.hear(replay=pb.ReplayRequest(first_sequence=1, last_sequence=4))
    assert [frame.WhichOneof("body") for frame in peer.says_all()] == ["item", "gap", "item"]


def test_acknowledging_what_never_was_is_refused() -> None:
    peer = opened(items=2)
    assert peer.sequences() == [1, 2]
    with pytest.raises(ContractError, match="at most 2"):
        peer.hear(ack=pb.Ack(through_sequence=3))
    assert peer.session.outstanding == 2
    peer.hear(ack=pb.Ack(through_sequence=2))
    assert peer.session.outstanding == 0


def test_room_is_told_only_when_there_is_some() -> None:
    peer = opened(items=2)
    told: list[int] = []
    peer.on_room = lambda: told.append(len(peer.retention))
    peer.hear(ack=pb.Ack(through_sequence=1))
    peer.hear(ack=pb.Ack(through_sequence=1))
    assert told == [1]


def test_request_is_run_again_only_where_a_hello_could_not_name_it() -> None:
    peer = opened()
    taken: list[Any] = []
    peer.on_request = taken.append

    def hear(deadline: int) -> None:
        peer.hear(generate=generate_of(1, deadline_unix_ms=deadline))
        peer.session.requests.pop(1, None)

    hear(1_000)
    hear(1_000)
    assert len(taken) == 2
    peer.welcome()  # of a second hello, said while the first had no answer
    hear(1_000)
    assert len(taken) == 2
    hear(2_000)
    hear(1_000)
    assert len(taken) == 4
