"""The error of the GPU path, in a module that every other one can import."""


class GpuUnavailableError(RuntimeError):
    """The logits are on a GPU that cannot be used, or its libraries are missing."""
