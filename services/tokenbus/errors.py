"""UsageError: the base class of errors that end a command with a one-line message."""


class UsageError(Exception):
    """A setting, address or key file given by the user is invalid."""
