"""Network: a small transformer over bytes, with ALiBi positions and one draft head per draft token.

This module imports paddle, so this module is imported only when a `Runner` is created.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from paddle import arange, concat, full_like, gather, nn, to_tensor, where, zeros  # noqa: TID253 - as above
from paddle.nn.functional import gelu, softmax  # noqa: TID253

from tokenbus.engines.paddle.runner import Tensor
from tokenbus.engines.paddle.tokenizer import VOCABULARY_SIZE
from tokenbus.engines.paddle.weights import STORED, Shape, WeightsError, load
from tokenbus.engines.sampling import Ids

Layer = Any
Store = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Function that stores a layer's new keys and values, and returns the layer's cached keys and values."""

_MASKED = -1e9


class Network:
    """The layers of the network. The output layer shares the embedding's weights."""

    def __init__(self, shape: Shape) -> None:
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
        """Return the state at each token, with attention to the first `keys` positions."""
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
        """Return the state and logits of a draft head, from the previous state and the previous token."""
        head = self.layers["heads"][number]
        token = head["token_norm"](self.layers["embedding"](tokens))
        joined = head["join"](concat([head["state_norm"](state), token], axis=-1))
        state = joined + _mixed(head, joined)
        return state, self.logits(head["norm"](state))

    def _bias(self, positions: Tensor, keys: int) -> Tensor:
        distance = (positions.unsqueeze(-1) - arange(keys, dtype="int64")).astype("float32").unsqueeze(1)
        return where(distance < 0, full_like(distance, _MASKED), -distance * self._slopes)

    def _attention(self, block: Layer, layer: int, found: Tensor, bias: Tensor, store: Store | None) -> Tensor:
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
    return layers["contract"](gelu(layers["expand"](layers["mixing_norm"](found))))


def _block(shape: Shape) -> Layer:
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


class KeyValueCache:
    """Cache of fixed size for the keys and values of each layer, by slot, head and position."""

    def __init__(self, shape: Shape, slots: int, context: int) -> None:
        self._context = context
        self._heads, self._size = shape.attention_heads, shape.head_width
        lines = slots * self._heads * context
        self._keys = [zeros([lines, self._size]) for _ in range(shape.layers)]
        self._values = [zeros([lines, self._size]) for _ in range(shape.layers)]

    def store(self, slots: Ids, positions: Ids, valid: npt.NDArray[np.bool_], keys: int) -> Store:
        """Return a function that stores the rows' valid positions and returns the first `keys` cached positions."""
        begins = (slots[:, None, None] * self._heads + np.arange(self._heads)[:, None]) * self._context
        every = np.repeat(valid[:, None], self._heads, axis=1)
        written = to_tensor((begins + positions[:, None])[every])
        chosen = None if valid.all() else to_tensor(np.flatnonzero(every))
        window = to_tensor((begins + np.arange(keys)).reshape(-1))
        given = [slots.size, self._heads, keys, self._size]

        def through(cached: Tensor, new: Tensor) -> Tensor:
            lines = new.reshape([-1, self._size])
            cached.scatter_(written, lines if chosen is None else lines.index_select(chosen), overwrite=True)
            # For short rows, `gather` is three times as fast as `index_select`.
            return gather(cached, window).reshape(given)

        return lambda layer, key, value: (through(self._keys[layer], key), through(self._values[layer], value))

    def clear(self, slot: int) -> None:
        """Zero a slot, because even a masked NaN would corrupt the next request."""
        lines = self._heads * self._context
        written, nothing = to_tensor(slot * lines + np.arange(lines)), zeros([lines, self._size])
        for cached in (*self._keys, *self._values):
            cached.scatter_(written, nothing, overwrite=True)


def network_of(path: Path) -> Network:
    """Load a network from a file of weights onto Paddle's current device."""
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
