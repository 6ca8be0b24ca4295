"""The CPU twin: the same answers with numpy alone, where there is no GPU or the logits are not on one."""

from tokenbus_gpu_ops.cpu.twin import compute

__all__ = ["compute"]
