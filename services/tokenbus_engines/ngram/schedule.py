"""Schedule: which requests run in a step, and which wait, are preempted and go on."""

from bisect import insort
from collections import deque
from typing import NamedTuple

import numpy as np

from tokenbus_engines.ngram.counting import Ids
from tokenbus_engines.ngram.options import NgramOptions
from tokenbus_engines.ngram.rows import Rows

_NONE = np.zeros(0, np.int64)


class Plan(NamedTuple):
    """The slots of a step, by what becomes of them; each in the order of admission."""

    decode: Ids
    """They go on after tokens that they have."""
    first: Ids
    """Their prompt is done in this step, and they get the first token."""
    prefilling: Ids
    """A chunk is computed, and more is to come."""
    preempted: Ids
    aborted: Ids


class Schedule:
    """Runs requests in the order of admission, as many as there is room for. It owns who runs."""

    def __init__(self, rows: Rows, options: NgramOptions) -> None:
        """Read the requests' lengths from the rows, and note there what is missing."""
        self._rows = rows
        self._options = options
        self._running = _NONE
        self._waiting: deque[int] = deque()
        self._preempted: list[int] = []
        self._aborted: set[int] = set()
        self._steps = 0

    def add(self, slot: int) -> None:
        """Let a request wait until there is room."""
        self._waiting.append(slot)

    def abort(self, slot: int) -> None:
        """End a request in the next step."""
        self._aborted.add(slot)

    def remove(self, slots: Ids) -> None:
        """Forget running requests that ended."""
        self._running = self._running[~np.isin(self._running, slots)]

    def plan(self) -> Plan:
        """Say what is computed in the next step."""
        self._steps += 1
        aborted = self._end_aborted() if self._aborted else _NONE
        preempted = self._preempt()
        if not preempted.size:  # else they would go on at once
            self._start()
        running = self._running
        missing = self._rows.missing[running]
        if not missing.any():
            return Plan(running, _NONE, _NONE, preempted, aborted)
        left = np.maximum(missing - self._options.prefill_chunk, 0)
        self._rows.missing[running] = left
        is_first = (missing > 0) & (left == 0) & (self._rows.positions[running] == 0)
        return Plan(running[(left == 0) & ~is_first], running[is_first], running[left > 0], preempted, aborted)

    def _end_aborted(self) -> Ids:
        slots = self._aborted
        self._aborted = set()
        self._waiting = deque(slot for slot in self._waiting if slot not in slots)
        self._preempted = [slot for slot in self._preempted if slot not in slots]
        ended = np.array(sorted(slots), np.int64)
        self.remove(ended)
        return ended[np.argsort(self._rows.serials[ended])]

    def _preempt(self) -> Ids:
        """Take the newest out while all together have too many tokens, or because the options say so."""
        options, taken = self._options, _NONE
        if options.kv_tokens is not None:
            taken = self._running[np.cumsum(self._needed(self._running)) > options.kv_tokens]
        if not taken.size and options.preempt_every and not self._steps % options.preempt_every:
            # One that has not got on since it was last taken out would never get on.
            taken = self._running[self._rows.missing[self._running] == 0][-1:]
        if not taken.size:
            return taken
        self.remove(taken)
        # What they had computed is given up; it is computed again before they go on.
        self._rows.missing[taken] = self._rows.prompts[taken] + self._rows.positions[taken]
        for slot in taken.tolist():
            insort(self._preempted, slot, key=self._rows.serials.__getitem__)
        return taken

    def _start(self) -> None:
        """Let those that wait run while there is room, the preempted first."""
        room = self._options.max_running - self._running.size
        if room <= 0 or not (self._preempted or self._waiting):
            return
        kv_tokens = self._options.kv_tokens
        used = 0 if kv_tokens is None else int(self._needed(self._running).sum())
        started: list[int] = []
        while len(started) < room and (self._preempted or self._waiting):
            slot = self._preempted[0] if self._preempted else self._waiting[0]
            if kv_tokens is not None:
                used += int(self._needed(np.array([slot]))[0])
                if used > kv_tokens:
                    break
            started.append(self._preempted.pop(0) if self._preempted else self._waiting.popleft())
        running = np.concatenate([self._running, np.array(started, np.int64)])
        self._running = running[np.argsort(self._rows.serials[running])]

    def _needed(self, slots: Ids) -> Ids:
        """Return how many tokens requests have after one more step, at most."""
        return np.asarray(self._rows.prompts[slots] + self._rows.positions[slots] + self._options.speculate + 1)
