"""Scheduler: decides which requests a step computes, and which requests wait or are preempted."""

from collections import deque
from typing import NamedTuple

import numpy as np

from tokenbus.engines.requests import Requests
from tokenbus.engines.sampling import Ids

_NONE = np.zeros(0, np.int64)


class Plan(NamedTuple):
    """Slots of a step by kind of work, each kind in the order of admission."""

    decode: Ids
    """Slots that get their next tokens."""
    computing: Ids
    """All slots with a chunk to compute, from both `first` and `prefilling`."""
    sizes: Ids
    """Number of tokens in the chunk of each slot in `computing`."""
    first: Ids
    """Slots that complete their prompt and get their first token."""
    prefilling: Ids
    """Slots that get no token because their prompt is incomplete or they resume after a preemption."""
    preempted: Ids
    aborted: Ids


class Scheduler:
    """Runs requests in the order of admission, each at its own index in the engine's cache.

    The scheduler owns the cache indices, the numbers of uncomputed tokens, and the set of running requests. After a
    failed step, the next plan repeats its work.
    """

    def __init__(self, requests: Requests, *, max_running: int, prefill_chunk: int, slice_steps: int) -> None:
        self._requests = requests
        self._prefill_chunk = prefill_chunk
        self._slice_steps = slice_steps
        self._running = _NONE
        self._waiting: deque[int] = deque()
        self._aborted: set[int] = set()
        self._free = list(range(max_running))
        self._starts_none = self._computes_none = False
        """If `_starts_none` is set, requests without a token wait. If `_computes_none` is set, all requests wait."""

    def add(self, slot: int) -> None:
        self._waiting.append(slot)

    def abort(self, slot: int) -> None:
        """End a request in the next step."""
        self._aborted.add(slot)

    def pause(self, *, running: bool) -> None:
        """Stop computing requests that have no token yet. If `running` is set, compute nothing at all."""
        self._starts_none, self._computes_none = True, running

    def resume(self) -> None:
        self._starts_none = self._computes_none = False

    @property
    def has_work(self) -> bool:
        if self._aborted or not self._starts_none:
            return bool(self._aborted or self._running.size or self._waiting)
        return not self._computes_none and bool(self._running.size or any(map(self._may_start, self._waiting)))

    def _may_start(self, slot: int) -> bool:
        return not self._starts_none or bool(self._requests.positions[slot])

    def plan(self) -> Plan:
        """Preempt and start requests, and return the plan of the next step."""
        requests = self._requests
        aborted = self._end_aborted() if self._aborted else _NONE
        if self._computes_none:
            return Plan(_NONE, _NONE, _NONE, _NONE, _NONE, _NONE, aborted)
        preempted = _NONE if self._starts_none else self._preempt()
        self._start()
        running = self._running
        missing = requests.missing[running]
        if not missing.any():
            return Plan(running, _NONE, _NONE, _NONE, _NONE, preempted, aborted)
        sizes = np.clip(self._prefill_chunk - (np.cumsum(missing) - missing), 0, missing)
        has_chunk = sizes > 0
        computing = running[has_chunk]
        is_first = (sizes == missing)[has_chunk] & (requests.positions[computing] == 0)
        decode, first, prefilling = running[missing == 0], computing[is_first], computing[~is_first]
        return Plan(decode, computing, sizes[has_chunk], first, prefilling, preempted, aborted)

    def undo(self, plan: Plan) -> None:
        """Undo the plan of a failed step, so that the next plan still ends the aborted requests."""
        self._aborted.update(plan.aborted.tolist())

    def advance(self, plan: Plan, ended: Ids) -> None:
        """Record a successful step and the requests that it ended."""
        self._requests.steps[plan.decode] += 1
        self._requests.missing[plan.computing] -= plan.sizes
        if ended.size:
            self._stop(ended)

    def _end_aborted(self) -> Ids:
        slots = self._aborted
        self._aborted = set()
        self._waiting = deque(slot for slot in self._waiting if slot not in slots)
        ended = np.array(sorted(slots), np.int64)
        self._stop(ended)
        return ended[np.argsort(self._requests.serials[ended])]

    def _preempt(self) -> Ids:
        """Preempt the longest-running requests, one per waiting request. Preempted requests lose their cache."""
        wanting = len(self._waiting) - len(self._free)
        if not self._slice_steps or wanting <= 0:
            return _NONE
        steps = self._requests.steps[self._running]
        oldest = np.argsort(-steps, kind="stable")[:wanting]
        preempted = self._running[oldest[steps[oldest] >= self._slice_steps]]
        self._stop(preempted)
        self._requests.missing[preempted] = self._requests.to_compute(preempted)
        self._waiting.extend(preempted.tolist())
        return preempted

    def _start(self) -> None:
        started: list[int] = []
        able = [slot for slot in self._waiting if self._may_start(slot)] if self._free else []
        for slot in able[: len(self._free)]:
            self._waiting.remove(slot)
            self._requests.places[slot] = self._free.pop()
            self._requests.steps[slot] = 0
            started.append(slot)
        if started:
            running = np.concatenate([self._running, np.array(started, np.int64)])
            self._running = running[np.argsort(self._requests.serials[running])]

    def _stop(self, slots: Ids) -> None:
        """Remove slots from the running set, and free their cache indices."""
        stops = np.isin(self._running, slots)
        self._free += self._requests.places[self._running[stops]].tolist()
        self._running = self._running[~stops]
