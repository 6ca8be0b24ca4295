"""UsageError: the base of errors that end a command with one line."""


class UsageError(Exception):
    """A setting, address or key file given by the user is invalid."""
