"""UsageError: the base of the errors that end a command with one line. Imports nothing, so that every module may."""


class UsageError(Exception):
    """A setting, an address or a file of keys that a person gave cannot be used; the message is one line."""
