"""CommandError: ends a command with a one-line message."""

WRONG_USE = 2


class CommandError(Exception):
    """A command failed. The error has a one-line reason and an exit status, which is `WRONG_USE` for a usage error."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status
