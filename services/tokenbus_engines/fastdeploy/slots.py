"""SlotBook: whose each slot's rows are.

The engine's ops name no requests, only slots, and never say that one has ended. So a request is a life of a slot:
it goes on for as long as there is no sign that the slot has another request, and then ends with a row that says so.
"""

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tokenbus_contracts import ContractError, RowStatus, Rule
from tokenbus_engines.fastdeploy.carried import SlotStep
from tokenbus_engines.fastdeploy.layout import PREEMPTED, UNRECOVERABLE
from tokenbus_engines.fastdeploy.lives import Keys, Lives, lives_of
from tokenbus_engines.fastdeploy.message import Flags, Integers

_RENEW_SECONDS = 12 * 3600.0
"""After so long a life ends without a sign: a processor lets no request last longer than a day."""
_FORGOTTEN_SECONDS = 23 * 3600.0
"""After so long its processor has ended it, or is about to."""
_MOST_ABSENT = 65_536
GOING_ON = np.array([RowStatus.ACTIVE, RowStatus.IDLE, RowStatus.PREFILLING], np.uint8)
REPLACED = RowStatus.ABORTED
"""The status of a row behind the slots' that ends what a slot had before."""
_Ended = tuple[int, int, RowStatus]
"""The key and the place of a life that has a last row behind the slots', and what is said of it."""


@dataclass(slots=True, eq=False)
class Rows:
    """The rows of a message's slots, and behind them those that are about no slot."""

    keys: Keys
    positions: Integers
    statuses: npt.NDArray[np.uint8]
    slots: int
    lives: Lives
    """What holds once the rows are published."""
    told: int = 0
    """How many lives that had been replaced before have their last row here."""

    def add(self, ended: list[_Ended]) -> None:
        """Put rows without tokens behind those that are there."""
        keys, positions, statuses = zip(*ended, strict=True)
        self.keys = np.append(self.keys, np.array(keys, np.uint64))
        self.positions = np.append(self.positions, np.array(positions, np.int64))
        self.statuses = np.append(self.statuses, np.array(statuses, np.uint8))


class SlotBook:
    """Owns the lives of slots; what is planned holds only once it is kept."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Begin without slots; keys begin with what no other process is likely to draw."""
        self._now = now
        self._prefix = (secrets.randbits(31) + 1) << 32
        self._drawn = 0
        self._lives = lives_of(0, self._new_key)
        self._replaced: list[_Ended] = []
        self._absent: OrderedDict[int, int] = OrderedDict()

    def _new_key(self) -> int:
        self._drawn += 1
        return self._prefix | self._drawn

    # What is known without a sign.

    def assign(self, slot: int, key: int) -> None:
        """Learn which request a slot has from now on; its tokens go on where they had come to under that key."""
        lives = self._lives.copy(slot + 1, self._new_key)
        if int(lives.keys[slot]) == key:
            if lives.is_over[slot]:
                raise ContractError("request_key", "one whose request has not ended", key, rule=Rule.UNIQUE)
            lives.is_assigned[slot] = True
        else:
            self._leave(lives, slot)
            elsewhere = np.flatnonzero(lives.keys == np.uint64(key))
            for other in elsewhere.tolist():  # it moves
                self._absent[key] = int(lives.positions[other])
                lives.begin(np.array([other]), self._new_key)
            lives.begin(np.array([slot]), lambda: key)
            lives.positions[slot] = self._absent.pop(key, 0)
            lives.is_assigned[slot] = True
        self._lives = lives

    def _leave(self, lives: Lives, slot: int) -> None:
        key, position = int(lives.keys[slot]), int(lives.positions[slot])
        if lives.is_over[slot] or not np.isfinite(lives.known_since[slot]):
            return
        if lives.is_assigned[slot] and lives.is_interrupted[slot]:
            self._absent[key] = position  # it will be resumed, wherever that is
            if len(self._absent) > _MOST_ABSENT:
                self._replaced.append((*self._absent.popitem(last=False), REPLACED))
            return
        self._replaced.append((key, position, REPLACED))

    # What a step tells.

    def plan(self, step: SlotStep) -> Rows:
        """Return the rows of a target step."""
        count, now = step.slots, self._now()
        lives = self._lives.copy(count, self._new_key)
        tokens, quiet = step.counts > 0, step.counts == 0
        replaced = self._is_replaced(step, lives, now)
        ended = [*_still_open(lives, np.flatnonzero(replaced), now), *self._replaced]
        lives.begin(np.flatnonzero(replaced | lives.is_over[:count]), self._new_key)
        statuses = np.full(count, RowStatus.IDLE, np.uint8)
        statuses[tokens] = RowStatus.ACTIVE
        if step.prefilling is not None:
            statuses[quiet & step.prefilling] = RowStatus.PREFILLING
        statuses[quiet & self._is_left(step, lives)] = RowStatus.FINISHED_STOP
        statuses[step.counts == PREEMPTED] = RowStatus.PREEMPTED
        statuses[step.counts == UNRECOVERABLE] = RowStatus.UNRECOVERABLE
        if not step.is_running:
            statuses[np.isin(statuses, GOING_ON) & ~_proposing(step)] = RowStatus.FINISHED_STOP
        rows = Rows(
            lives.keys[:count].copy(), lives.positions[:count].copy(), statuses, count, lives, len(self._replaced)
        )
        if ended:
            rows.add(ended)
        _go_on(lives, step, statuses, now)
        return rows

    def keep(self, rows: Rows) -> None:
        """Learn that rows were published, and what was replaced before them was told of."""
        self._lives = rows.lives
        self._replaced = self._replaced[rows.told :]

    def lose(self) -> None:
        """Learn that steps were not published: every life that is open ends with an error, and others begin."""
        lives = self._lives.copy(0, self._new_key)
        is_open = np.isfinite(lives.known_since) & ~lives.is_over
        for slot in np.flatnonzero(is_open).tolist():
            self._replaced.append((int(lives.keys[slot]), int(lives.positions[slot]), RowStatus.UNRECOVERABLE))
        lives.begin(np.flatnonzero(is_open), self._new_key)
        self._lives = lives

    def forget(self, keys: Iterable[int]) -> None:
        """Learn that the bus has ended some lives itself, which need no last row."""
        gone = frozenset(keys)
        self._replaced = [ended for ended in self._replaced if ended[0] not in gone]

    def _is_replaced(self, step: SlotStep, lives: Lives, now: float) -> Flags:
        """Tell which slots have another request than before, without a row that told of the end of the former one."""
        count = step.slots
        tokens = step.counts > 0
        had = lives.positions[:count] > 0
        replaced = lives.is_interrupted[:count] & tokens & had
        if step.decoder_lengths is not None and step.prompt_lengths is not None:
            before, prompt = lives.decoder_lengths[:count], lives.prompt_lengths[:count]
            # A request's own length grows with every token.
            again = (step.decoder_lengths <= before) | (step.prompt_lengths != prompt)
            replaced |= tokens & had & (before >= 0) & again
        aged = now - lives.known_since[:count] >= _RENEW_SECONDS
        found: Flags = (replaced | aged) & ~lives.is_over[:count] & ~lives.is_assigned[:count]
        return found

    def _is_left(self, step: SlotStep, lives: Lives) -> Flags:
        """Tell which slots, of those without tokens, their requests have left."""
        count = step.slots
        left = lives.is_interrupted[:count].copy()
        # An op that does not tell lengths has a token in each step for each request.
        left |= True if step.prefilling is None else step.prefilling
        found: Flags = left & (lives.positions[:count] > 0) & ~lives.is_assigned[:count]
        return found


def _still_open(lives: Lives, slots: npt.NDArray[np.intp], now: float) -> Iterator[_Ended]:
    """Yield each life that its processor has not ended yet."""
    for slot in slots.tolist():
        if now - lives.known_since[slot] < _FORGOTTEN_SECONDS:
            yield int(lives.keys[slot]), int(lives.positions[slot]), REPLACED


def _proposing(step: SlotStep) -> Flags:
    """Tell which slots' requests go on elsewhere, with the draft ids that came with their tokens."""
    if step.proposal_counts is None:
        return np.zeros(step.slots, np.bool_)
    found: Flags = step.proposal_counts > 0
    return found


def _go_on(lives: Lives, step: SlotStep, statuses: npt.NDArray[np.uint8], now: float) -> None:
    """Bring lives to where they are once their rows are published."""
    count = step.slots
    tokens = step.counts > 0
    lives.positions[:count] += step.token_counts
    if step.decoder_lengths is not None and step.prompt_lengths is not None:
        lives.decoder_lengths[:count][tokens] = step.decoder_lengths[tokens]
        lives.prompt_lengths[:count][tokens] = step.prompt_lengths[tokens]
    lives.known_since[:count] = np.minimum(lives.known_since[:count], now)
    lives.is_over[:count] = (statuses == RowStatus.FINISHED_STOP) | (statuses == RowStatus.UNRECOVERABLE)
    preempted = statuses == RowStatus.PREEMPTED
    lives.is_interrupted[:count] = preempted | (lives.is_interrupted[:count] & ~tokens)
