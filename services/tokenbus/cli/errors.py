"""The error that ends a command with one line. Imports nothing, so that every command may raise it."""

WRONG_USE = 2


class CommandError(Exception):
    """A command cannot do what it was asked for: one line that says why, and the exit status."""

    def __init__(self, message: str, status: int = 1) -> None:
        """Keep both; the status is `WRONG_USE` where the command line or a setting is at fault."""
        super().__init__(message)
        self.status = status
