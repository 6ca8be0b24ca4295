"""Reads and checks the network's weights, a safetensors file, which cannot contain code."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus.engines.paddle.network import Network, Shape

COMMITTED = Path(__file__).with_name("weights.safetensors")
"""Written by `python -m tests.engines.paddle.training`."""
FORMAT = "tokenbus-paddle-1"
STORED = np.dtype(np.float16)
_MOST_BYTES = 2**31


class WeightsError(RuntimeError):
    """The weights cannot be used."""

    def __init__(self, path: object, problem: str) -> None:
        super().__init__(f"weights {path}: {problem}")


class Weights(NamedTuple):
    """The contents of a file."""

    shape: Shape
    arrays: dict[str, npt.NDArray[np.float16]]


def load(path: Path) -> Weights:
    """Read a file; raises WeightsError."""
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - part of the extra, like paddle

    try:
        with path.open("rb") as opened:  # safetensors' error for a folder does not name the folder
            size = opened.seek(0, 2)
        if size > _MOST_BYTES:
            raise WeightsError(path, f"at most {_MOST_BYTES} bytes, got {size}")
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except OSError as error:
        raise WeightsError(path, error.strerror or str(error)) from None
    except SafetensorError as error:
        raise WeightsError(path, f"damaged, or no safetensors file: {error}") from None
    found = metadata.get("format", "nothing")
    if found != FORMAT:
        raise WeightsError(path, f"format: {FORMAT}, got {found[:64]}")
    try:
        shape = Shape.of_metadata(metadata)
    except ValueError as error:
        raise WeightsError(path, str(error)) from None
    return Weights(shape, arrays)


def network_of(path: Path) -> Network:
    """Return a network with a file's weights, on paddle's current device."""
    from paddle import to_tensor

    weights = load(path)
    network = Network(weights.shape)
    own = network.layers.state_dict()
    for name in sorted(own.keys() | weights.arrays.keys()):
        if name not in weights.arrays:
            raise WeightsError(path, f"{name}: missing")
        if name not in own:
            raise WeightsError(path, f"{name}: unknown weight")
        array = weights.arrays[name]
        if array.dtype != STORED:
            raise WeightsError(path, f"{name}: {STORED}, got {array.dtype}")
        wanted = tuple(own[name].shape)
        if array.shape != wanted:
            raise WeightsError(path, f"{name}: shape {wanted}, got {array.shape}")
        if not np.isfinite(array).all():
            raise WeightsError(path, f"{name}: finite numbers, got {array[~np.isfinite(array)][0]}")
    network.layers.set_state_dict({name: to_tensor(array.astype(np.float32)) for name, array in weights.arrays.items()})
    network.layers.eval()
    return network
