"""Computes logprob columns from logits, with CUDA kernels, an equivalent CPU version, and bridges to GPU frameworks."""

from tokenbus_gpu_ops.api import token_logprobs
from tokenbus_gpu_ops.columns import FaultReason, TokenColumns, TokenFault
from tokenbus_gpu_ops.errors import GpuUnavailableError

__all__ = ["FaultReason", "GpuUnavailableError", "TokenColumns", "TokenFault", "token_logprobs"]
