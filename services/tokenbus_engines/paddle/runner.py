"""Runner: gives the network its numbers, and the host what it computed."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus_engines.paddle.cache import KeyValueCache
from tokenbus_engines.paddle.framework import framework
from tokenbus_engines.paddle.network import Tensor
from tokenbus_engines.paddle.options import PaddleOptions
from tokenbus_engines.paddle.speculation import Logits
from tokenbus_engines.paddle.weights import network_of


class Piece(NamedTuple):
    """Tokens of one request that are computed together, after those that its slot has."""

    slot: int
    begin: int
    tokens: Sequence[int]


class Runner:
    """Owns the network and its cache, on one device."""

    def __init__(self, options: PaddleOptions) -> None:
        """Read the weights and allocate the cache; a WeightsError or DeviceError says why that cannot be."""
        self._paddle = framework(options.device)
        self._network, self.fingerprint = network_of(options.weights)
        self.shape = self._network.shape
        self.cache = KeyValueCache(self.shape, options.max_running, options.context)

    def compute(self, pieces: Sequence[Piece]) -> Tensor:
        """Return what describes each token of each piece, as [pieces, tokens of the longest, width]."""
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

    def lines(self, hidden: Sequence[Tensor]) -> Tensor:
        """Return the descriptions of several computations one after the other."""
        width = self.shape.width
        return self._paddle.concat([each.reshape([-1, width]) for each in hidden])

    def chosen(self, lines: Tensor, places: Sequence[int] | npt.NDArray[np.integer]) -> Tensor:
        """Return some of them."""
        return lines.index_select(self._paddle.to_tensor(np.asarray(places, np.int64)))

    def logits(self, hidden: Tensor) -> Logits:
        """Return the logits of the token after each."""
        return _on_host(self._network.logits(hidden))

    def further(self, place: int, state: Tensor, tokens: npt.NDArray[np.int64]) -> tuple[Tensor, Logits]:
        """Return the state and the logits of a draft head, given the state before it and the tokens chosen."""
        state, logits = self._network.further(place, state, self._paddle.to_tensor(tokens))
        return state, _on_host(logits)


def _on_host(tensor: Tensor) -> Logits:
    found: Logits = tensor.numpy()
    return found
