"""ClientSession: the handshake, heartbeats, refusals, and giving up."""

import pytest

from tests.client.peer import FIRST, INTERVAL, TIMEOUT, Peer, opened
from tests.in_process.builders import generate_of
from tokenbus_contracts import ContractError
from tokenbus_contracts.generated.stream_pb2 import Goodbye, GoodbyeReason


def test_hello_is_said_more_rarely_and_at_random_times() -> None:
    def pauses() -> list[float]:
        peer, found = Peer(), []
        for _ in range(8):
            assert peer.bodies() == ["hello"]
            began = peer.now
            while (seconds := peer.session.seconds_to_wait(peer.now)) > 0:
                peer.now += seconds
            found.append(peer.now - began)
        return found

    each = [pauses() for _ in range(50)]
    assert all(INTERVAL <= pause <= TIMEOUT for found in each for pause in found)
    assert {round(found[0], 6) for found in each} == {INTERVAL}
    assert len({round(found[1], 6) for found in each}) > 40
    assert max(found[1] for found in each) <= 2 * INTERVAL < max(found[-1] for found in each)


def test_processor_is_missed_only_while_there_are_requests() -> None:
    peer = Peer()
    peer.says()
    assert peer.session.lost_since is None
    peer.now += 60.0
    peer.requests.open(generate_of(5))
    peer.says()
    assert peer.session.lost_since == FIRST + 60.0
    peer.now += 5.0
    peer.says()
    assert peer.session.lost_since == FIRST + 60.0
    peer.requests.give_up("nobody there")
    assert peer.session.lost_since is None
    peer.now += 1.0
    peer.says()
    assert peer.session.lost_since is None
    peer.requests.open(generate_of(6))
    peer.now += 1.0
    peer.says()
    assert peer.session.lost_since == FIRST + 67.0
    peer.welcome()
    assert peer.session.lost_since is None


def test_loss_of_a_processor_has_a_reason() -> None:
    peer = Peer()
    for reason in ("it closes: it restarts", "silent for 4000 ms"):
        peer.says()
        peer.welcome()
        if reason.startswith("it"):
            goodbye = Goodbye(reason=GoodbyeReason.GOODBYE_REASON_RESTARTING, message="it restarts")
            peer.hear(goodbye=goodbye)
        else:
            peer.now += 4
            peer.says()
        assert peer.session.loss == reason


def test_welcome_that_cannot_be_changes_nothing() -> None:
    peer = opened()
    peer.requests.open(generate_of(5))
    list(peer.says_all())
    with pytest.raises(ContractError, match="above heartbeat_interval_ms, 1000"):
        peer.welcome(processor_id="other", heartbeat_timeout_ms=1000)
    assert (peer.session.processor_id, peer.session.handshakes, peer.bodies()) == ("p", 1, [])
