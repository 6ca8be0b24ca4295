"""Runner: computes on one device. It owns paddle, the network and the cache of keys and values."""

import signal
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus.engines.paddle.network import Shape, Store, Tensor
from tokenbus.engines.paddle.weights import WeightsError, network_of
from tokenbus.engines.sampling import Logits

Index = npt.NDArray[np.int64]
Lines = npt.NDArray[np.float32]


class DeviceError(RuntimeError):
    """Paddle is not installed, or does not have the device that was asked for."""


def framework(device: str) -> Any:  # noqa: ANN401 - a module
    """Import paddle, set it to a device, and return it; a DeviceError says what is missing."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with warnings.catch_warnings(action="ignore"):  # it warns of compilers that it would like to have
            import paddle
    except ImportError as error:
        raise DeviceError(f"the engine needs paddle, of the extra paddle or gpu: {error}") from None
    # Paddle takes signals over when it is imported: a stop would print a trace and not come through.
    paddle.disable_signal_handler()
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
    # A transposed view is made whole number by number then, forty times slower than a transposition that copies.
    paddle.set_flags({"FLAGS_use_stride_kernel": False})
    try:
        paddle.set_device(device)
    except (ValueError, RuntimeError) as error:
        raise DeviceError(f"device {device}: {' '.join(str(error).split())[:200]}") from None
    return paddle


class KeyValueCache:
    """Keys and values of each layer: by slot, then by head, then by position. Its size is fixed when it is made."""

    def __init__(self, shape: Shape, slots: int, context: int) -> None:
        from paddle import zeros

        self._context = context
        self._heads, self._size = shape.attention_heads, shape.head_width
        lines = slots * self._heads * context
        self._keys = [zeros([lines, self._size]) for _ in range(shape.layers)]
        self._values = [zeros([lines, self._size]) for _ in range(shape.layers)]

    def store(self, slots: Index, positions: Index, valid: npt.NDArray[np.bool_], keys: int) -> Store:
        """Return a store that keeps rows' valid positions in their slots, and returns the first `keys` positions."""
        from paddle import gather, to_tensor  # gather: index_select takes three times as long for lines this short

        begins = self._begins(slots)
        every = np.repeat(valid[:, None], self._heads, axis=1)
        written = to_tensor((begins + positions[:, None])[every])
        chosen = None if valid.all() else to_tensor(np.flatnonzero(every))
        window = to_tensor((begins + np.arange(keys)).reshape(-1))
        given = [slots.size, self._heads, keys, self._size]

        def through(cached: Tensor, new: Tensor) -> Tensor:
            lines = new.reshape([-1, self._size])
            cached.scatter_(written, lines if chosen is None else lines.index_select(chosen), overwrite=True)
            return gather(cached, window).reshape(given)

        return lambda layer, key, value: (through(self._keys[layer], key), through(self._values[layer], value))

    def clear(self, slot: int) -> None:
        """Zero a slot: numbers that are not finite would spoil its next request, even where attention masks them."""
        from paddle import to_tensor, zeros

        lines = self._heads * self._context
        written, nothing = to_tensor(slot * lines + np.arange(lines)), zeros([lines, self._size])
        for cached in (*self._keys, *self._values):
            cached.scatter_(written, nothing, overwrite=True)

    def _begins(self, slots: Index) -> Index:
        return (slots[:, None, None] * self._heads + np.arange(self._heads)[:, None]) * self._context


class Piece(NamedTuple):
    """Tokens of one request that are computed together, after those that its slot has."""

    slot: int
    begin: int
    tokens: Sequence[int]


class Runner:
    """Owns the network and its cache, on one device."""

    def __init__(self, weights: Path, device: str, *, slots: int, context: int) -> None:
        """Read the weights and allocate the cache; a WeightsError or DeviceError says why that cannot be."""
        self._paddle = framework(device)
        self._network = network_of(weights)
        self.shape = self._network.shape
        self.cache = KeyValueCache(self.shape, slots, context)

    def reload(self, weights: Path) -> None:
        """Take other weights of the same shape; a WeightsError says why not, and changes nothing."""
        network = network_of(weights)
        if network.shape != self.shape:
            raise WeightsError(weights, f"{self.shape}, got {network.shape}")
        self._network = network

    def compute(self, groups: Sequence[Sequence[Piece]]) -> tuple[Tensor, Index]:
        """Return each token's state, and where each piece begins. The pieces of a group are padded to one length."""
        found, begins, count = [], [], 0
        for pieces in filter(None, groups):
            states = self._states(pieces)
            begins.append(count + np.arange(len(pieces)) * states.shape[1])
            found.append(states.reshape([-1, self.shape.width]))
            count += found[-1].shape[0]
        return (self._paddle.concat(found), np.concatenate(begins)) if found else (None, np.zeros(0, np.int64))

    def _states(self, pieces: Sequence[Piece]) -> Tensor:
        """Return the state at each token of each piece: [pieces, tokens of the longest, width]."""
        slots = np.array([piece.slot for piece in pieces], np.int64)
        lengths = np.array([len(piece.tokens) for piece in pieces], np.int64)
        places = np.arange(lengths.max())
        valid = places < lengths[:, None]
        tokens = np.zeros(valid.shape, np.int64)
        tokens[valid] = np.concatenate([piece.tokens for piece in pieces])
        begins = np.array([piece.begin for piece in pieces], np.int64)
        # What is filled up repeats the last place, so that it attends to nothing beyond.
        positions = begins[:, None] + np.minimum(places, lengths[:, None] - 1)
        keys = int(positions.max()) + 1
        store = self.cache.store(slots, positions, valid, keys)
        to_tensor = self._paddle.to_tensor
        return self._network.hidden(to_tensor(tokens), to_tensor(positions), keys, store)

    def chosen(self, lines: Tensor, places: Index) -> Tensor:
        """Return some of the lines."""
        return lines.index_select(self._paddle.to_tensor(places))

    def logits(self, hidden: Tensor) -> Logits:
        """Return the logits of the token after each."""
        found: Logits = self._network.logits(hidden).numpy()
        return found

    def further(self, place: int, state: Tensor, tokens: npt.NDArray[np.int64]) -> tuple[Tensor, Logits]:
        """Return the state and the logits of a draft head, given the state before it and the tokens chosen."""
        state, logits = self._network.further(place, state, self._paddle.to_tensor(tokens))
        return state, logits.numpy()
