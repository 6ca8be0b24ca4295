"""Proofs: what a session draws once and shows in each hello, and what no other peer gets to see."""

from tests.in_process.builders import settings
from tests.worker.peer import Peer as WorkerPeer
from tokenbus.client import Client
from tokenbus.testing import ManualClock


def test_each_hello_of_a_life_shows_the_same_proof() -> None:
    shown: list[list[bytes]] = []
    for _ in range(3):
        peer, proofs = WorkerPeer(), []
        for _ in range(3):
            proofs.append(peer.must_say().hello.proof)
            peer.now += 5
        shown.append(proofs)
    assert all(len(set(proofs)) == 1 and len(proofs[0]) == 16 for proofs in shown)
    assert len({proofs[0] for proofs in shown}) == 3


def test_client_shows_each_processor_the_same_proof() -> None:
    chosen = settings({"bus.clients_address": "memory://here,memory://there"})
    shown = [{session._hello().proof for session in Client(chosen, clock=ManualClock()).sessions} for _ in range(2)]
    assert [len(proof) for proofs in shown for proof in proofs] == [16, 16]
    assert shown[0] != shown[1]
