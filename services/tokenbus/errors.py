"""UsageError: the base of errors that end a command with one line."""


class UsageError(Exception):
    """A setting, an address or a key file of the user is invalid."""
