"""CUDA's driver through its Python bindings, imported on first use. Errors become exceptions."""

from functools import cache
from typing import Any

from tokenbus_gpu_ops.errors import GpuUnavailableError

_HOW = "install tokenbus[gpu], or pass cpu_fallback=True to compute on the CPU"


@cache
def driver() -> Any:  # noqa: ANN401 - the bindings have no types
    try:
        from cuda.bindings import driver as bindings

        fault, *_ = bindings.cuInit(0)
    except (ImportError, RuntimeError, OSError) as error:
        raise GpuUnavailableError(f"the logits are on a GPU and CUDA cannot be reached: {error}; {_HOW}") from None
    if int(fault):
        raise GpuUnavailableError(f"the logits are on a GPU and CUDA cannot be used: {name_of(fault)}; {_HOW}")
    return bindings


@cache
def core() -> Any:  # noqa: ANN401
    """Return cuda-core, which compiles and loads kernels."""
    try:
        from cuda import core as module
    except (ImportError, RuntimeError, OSError) as error:
        raise GpuUnavailableError(f"the logits are on a GPU and cuda-core is missing: {error}; {_HOW}") from None
    if not hasattr(module, "Program"):
        raise GpuUnavailableError(f"cuda-core {module.__version__} is too old: 1.0 or newer is needed; {_HOW}")
    return module


def name_of(fault: Any) -> str:  # noqa: ANN401
    return str(getattr(fault, "name", fault))


def done(result: tuple[Any, ...]) -> Any:  # noqa: ANN401
    """Return the result of a driver call. An error of the driver is raised as an exception."""
    fault = result[0]
    if fault:
        raise RuntimeError(f"CUDA: {name_of(fault)}")
    return result[1] if len(result) > 1 else None
