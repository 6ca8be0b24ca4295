"""UnknownPeers: peers that nobody knows, as after a restart, and when each was told to say hello."""

from collections import OrderedDict

_MOST = 1024


class UnknownPeers:
    """Tells each peer once an interval, and remembers only so many: anybody may connect and say nonsense."""

    def __init__(self, interval: float) -> None:
        """Tell a peer again after an interval, in seconds."""
        self._interval = interval
        self._told: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        """Return how many are remembered."""
        return len(self._told)

    def is_to_be_told(self, peer: bytes, now: float) -> bool:
        """Say whether a peer is to be told now, and take it that it is."""
        told = self._told.pop(peer, None)
        is_due = told is None or now - told >= self._interval
        self._told[peer] = now if told is None or is_due else told
        if len(self._told) > _MOST:
            self._told.popitem(last=False)
        return is_due

    def forget(self, peer: bytes) -> None:
        """Learn that a peer is known now."""
        self._told.pop(peer, None)
