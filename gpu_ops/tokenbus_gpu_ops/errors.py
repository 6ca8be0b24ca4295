"""The error of the GPU path. This module imports nothing, so that every module can raise the error."""


class GpuUnavailableError(RuntimeError):
    """The logits are on a GPU that cannot be used, or its libraries are missing."""
