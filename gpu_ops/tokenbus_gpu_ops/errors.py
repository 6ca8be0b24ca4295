"""What the GPU path may not be able to do here. Imports nothing of ours, so that every module may raise it."""


class GpuUnavailableError(RuntimeError):
    """The logits are on a GPU, and what computes there is missing or cannot be used; the message says which and why."""
