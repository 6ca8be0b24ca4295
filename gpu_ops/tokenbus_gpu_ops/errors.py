"""Defines GpuUnavailableError. This module imports no other module, to avoid import cycles."""


class GpuUnavailableError(RuntimeError):
    """Raised if the logits are on a GPU that cannot be used, for example because libraries are missing."""
