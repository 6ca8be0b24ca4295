"""KeyValueCache: what attention needs of the positions before, in as many slots as there are, and no more."""

import numpy as np
import numpy.typing as npt

from tokenbus_engines.paddle.network import Store, Tensor
from tokenbus_engines.paddle.shape import Shape

Index = npt.NDArray[np.int64]
Lines = npt.NDArray[np.float32]


class KeyValueCache:
    """Keys and values of each layer: by slot, then by head, then by position. Its size is fixed when it is made."""

    def __init__(self, shape: Shape, slots: int, context: int) -> None:
        """Allocate all of it, on the device that paddle is set to."""
        from paddle import zeros

        self._context = context
        self._heads, self._size = shape.attention_heads, shape.head_width
        lines = slots * self._heads * context
        self._keys = [zeros([lines, self._size]) for _ in range(shape.layers)]
        self._values = [zeros([lines, self._size]) for _ in range(shape.layers)]
        self.bytes = 2 * shape.layers * lines * self._size * 4

    def store(self, slots: Index, positions: Index, valid: npt.NDArray[np.bool_], keys: int) -> Store:
        """Return what keeps the new positions of rows in their slots, and gives all of their first positions back.

        Rows are filled up to the longest: what is not valid is not kept.
        """
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

    def read(self, slot: int, length: int) -> tuple[Lines, Lines]:
        """Return a slot's first positions: keys and values, each as [layers, heads, positions, width of a head]."""
        from paddle import to_tensor

        window = to_tensor(self._first(slot, length))
        shape = (self._heads, length, self._size)
        keys, values = (
            np.stack([layer.index_select(window).numpy().reshape(shape) for layer in layers])
            for layers in (self._keys, self._values)
        )
        return keys, values

    def write(self, slot: int, keys: Lines, values: Lines) -> None:
        """Fill a slot's first positions with what `read` returned."""
        from paddle import to_tensor

        written = to_tensor(self._first(slot, keys.shape[2]))
        for cached, given in ((self._keys, keys), (self._values, values)):
            for layer, lines in zip(cached, given, strict=True):
                layer.scatter_(written, to_tensor(lines.reshape(-1, self._size)), overwrite=True)

    def clear(self, slot: int) -> None:
        """Forget a slot whose numbers went wrong: even unattended, what is not finite would spoil the next request."""
        nothing = np.zeros((len(self._keys), self._heads, self._context, self._size), np.float32)
        self.write(slot, nothing, nothing)

    def _begins(self, slots: Index) -> Index:
        """Return where each head of each slot begins, as [slots, heads, 1]."""
        return (slots[:, None, None] * self._heads + np.arange(self._heads)[:, None]) * self._context

    def _first(self, slot: int, length: int) -> Index:
        begins = self._begins(np.array([slot], np.int64))
        return (begins + np.arange(length)).reshape(-1)
