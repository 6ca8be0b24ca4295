"""What peers that have not introduced themselves may cost by large messages: a small share of the time."""

LARGE = 4096
"""Above so many bytes a message is large."""
_BYTES_A_SECOND = 8_388_608
"""Of large messages that were refused; reading them takes less than a tenth of the time."""


class UnadmittedBudget:
    """Lets large messages be read as long as those before them were not refused; small ones cost too little to count.

    A peer that opens connection after connection would else keep a listener busy with what is refused.
    """

    def __init__(self) -> None:
        self._free_at = 0.0

    def allows(self, size: int, now: float) -> bool:
        """Tell whether a message of so many bytes may be read now; the time is in seconds."""
        return size <= LARGE or now >= self._free_at

    def refused(self, size: int, now: float) -> None:
        """Learn that a message was read and refused: large ones are not read for a while."""
        if size > LARGE:
            self._free_at = max(self._free_at, now) + size / _BYTES_A_SECOND
