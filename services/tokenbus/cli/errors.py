"""CommandError, which ends a command with one line."""

WRONG_USE = 2


class CommandError(Exception):
    """A command failed: a one-line reason, and the exit status (`WRONG_USE` for a usage error)."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status
