"""Runner: owns paddle, the network and the key-value cache on one device."""

import signal
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tokenbus.engines.paddle.weights import WeightsError
from tokenbus.engines.sampling import Ids, Logits

Tensor = Any
"""A tensor of Paddle, typed as Any because Paddle is imported only when needed."""


class DeviceError(RuntimeError):
    """Paddle or the requested device is missing."""


def framework(device: str) -> Any:  # noqa: ANN401 - a module
    """Import paddle and select a device, or raise DeviceError."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with warnings.catch_warnings(action="ignore"):  # Paddle warns about missing compilers
            import paddle
    except ImportError as error:
        raise DeviceError(f"the engine needs paddle, of the extra paddle or gpu: {error}") from None
    # Paddle's import replaces signal handlers, so that SIGTERM would no longer stop the worker.
    paddle.disable_signal_handler()
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
    # Stride kernels copy a transposed view element by element, 40 times slower than a transposing copy.
    paddle.set_flags({"FLAGS_use_stride_kernel": False})
    try:
        paddle.set_device(device)
    except (ValueError, RuntimeError) as error:
        raise DeviceError(f"device {device}: {' '.join(str(error).split())[:200]}") from None
    return paddle


class Piece(NamedTuple):
    """Consecutive tokens to compute for a request, after its cached tokens."""

    slot: int
    begin: int
    tokens: Sequence[int]


class Runner:
    """Owns the network and its cache on one device."""

    def __init__(self, weights: Path, device: str, *, slots: int, context: int) -> None:
        """Read the weights and allocate the cache, or raise WeightsError or DeviceError."""
        self._paddle = framework(device)
        from tokenbus.engines.paddle.network import KeyValueCache, network_of  # noqa: PLC0415 - it imports paddle

        self._network_of = network_of
        self._network = network_of(weights)
        self.shape = self._network.shape
        self.cache = KeyValueCache(self.shape, slots, context)

    def reload(self, weights: Path) -> None:
        """Load other weights of the same shape. A WeightsError leaves the current weights in use."""
        network = self._network_of(weights)
        if network.shape != self.shape:
            raise WeightsError(weights, f"{self.shape}, got {network.shape}")
        self._network = network

    def compute(self, groups: Sequence[Sequence[Piece]]) -> tuple[Tensor, Ids]:
        """Return the state of each token and the start of each piece.

        The pieces of a group are padded to the same length.
        """
        found, begins, count = [], [], 0
        for pieces in filter(None, groups):
            states = self._states(pieces)
            begins.append(count + np.arange(len(pieces)) * states.shape[1])
            found.append(states.reshape([-1, self.shape.width]))
            count += found[-1].shape[0]
        return (self._paddle.concat(found), np.concatenate(begins)) if found else (None, np.zeros(0, np.int64))

    def _states(self, pieces: Sequence[Piece]) -> Tensor:
        """Return states of shape [pieces, longest piece, width]."""
        slots = np.array([piece.slot for piece in pieces], np.int64)
        lengths = np.array([len(piece.tokens) for piece in pieces], np.int64)
        places = np.arange(lengths.max())
        valid = places < lengths[:, None]
        tokens = np.zeros(valid.shape, np.int64)
        tokens[valid] = np.concatenate([piece.tokens for piece in pieces])
        begins = np.array([piece.begin for piece in pieces], np.int64)
        # Padding repeats the last position, so that padded tokens attend to no later position.
        positions = begins[:, None] + np.minimum(places, lengths[:, None] - 1)
        keys = int(positions.max()) + 1
        store = self.cache.store(slots, positions, valid, keys)
        to_tensor = self._paddle.to_tensor
        return self._network.hidden(to_tensor(tokens), to_tensor(positions), keys, store)

    def chosen(self, lines: Tensor, places: Ids) -> Tensor:
        return lines.index_select(self._paddle.to_tensor(places))

    def logits(self, hidden: Tensor) -> Logits:
        found: Logits = self._network.logits(hidden).numpy()
        return found

    def further(self, head: int, state: Tensor, tokens: Ids) -> tuple[Tensor, Logits]:
        state, logits = self._network.further(head, state, self._paddle.to_tensor(tokens))
        return state, logits.numpy()
