"""Lives: which request each slot has, as far as that can be told."""

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from tokenbus_engines.fastdeploy.message import Flags, Integers

Keys = npt.NDArray[np.uint64]
Times = npt.NDArray[np.float64]


@dataclass(slots=True, eq=False)
class Lives:
    """Of slots: the life that each has now."""

    keys: Keys
    positions: Integers
    decoder_lengths: Integers
    """When it got its last tokens; -1 where nobody said."""
    prompt_lengths: Integers
    known_since: Times
    """When it was first told of; infinity: not yet."""
    is_over: Flags
    is_interrupted: Flags
    """Whether its request was preempted, and has had no token since."""
    is_assigned: Flags

    def copy(self, least: int, new_key: Callable[[], int]) -> "Lives":
        """Return the same for at least so many slots."""
        if least <= self.keys.size:
            return Lives(**{name: getattr(self, name).copy() for name in _NAMES})
        fresh = lives_of(least - self.keys.size, new_key)
        return Lives(**{name: np.concatenate([getattr(self, name), getattr(fresh, name)]) for name in _NAMES})

    def begin(self, slots: npt.NDArray[np.intp], new_key: Callable[[], int]) -> None:
        """Give some slots other lives."""
        if not slots.size:
            return
        fresh = lives_of(slots.size, new_key)
        for name in _NAMES:
            getattr(self, name)[slots] = getattr(fresh, name)


_NAMES = [field.name for field in fields(Lives)]


def lives_of(count: int, new_key: Callable[[], int]) -> Lives:
    """Return so many lives that nobody was told of yet."""
    return Lives(
        keys=np.array([new_key() for _ in range(count)], np.uint64),
        positions=np.zeros(count, np.int64),
        decoder_lengths=np.full(count, -1, np.int64),
        prompt_lengths=np.full(count, -1, np.int64),
        known_since=np.full(count, np.inf),
        is_over=np.zeros(count, np.bool_),
        is_interrupted=np.zeros(count, np.bool_),
        is_assigned=np.zeros(count, np.bool_),
    )
