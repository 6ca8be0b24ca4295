"""UnknownPeers: each is asked for its handshake once an interval, and only so many are remembered."""

from tokenbus_services.processor.connections import UnknownPeers


def test_unknown_peer_is_asked_once_an_interval() -> None:
    """A peer is asked for its handshake at once, and again after an interval and not before, whatever others do."""
    unknown = UnknownPeers(1.0)
    assert [unknown.is_due(b"a", now) for now in (0.0, 0.5, 0.999, 1.0, 1.5)] == [
        True,
        False,
        False,
        True,
        False,
    ]
    assert unknown.is_due(b"b", 1.5)


def test_peer_that_is_unknown_again_is_asked_at_once() -> None:
    """A peer that said hello, and is not known any more, is asked again at once."""
    unknown = UnknownPeers(1.0)
    unknown.is_due(b"a", 0.0)
    unknown.forget(b"a")
    unknown.forget(b"never seen")
    assert unknown.is_due(b"a", 0.1)


def test_unknown_peers_are_bounded() -> None:
    """However many peers say nonsense, only so many are remembered, those that spoke last."""
    unknown = UnknownPeers(1.0)
    for number in range(1025):
        unknown.is_due(b"%d" % number, 0.0)
    assert len(unknown) == 1024
    assert not unknown.is_due(b"1", 0.5)
    assert unknown.is_due(b"0", 0.5)
