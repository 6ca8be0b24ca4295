"""PaddleOptions: how the engine is set up."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tokenbus_engines.paddle.weights import COMMITTED

_MOST_SLOTS = 1024
_MOST_CONTEXT = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddleOptions:
    """What a deployment decides; a ValueError says which is out of range."""

    weights: Path = COMMITTED
    device: str = "cpu"
    """As paddle names it: cpu, gpu, gpu:1."""
    role: Literal["mixed", "prefill", "decode"] = "mixed"
    """What it does: all of a request, its prompt and first token, or what follows them."""
    speculate: int = 3
    """How many tokens are drafted for a row; 0: none. No more than the weights have heads."""
    max_running: int = 32
    """How many requests have a slot of the cache; others wait."""
    context: int = 1024
    """How many tokens a slot holds: a request's prompt and its output."""
    prefill_chunk: int = 256
    """How many tokens of prompts a step computes at most."""
    slice_steps: int = 256
    """After how many steps with tokens a request gives its slot to one that waits; 0: never."""
    max_top_logprobs: int = 20
    """The most alternatives that a request may ask for."""

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        for name, low, high in (
            ("speculate", 0, 16),
            ("max_running", 1, _MOST_SLOTS),
            ("context", 2, _MOST_CONTEXT),
            ("prefill_chunk", 1, _MOST_CONTEXT),
            ("slice_steps", 0, 2**31 - 1),
            ("max_top_logprobs", 0, 127),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name}: {low} to {high}, got {value}")
        if self.role not in ("mixed", "prefill", "decode"):
            raise ValueError(f"role: mixed, prefill or decode, got {self.role}")
