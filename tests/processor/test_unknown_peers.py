"""Unknown peers: each is asked for its handshake once an interval, few are remembered, and large frames cost little."""

from tests.in_process.bench import Bench
from tests.in_process.builders import client_hello, generate_of
from tokenbus_contracts.frames import read_frame
from tokenbus_contracts.generated.client_pb2 import ClientFrame, ServerFrame
from tokenbus_contracts.generated.request_pb2 import Generate, TokenPrompt
from tokenbus_contracts.generated.stream_pb2 import Heartbeat

LARGE = 5000


def test_unknown_peers_are_bounded() -> None:
    bench, frame = Bench(), ClientFrame(heartbeat=Heartbeat(sent_at_ns=1)).SerializeToString()

    def is_asked(peer: bytes) -> bool:
        bench.core.clients.receive(peer, [frame], bench.clock.now())
        return bool(bench.sent.pop(peer, None))

    assert all(is_asked(b"%d" % number) for number in range(1025))
    assert len(bench.core.clients._asked) == 1024
    assert not is_asked(b"1")
    assert is_asked(b"0")


def test_large_message_of_an_unknown_peer_is_not_read_unless_it_is_a_hello() -> None:
    bench = Bench()
    generate: Generate = generate_of(1, tokens=TokenPrompt(token_ids=[1] * LARGE))
    for data in (ClientFrame(generate=generate).SerializeToString(), b"\x12\x88\x27" + b"\xff" * LARGE):
        bench.core.clients.receive(b"unknown", [data], bench.clock.now())
        bench.advance(10)
    answers = [read_frame(ServerFrame, parts[0]).WhichOneof("body") for parts in bench.sent[b"unknown"]]
    assert answers == ["refusal", "refusal"]
    assert bench.core.clients.refused == 0
    assert bench.peers.cut == []


def test_refused_large_hellos_cost_little() -> None:
    bench = Bench()

    def say(peer: bytes, size: int) -> int:
        hello = ClientFrame(hello=client_hello(7, name="n" * size)).SerializeToString()
        bench.core.clients.receive(peer, [hello], bench.clock.now())
        return bench.core.clients.refused

    assert say(b"a", 1_000_000) == 1
    assert say(b"b", LARGE) == 1
    assert bench.peers.cut == [b"a", b"b"]
    assert say(b"c", 1000) == 2
    assert bench.client().heard()[0].body == "welcome"
    bench.clock.advance(1)
    assert say(b"d", LARGE) == 3
