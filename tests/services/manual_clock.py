"""A clock that stands still until a test moves it."""


class ManualClock:
    """Seconds that pass when the test says so."""

    def __init__(self, start: float = 1000.0) -> None:
        """Begin at some time that is not zero, as a machine's clock does."""
        self._now = start

    def now(self) -> float:
        """Return the time, in seconds."""
        return self._now

    def unix_ms(self) -> int:
        """Return the same time as a moment, in milliseconds since 1970-01-01 UTC."""
        return 1_700_000_000_000 + int(self._now * 1000)

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._now += seconds
