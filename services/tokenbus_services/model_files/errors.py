"""Errors about a model's folder."""


class ModelFilesError(ValueError):
    """A file of a model's folder is missing or cannot be used; one line with the path says why."""
