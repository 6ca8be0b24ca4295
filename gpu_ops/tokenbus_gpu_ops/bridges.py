"""Bridges to GPU frameworks, which find the caller's stream and the addresses of tensors."""

import sys
from functools import cache
from typing import Any

import numpy as np

from tokenbus_contracts.errors import ContractError, Rule
from tokenbus_gpu_ops.errors import GpuUnavailableError
from tokenbus_gpu_ops.tensor import Tensor, from_dlpack, from_numpy, of_capsule

_TORCH_NAMES = {
    "torch.float32": "float32",
    "torch.float16": "float16",
    "torch.bfloat16": "bfloat16",
    "torch.int32": "int32",
    "torch.int64": "int64",
}


def tensor_of(name: str, values: Any, stream: int) -> Tensor:  # noqa: ANN401 - any object with DLPack
    """Return the address and layout of an argument, or raise ContractError."""
    if type(values) is np.ndarray:
        return from_numpy(values)
    if _is_torch(values) and (found := _of_torch(values)) is not None:
        return found
    if not hasattr(values, "__dlpack__"):
        if (capsule := _capsule_of_paddle(values)) is not None:
            return of_capsule(name, capsule)
        limit = "an array of numpy, paddle, torch, cupy or another DLPack library"
        raise ContractError(name, limit, type(values).__name__, rule=Rule.TYPE)
    try:
        return from_dlpack(name, values, stream)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, ContractError):
            raise
        raise ContractError(name, "an array that DLPack can describe", str(error), rule=Rule.TYPE) from None


def is_on_gpu(values: Any) -> bool:  # noqa: ANN401
    """Return whether an argument is on a CUDA device, without a DLPack call."""
    if type(values) is np.ndarray:
        return False
    if _is_torch(values):
        return bool(values.is_cuda)
    device = getattr(values, "__dlpack_device__", None)
    if device is None:
        place = getattr(values, "place", None)
        return _is_paddle(values) and place is not None and bool(place.is_gpu_place())
    return device()[0] in (2, 13)


def stream_of(values: Any, stream: Any) -> int:  # noqa: ANN401
    """Return the handle of `stream`, or of the current stream of the array's framework if `stream` is None."""
    if stream is not None:
        return _handle(stream)
    if _is_torch(values):
        # Use the tensor's device, because it may differ from the current device.
        current = sys.modules["torch"]._C._cuda_getCurrentRawStream  # noqa: SLF001 - faster than the public call
        return int(current(values.device.index))
    module = type(values).__module__.partition(".")[0]
    framework = sys.modules.get(module)
    if module == "cupy" and framework is not None:
        return int(framework.cuda.get_current_stream().ptr)
    if _is_paddle(values) and framework is not None:
        # In paddle 2.6, `current_stream` does not accept the type of a tensor's `place`.
        place = framework.CUDAPlace(values.place.gpu_device_id())
        return _handle(framework.device.current_stream(place))
    return 0


def to_host(values: Any) -> Any:  # noqa: ANN401
    """Return a copy of an argument in host memory."""
    for way in ("cpu", "get"):
        copy = getattr(values, way, None)
        if callable(copy):
            return copy()
    raise GpuUnavailableError(f"{type(values).__name__} has no way to the CPU: neither .cpu() nor .get()")


def _is_torch(values: Any) -> bool:  # noqa: ANN401
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(values, torch.Tensor)


def _is_paddle(values: Any) -> bool:  # noqa: ANN401
    return type(values).__module__.partition(".")[0] == "paddle"


def _capsule_of_paddle(values: Any) -> Any:  # noqa: ANN401
    """Return the DLPack capsule of a tensor of paddle before release 3, or None for other objects.

    Old paddle releases cannot synchronize a capsule with a stream. The caller's work is still ordered correctly,
    because the caller uses paddle's own stream.
    """
    if not _is_paddle(values):
        return None
    dlpack = sys.modules.get("paddle.utils.dlpack")
    return None if dlpack is None else dlpack.to_dlpack(values)


def _of_torch(values: Any) -> Tensor | None:  # noqa: ANN401
    """Return a plain torch tensor's address and layout, or None for other objects. DLPack takes three times as long."""
    name, on_gpu = _torch_name(values.dtype), values.is_cuda
    if name is None or (not on_gpu and values.device.type != "cpu"):
        return None
    device = values.device.index if on_gpu else None
    return Tensor(values.data_ptr(), tuple(values.shape), values.stride(), name, device, values)


@cache
def _torch_name(dtype: Any) -> str | None:  # noqa: ANN401
    return _TORCH_NAMES.get(str(dtype))


def _handle(stream: Any) -> int:  # noqa: ANN401
    """Return the handle of a stream of any framework."""
    if isinstance(stream, int):
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return int(protocol()[1])
    for way in ("cuda_stream", "ptr", "raw_stream"):
        handle = getattr(stream, way, None)
        if handle is not None:
            return int(handle)
    inner = getattr(stream, "stream_base", None)
    if inner is not None:
        return _handle(inner)
    raise ContractError("stream", "a stream or its handle", type(stream).__name__, rule=Rule.TYPE)
