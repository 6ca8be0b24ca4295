"""Scheduler: continuous batching: which requests a step computes, and which wait or are preempted."""

from collections import deque
from typing import NamedTuple

import numpy as np

from tokenbus.engines.requests import Requests
from tokenbus.engines.sampling import Ids

_NONE = np.zeros(0, np.int64)


class Plan(NamedTuple):
    """The slots of a step, by what becomes of them; each in the order of admission."""

    decode: Ids
    """They continue after tokens that they have."""
    computing: Ids
    """A chunk of their tokens is computed: those of `first`, and those of `prefilling`."""
    sizes: Ids
    """Of those: how many tokens."""
    first: Ids
    """Their prompt is done in this step, and they get the first token."""
    prefilling: Ids
    """They get none: more is to come, or they had their first before they were preempted."""
    preempted: Ids
    aborted: Ids


class Scheduler:
    """Runs requests in the order of admission, each in a place of its own, as many as there are places for.

    It owns their places, what is missing of each, and the set of running requests. A plan's step that fails changes
    only which requests have a place: what was planned of them is planned again.
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
        """Whether it is paused: for requests that have no token yet, and for all."""

    def add(self, slot: int) -> None:
        """Let a request wait until there is room."""
        self._waiting.append(slot)

    def abort(self, slot: int) -> None:
        """End a request in the next step."""
        self._aborted.add(slot)

    def pause(self, *, running: bool) -> None:
        """Start no request, but for those that were preempted; if `running`, compute nothing at all."""
        self._starts_none, self._computes_none = True, running

    def resume(self) -> None:
        """Compute all requests."""
        self._starts_none = self._computes_none = False

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        if self._aborted or not self._starts_none:
            return bool(self._aborted or self._running.size or self._waiting)
        return not self._computes_none and bool(self._running.size or any(map(self._may_start, self._waiting)))

    def _may_start(self, slot: int) -> bool:
        return not self._starts_none or bool(self._requests.positions[slot])

    def plan(self) -> Plan:
        """Preempt and start requests, and return what the next step computes."""
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
        """Take back a plan whose step failed; the next plan ends its aborted requests."""
        self._aborted.update(plan.aborted.tolist())

    def advance(self, plan: Plan, ended: Ids) -> None:
        """Record that a plan's step succeeded, and which of its requests ended."""
        self._requests.steps[plan.decode] += 1
        self._requests.missing[plan.computing] -= plan.sizes
        if ended.size:
            self._take_out(ended)

    def _end_aborted(self) -> Ids:
        slots = self._aborted
        self._aborted = set()
        self._waiting = deque(slot for slot in self._waiting if slot not in slots)
        ended = np.array(sorted(slots), np.int64)
        self._take_out(ended)
        return ended[np.argsort(self._requests.serials[ended])]

    def _preempt(self) -> Ids:
        """Take out as many of the longest running as wait; what they had computed is computed again."""
        wanting = len(self._waiting) - len(self._free)
        if not self._slice_steps or wanting <= 0:
            return _NONE
        steps = self._requests.steps[self._running]
        oldest = np.argsort(-steps, kind="stable")[:wanting]
        taken = self._running[oldest[steps[oldest] >= self._slice_steps]]
        self._take_out(taken)
        self._requests.missing[taken] = self._requests.to_compute(taken)
        self._waiting.extend(taken.tolist())
        return taken

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

    def _take_out(self, slots: Ids) -> None:
        """Take the places of those of some requests that run."""
        is_out = np.isin(self._running, slots)
        self._free += self._requests.places[self._running[is_out]].tolist()
        self._running = self._running[~is_out]
