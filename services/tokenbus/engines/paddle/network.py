"""Network: a small transformer over bytes with ALiBi positions and draft heads, each for one token further."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Self

from tokenbus.engines.paddle.tokenizer import VOCABULARY_SIZE

Tensor = Any
"""A paddle tensor; paddle is imported lazily."""
Layer = Any
Store = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Stores a layer's new keys and values [rows, heads, positions, head width]; returns all cached ones."""

_MASKED = -1e9
_LARGEST = 4096


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes that determine the names and shapes of all weights."""

    layers: int = 3
    width: int = 128
    attention_heads: int = 4
    mixing_width: int = 384
    """The inner width of a block's MLP."""
    draft_heads: int = 3
    """The limit of draft tokens: each head predicts one token further."""
    draft_width: int = 256
    """The inner width of a draft head's MLP."""

    def __post_init__(self) -> None:
        if self.width % self.attention_heads:
            raise ValueError(f"attention_heads: a divisor of width, {self.width}, got {self.attention_heads}")

    @property
    def head_width(self) -> int:
        return self.width // self.attention_heads

    @classmethod
    def of_metadata(cls, metadata: dict[str, str]) -> Self:
        """Read the shape from a file's metadata; raises ValueError."""
        sizes = {}
        for field in fields(cls):
            text = metadata.get(field.name, "nothing")
            if not (
                text.isascii() and text.isdigit() and len(text) <= len(str(_LARGEST)) and 1 <= int(text) <= _LARGEST
            ):
                raise ValueError(f"{field.name}: a whole number from 1 to {_LARGEST}, got {text[:32]}")
            sizes[field.name] = int(text)
        return cls(**sizes)


class Network:
    """The layers of the network. The output layer shares the embedding's weights."""

    def __init__(self, shape: Shape) -> None:
        from paddle import nn, to_tensor

        self.shape = shape
        self.layers: Layer = nn.LayerDict(
            {
                "embedding": nn.Embedding(VOCABULARY_SIZE, shape.width),
                "blocks": nn.LayerList([_block(shape) for _ in range(shape.layers)]),
                "norm": nn.LayerNorm(shape.width),
                "heads": nn.LayerList([_head(shape) for _ in range(shape.draft_heads)]),
            }
        )
        slopes = [2.0 ** (-8.0 * (head + 1) / shape.attention_heads) for head in range(shape.attention_heads)]
        self._slopes = to_tensor(slopes, dtype="float32").reshape([1, shape.attention_heads, 1, 1])

    def hidden(self, tokens: Tensor, positions: Tensor, keys: int, store: Store | None = None) -> Tensor:
        """Return the state at each token [rows, tokens], with attention to the first `keys` positions."""
        bias = self._bias(positions, keys)
        found = self.layers["embedding"](tokens)
        for layer, block in enumerate(self.layers["blocks"]):
            found = found + self._attention(block, layer, found, bias, store)
            found = found + _mixed(block, found)
        return self.layers["norm"](found)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the token after each position."""
        return hidden.matmul(self.layers["embedding"].weight, transpose_y=True)

    def further(self, number: int, state: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the state and logits of a draft head, from the previous state and the token sampled from it."""
        from paddle import concat

        head = self.layers["heads"][number]
        token = head["token_norm"](self.layers["embedding"](tokens))
        joined = head["join"](concat([head["state_norm"](state), token], axis=-1))
        state = joined + _mixed(head, joined)
        return state, self.logits(head["norm"](state))

    def _bias(self, positions: Tensor, keys: int) -> Tensor:
        from paddle import arange, full_like, where

        distance = (positions.unsqueeze(-1) - arange(keys, dtype="int64")).astype("float32").unsqueeze(1)
        return where(distance < 0, full_like(distance, _MASKED), -distance * self._slopes)

    def _attention(self, block: Layer, layer: int, found: Tensor, bias: Tensor, store: Store | None) -> Tensor:
        from paddle.nn.functional import softmax

        query, key, value = block["query_key_value"](block["attention_norm"](found)).chunk(3, axis=-1)
        heads, size = self.shape.attention_heads, self.shape.head_width
        query, key, value = (_by_head(each, heads, size) for each in (query, key, value))
        if store is not None:
            key, value = store(layer, key, value)
        weights = softmax(query.matmul(key, transpose_y=True) * size**-0.5 + bias, axis=-1)
        together = weights.matmul(value).transpose([0, 2, 1, 3])
        return block["attended"](together.reshape([found.shape[0], found.shape[1], heads * size]))


def _by_head(each: Tensor, heads: int, size: int) -> Tensor:
    return each.reshape([each.shape[0], each.shape[1], heads, size]).transpose([0, 2, 1, 3])


def _mixed(layers: Layer, found: Tensor) -> Tensor:
    from paddle.nn.functional import gelu

    return layers["contract"](gelu(layers["expand"](layers["mixing_norm"](found))))


def _block(shape: Shape) -> Layer:
    from paddle import nn

    width = shape.width
    return nn.LayerDict(
        {
            "attention_norm": nn.LayerNorm(width),
            "query_key_value": nn.Linear(width, 3 * width),
            "attended": nn.Linear(width, width),
            "mixing_norm": nn.LayerNorm(width),
            "expand": nn.Linear(width, shape.mixing_width),
            "contract": nn.Linear(shape.mixing_width, width),
        }
    )


def _head(shape: Shape) -> Layer:
    from paddle import nn

    width = shape.width
    return nn.LayerDict(
        {
            "state_norm": nn.LayerNorm(width),
            "token_norm": nn.LayerNorm(width),
            "join": nn.Linear(2 * width, width),
            "mixing_norm": nn.LayerNorm(width),
            "expand": nn.Linear(width, shape.draft_width),
            "contract": nn.Linear(shape.draft_width, width),
            "norm": nn.LayerNorm(width),
        }
    )
