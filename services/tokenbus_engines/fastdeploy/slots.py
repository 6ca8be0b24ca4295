"""SlotRegistry: which request each slot has.

The engine's ops name no requests, only slots, and never say that one has ended. So a slot keeps its request until there
is a sign that it has another one; then the former ends with a row that says so.
"""

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tokenbus_contracts import ContractError, RowStatus, Rule
from tokenbus_engines.fastdeploy.message import PREEMPTED, UNRECOVERABLE, Flags, Integers
from tokenbus_engines.fastdeploy.slot_step import SlotStep

_RENEW_SECONDS = 12 * 3600.0
"""After so long a request ends without a sign: a processor lets no request last longer than a day."""
_FORGOTTEN_SECONDS = 23 * 3600.0
"""After so long its processor has ended it, or is about to."""
_MOST_ABSENT = 65_536
GOING_ON = np.array([RowStatus.ACTIVE, RowStatus.IDLE, RowStatus.PREFILLING], np.uint8)
REPLACED = RowStatus.ABORTED
"""The status of a row behind the slots' that ends what a slot had before."""
_Ended = tuple[int, int, RowStatus]
"""The id and the position of a request that has a last row behind the slots', and that row's status."""
SlotRequests = npt.NDArray[np.void]
"""Of slots: the request that each has now, as far as that is known."""
_SLOT = np.dtype(
    [
        ("key", np.uint64),
        ("position", np.int64),
        ("decoder_length", np.int64),  # when it got its last tokens; -1 where no op said
        ("prompt_length", np.int64),
        ("known_since", np.float64),  # when it was first published; infinity: not yet
        ("is_over", np.bool_),
        ("is_interrupted", np.bool_),  # preempted, and without a token since
        ("is_assigned", np.bool_),
    ]
)


@dataclass(slots=True, eq=False)
class Rows:
    """The rows of a message's slots, and behind them those that are about no slot."""

    keys: npt.NDArray[np.uint64]
    positions: Integers
    statuses: npt.NDArray[np.uint8]
    slots: int
    requests: SlotRequests
    """What holds once the rows are published."""
    reported: int = 0
    """How many requests that had been replaced before have their last row here."""

    def add(self, ended: list[_Ended]) -> None:
        """Put rows without tokens behind those that are there."""
        keys, positions, statuses = zip(*ended, strict=True)
        self.keys = np.append(self.keys, np.array(keys, np.uint64))
        self.positions = np.append(self.positions, np.array(positions, np.int64))
        self.statuses = np.append(self.statuses, np.array(statuses, np.uint8))


class SlotRegistry:
    """Owns the slots' requests. What is planned holds only once it is kept."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Begin without slots; keys begin with what no other process is likely to draw."""
        self._now = now
        self._prefix = (secrets.randbits(31) + 1) << 32
        self._drawn = 0
        self._requests = self._begun(0)
        self._replaced: list[_Ended] = []
        self._absent: OrderedDict[int, int] = OrderedDict()

    def _new_key(self) -> int:
        self._drawn += 1
        return self._prefix | self._drawn

    def _begun(self, count: int) -> SlotRequests:
        """Return so many new requests, of which nothing is known yet."""
        requests = np.zeros(count, _SLOT)
        requests["key"] = [self._new_key() for _ in range(count)]
        requests["decoder_length"] = requests["prompt_length"] = -1
        requests["known_since"] = np.inf
        return requests

    def _begin(self, requests: SlotRequests, slots: npt.NDArray[np.intp]) -> None:
        """Give some slots new requests."""
        if slots.size:
            requests[slots] = self._begun(slots.size)

    def _copied(self, least: int) -> SlotRequests:
        """Return a copy of the slots' requests, for at least so many slots."""
        missing = least - self._requests.size
        return np.concatenate([self._requests, self._begun(missing)]) if missing > 0 else self._requests.copy()

    # What the engine says.

    def assign(self, slot: int, key: int) -> None:
        """Give a slot the request that the engine named; its positions continue from its earlier tokens."""
        requests = self._copied(slot + 1)
        if int(requests["key"][slot]) == key:
            if requests["is_over"][slot]:
                raise ContractError("request_key", "one whose request has not ended", key, rule=Rule.UNIQUE)
            requests["is_assigned"][slot] = True
        else:
            self._leave(requests, slot)
            elsewhere = np.flatnonzero(requests["key"] == np.uint64(key))
            for other in elsewhere.tolist():  # it moves
                self._absent[key] = int(requests["position"][other])
                requests[other] = self._begun(1)[0]
            requests[slot] = self._begun(1)[0]
            requests["key"][slot] = key
            requests["position"][slot] = self._absent.pop(key, 0)
            requests["is_assigned"][slot] = True
        self._requests = requests

    def _leave(self, requests: SlotRequests, slot: int) -> None:
        key, position = int(requests["key"][slot]), int(requests["position"][slot])
        if requests["is_over"][slot] or not np.isfinite(requests["known_since"][slot]):
            return
        if requests["is_assigned"][slot] and requests["is_interrupted"][slot]:
            self._absent[key] = position  # it will be resumed, wherever that is
            if len(self._absent) > _MOST_ABSENT:
                self._replaced.append((*self._absent.popitem(last=False), REPLACED))
            return
        self._replaced.append((key, position, REPLACED))

    # What a step shows.

    def plan(self, step: SlotStep) -> Rows:
        """Return the rows of a target step."""
        count, now = step.slots, self._now()
        requests = self._copied(count)
        tokens, quiet = step.counts > 0, step.counts == 0
        replaced = self._is_replaced(step, requests, now)
        ended = [*_still_open(requests, np.flatnonzero(replaced), now), *self._replaced]
        self._begin(requests, np.flatnonzero(replaced | requests["is_over"][:count]))
        statuses = np.full(count, RowStatus.IDLE, np.uint8)
        statuses[tokens] = RowStatus.ACTIVE
        if step.prefilling is not None:
            statuses[quiet & step.prefilling] = RowStatus.PREFILLING
        statuses[quiet & self._is_left(step, requests)] = RowStatus.FINISHED_STOP
        statuses[step.counts == PREEMPTED] = RowStatus.PREEMPTED
        statuses[step.counts == UNRECOVERABLE] = RowStatus.UNRECOVERABLE
        if not step.is_running:
            statuses[np.isin(statuses, GOING_ON) & ~_proposing(step)] = RowStatus.FINISHED_STOP
        keys, positions = requests["key"][:count].copy(), requests["position"][:count].copy()
        rows = Rows(keys, positions, statuses, count, requests, len(self._replaced))
        if ended:
            rows.add(ended)
        _go_on(requests, step, statuses, now)
        return rows

    def keep(self, rows: Rows) -> None:
        """Apply rows that were published; the replaced requests that they ended are done."""
        self._requests = rows.requests
        self._replaced = self._replaced[rows.reported :]

    def lose(self) -> None:
        """Handle steps that were not published: every open request ends with an error, and its slot has a new one."""
        requests = self._requests.copy()
        is_open = np.isfinite(requests["known_since"]) & ~requests["is_over"]
        for slot in np.flatnonzero(is_open).tolist():
            key, position = int(requests["key"][slot]), int(requests["position"][slot])
            self._replaced.append((key, position, RowStatus.UNRECOVERABLE))
        self._begin(requests, np.flatnonzero(is_open))
        self._requests = requests

    def forget(self, keys: Iterable[int]) -> None:
        """Drop the last rows of requests that the bus has ended itself."""
        gone = frozenset(keys)
        self._replaced = [ended for ended in self._replaced if ended[0] not in gone]

    def _is_replaced(self, step: SlotStep, requests: SlotRequests, now: float) -> Flags:
        """Return which slots have another request than before, whose end no row has reported."""
        count = step.slots
        tokens = step.counts > 0
        had = requests["position"][:count] > 0
        replaced = requests["is_interrupted"][:count] & tokens & had
        if step.decoder_lengths is not None and step.prompt_lengths is not None:
            before, prompt = requests["decoder_length"][:count], requests["prompt_length"][:count]
            # A request's own length grows with every token.
            again = (step.decoder_lengths <= before) | (step.prompt_lengths != prompt)
            replaced |= tokens & had & (before >= 0) & again
        aged = now - requests["known_since"][:count] >= _RENEW_SECONDS
        found: Flags = (replaced | aged) & ~requests["is_over"][:count] & ~requests["is_assigned"][:count]
        return found

    def _is_left(self, step: SlotStep, requests: SlotRequests) -> Flags:
        """Return which slots without tokens have lost their requests."""
        count = step.slots
        left = requests["is_interrupted"][:count].copy()
        # An op without lengths has a token in each step for each request.
        left |= True if step.prefilling is None else step.prefilling
        found: Flags = left & (requests["position"][:count] > 0) & ~requests["is_assigned"][:count]
        return found


def _still_open(requests: SlotRequests, slots: npt.NDArray[np.intp], now: float) -> Iterator[_Ended]:
    """Yield each replaced request that its processor has not ended yet."""
    for slot in slots.tolist():
        if now - requests["known_since"][slot] < _FORGOTTEN_SECONDS:
            yield int(requests["key"][slot]), int(requests["position"][slot]), REPLACED


def _proposing(step: SlotStep) -> Flags:
    """Return which slots' requests continue elsewhere, with the draft ids that came with their tokens."""
    if step.proposal_counts is None:
        return np.zeros(step.slots, np.bool_)
    found: Flags = step.proposal_counts > 0
    return found


def _go_on(requests: SlotRequests, step: SlotStep, statuses: npt.NDArray[np.uint8], now: float) -> None:
    """Advance the requests to where they are once their rows are published."""
    count = step.slots
    tokens = step.counts > 0
    requests["position"][:count] += step.token_counts
    if step.decoder_lengths is not None and step.prompt_lengths is not None:
        requests["decoder_length"][:count][tokens] = step.decoder_lengths[tokens]
        requests["prompt_length"][:count][tokens] = step.prompt_lengths[tokens]
    requests["known_since"][:count] = np.minimum(requests["known_since"][:count], now)
    requests["is_over"][:count] = (statuses == RowStatus.FINISHED_STOP) | (statuses == RowStatus.UNRECOVERABLE)
    preempted = statuses == RowStatus.PREEMPTED
    requests["is_interrupted"][:count] = preempted | (requests["is_interrupted"][:count] & ~tokens)
