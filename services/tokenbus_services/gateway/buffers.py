"""Buffers: what waits for all clients together, bounded in bytes; above the bound who holds the most ends first."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

_ALL = 2**31
_FREED_SHARE = 8
"""This part of the bound is freed at once, so that not every byte that comes has answers end."""


class Holder(Protocol):
    """An answer that may hold bytes which its client has not taken."""

    @property
    def held(self) -> int:
        """How many bytes it holds."""

    @property
    def unsent(self) -> int:
        """How many bytes its socket holds that the client has not taken."""

    def evict(self) -> None:
        """End, and free what it holds."""


_NOTHING: Mapping[Holder, int] = MappingProxyType({})


class Buffers:
    """The sum over all answers."""

    def __init__(self, most: int) -> None:
        """Take the bound in bytes."""
        self.most = most
        self.size = 0
        self.peak = 0
        self.evicted = 0
        """How many answers ended because all held too much together."""
        self._holders: dict[Holder, None] = {}
        self._is_evicting = False

    def join(self, holder: Holder) -> None:
        """Count an answer in."""
        self._holders[holder] = None

    def leave(self, holder: Holder) -> None:
        """Count an answer out; what it held was given back before."""
        self._holders.pop(holder, None)

    def grow(self, count: int) -> None:
        """Count bytes that are held from now on, fewer where the number is negative; above the bound answers end."""
        self.size += count
        self.peak = max(self.peak, self.size)
        if self.size > self.most:
            sizes = {each: each.held for each in self._holders}
            self._end(sizes, self.size - self.most + self.most // _FREED_SHARE, 1, _ALL)

    def evict(
        self, wanted: int, *, at_least: int = 1, most: int = _ALL, beside: Mapping[Holder, int] = _NOTHING
    ) -> None:
        """End answers, the largest first, until so many bytes are freed, and none that holds less than `at_least`.

        What their sockets hold counts, too; `beside` says what is held for them elsewhere.
        """
        sizes = {each: each.held + each.unsent + beside.get(each, 0) for each in self._holders}
        self._end(sizes, wanted, at_least, most)

    def _end(self, sizes: dict[Holder, int], wanted: int, at_least: int, most: int) -> None:
        if self._is_evicting:  # an answer that ends frees bytes, which comes here again
            return
        self._is_evicting = True
        # Of those that hold the same the newest: what went well before they came goes on.
        newest_first = list(reversed(sizes.items()))
        try:
            for holder, size in sorted(newest_first, key=_second, reverse=True)[:most]:
                if wanted <= 0 or size < at_least:
                    break
                wanted -= size
                self.evicted += 1
                holder.evict()
        finally:
            self._is_evicting = False


def _second(pair: tuple[Holder, int]) -> int:
    return pair[1]
