"""Shape: how large the network is. The weights' file says it of itself."""

from dataclasses import asdict, dataclass, fields
from typing import Self

BEGIN = 256
"""Stands before every text."""
END = 257
"""Ends a text."""
VOCABULARY_SIZE = 258
"""The bytes, and the two above."""

_LARGEST = 4096


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes that the names and shapes of all weights follow from."""

    layers: int = 3
    """Blocks of the transformer."""
    width: int = 128
    """Numbers that one position is described by."""
    attention_heads: int = 4
    """Into how many the width is divided."""
    mixing_width: int = 384
    """The inner width of a block's mixing."""
    draft_heads: int = 3
    """Heads that predict one token further each: the most draft tokens there can be."""
    draft_width: int = 256
    """The inner width of such a head's mixing."""

    def __post_init__(self) -> None:
        """Refuse sizes that no network can have."""
        for field in fields(self):
            size = getattr(self, field.name)
            if type(size) is not int or not 1 <= size <= _LARGEST:
                raise ValueError(f"{field.name}: a whole number from 1 to {_LARGEST}, got {size!r}")
        if self.width % self.attention_heads:
            raise ValueError(f"attention_heads: a divisor of width, {self.width}, got {self.attention_heads}")

    @property
    def head_width(self) -> int:
        """How many numbers of a position one head of attention has."""
        return self.width // self.attention_heads

    @classmethod
    def of_metadata(cls, metadata: dict[str, str]) -> Self:
        """Return the shape that a file's metadata tells; a ValueError says what it lacks."""
        sizes = {}
        for field in fields(cls):
            text = metadata.get(field.name, "nothing")
            if not text.isascii() or not text.isdigit() or len(text) > len(str(_LARGEST)):
                raise ValueError(f"{field.name}: a whole number from 1 to {_LARGEST}, got {text[:32]}")
            sizes[field.name] = int(text)
        return cls(**sizes)

    def metadata(self) -> dict[str, str]:
        """Return the sizes as a file's metadata."""
        return {name: str(size) for name, size in asdict(self).items()}
