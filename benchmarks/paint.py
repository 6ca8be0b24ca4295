"""Colours for a terminal."""

_GREEN, _RED, _BOLD = 32, 31, 1


class Paint:
    """Colours where they are wanted, the bare text elsewhere."""

    def __init__(self, *, colour: bool) -> None:
        """Say whether colours are wanted."""
        self._colour = colour

    def good(self, text: str) -> str:
        """Return text that reports a goal met, or our own line."""
        return self._in(_GREEN, text)

    def bad(self, text: str) -> str:
        """Return text that reports a goal missed, or a peer that did not run."""
        return self._in(_RED, text)

    def title(self, text: str) -> str:
        """Return a table's title."""
        return self._in(_BOLD, text)

    def _in(self, code: int, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._colour else text
