"""Reads and checks the network's weights from a safetensors file, which cannot contain code."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

COMMITTED = Path(__file__).with_name("weights.safetensors")
"""File that `python -m tests.engines.paddle.training` writes."""
FORMAT = "tokenbus-paddle-1"
STORED = np.dtype(np.float16)
_MOST_BYTES = 2**31
_LARGEST = 4096


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes that determine the names and shapes of all weights."""

    layers: int = 3
    width: int = 128
    attention_heads: int = 4
    mixing_width: int = 384
    """Inner width of a block's MLP."""
    draft_heads: int = 3
    """Number of draft heads, and so the maximum number of draft tokens."""
    draft_width: int = 256
    """Inner width of a draft head's MLP."""

    def __post_init__(self) -> None:
        if self.width % self.attention_heads:
            raise ValueError(f"attention_heads: a divisor of width, {self.width}, got {self.attention_heads}")

    @property
    def head_width(self) -> int:
        return self.width // self.attention_heads

    @classmethod
    def of_metadata(cls, metadata: dict[str, str]) -> Self:
        """Read the shape from a file's metadata, or raise ValueError."""
        sizes = {}
        for field in fields(cls):
            text = metadata.get(field.name, "nothing")
            if not (
                text.isascii() and text.isdigit() and len(text) <= len(str(_LARGEST)) and 1 <= int(text) <= _LARGEST
            ):
                raise ValueError(f"{field.name}: a whole number from 1 to {_LARGEST}, got {text[:32]}")
            sizes[field.name] = int(text)
        return cls(**sizes)


class WeightsError(RuntimeError):
    """The weights cannot be used."""

    def __init__(self, path: object, problem: str) -> None:
        super().__init__(f"weights {path}: {problem}")


class Weights(NamedTuple):
    """Contents of a file of weights."""

    shape: Shape
    arrays: dict[str, npt.NDArray[np.float16]]


def load(path: Path) -> Weights:
    """Read a file of weights, or raise WeightsError."""
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - part of the extra, like paddle

    try:
        with path.open("rb") as opened:  # for a folder, safetensors' own error does not name the path
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
