"""Schedule: which requests run in a step, and which wait or are preempted."""

from bisect import insort
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tokenbus_engines.admission import EngineOptions, check_range
from tokenbus_engines.ngram.model import WIDTH, Ids
from tokenbus_engines.ngram.requests import Requests

_NONE = np.zeros(0, np.int64)
_MOST_DRAFTS = 15
"""With the token after them, as many as the contract lets a row have."""
_LONGEST_CONTEXT = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramOptions(EngineOptions):
    """How the engine runs. What is out of range is a ValueError with the option, the limit and the value."""

    kv_tokens: int | None = None
    """The most tokens that all running requests have together; when it is not enough, the newest of them waits.

    None: as many as `max_running` requests can have.
    """
    preempt_every: int = 0
    """After how many steps the newest running request is preempted for no other reason; 0: never. For tests."""

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        self.check(speculate=_MOST_DRAFTS, context=_LONGEST_CONTEXT, top_logprobs=WIDTH)
        if self.preempt_every == 1:  # the newest would never run
            raise ValueError(f"preempt_every: 0 or 2 to {1 << 31}, got 1")
        check_range("preempt_every", self.preempt_every, 0, 1 << 31)
        if self.kv_tokens is not None:
            # One request must always fit, or nothing would ever run.
            check_range("kv_tokens", self.kv_tokens, self.context + self.speculate, 1 << 40)


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


class Snapshot(NamedTuple):
    """What a plan may change."""

    running: Ids
    waiting: deque[int]
    preempted: list[int]
    aborted: set[int]
    steps: int
    missing: Ids


class Schedule:
    """Runs requests in the order of admission, as many as there is room for. It owns the set of running requests."""

    def __init__(self, requests: Requests, options: NgramOptions) -> None:
        """Run requests as the options say. It reads their lengths, and owns what is missing of each."""
        self._requests = requests
        self._options = options
        self._running = _NONE
        self._waiting: deque[int] = deque()
        self._preempted: list[int] = []
        self._aborted: set[int] = set()
        self._steps = 0

    def snapshot(self) -> "Snapshot":
        """Return what `plan` may change."""
        missing = self._requests.missing.copy()
        return Snapshot(
            self._running, self._waiting.copy(), self._preempted.copy(), self._aborted, self._steps, missing
        )

    def restore(self, before: "Snapshot") -> None:
        """Bring back what was before a plan whose step failed."""
        self._running, self._waiting, self._preempted, self._aborted, self._steps, self._requests.missing = before

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
        missing = self._requests.missing[running]
        if not missing.any():
            return Plan(running, _NONE, _NONE, preempted, aborted)
        left = np.maximum(missing - self._options.prefill_chunk, 0)
        self._requests.missing[running] = left
        is_first = (missing > 0) & (left == 0) & (self._requests.positions[running] == 0)
        return Plan(running[(left == 0) & ~is_first], running[is_first], running[left > 0], preempted, aborted)

    def _end_aborted(self) -> Ids:
        slots = self._aborted
        self._aborted = set()
        self._waiting = deque(slot for slot in self._waiting if slot not in slots)
        self._preempted = [slot for slot in self._preempted if slot not in slots]
        ended = np.array(sorted(slots), np.int64)
        self.remove(ended)
        return ended[np.argsort(self._requests.serials[ended])]

    def _preempt(self) -> Ids:
        """Take the newest out while all together have too many tokens, or because an option says so."""
        taken = _NONE
        if self._options.kv_tokens is not None:
            taken = self._running[np.cumsum(self._needed(self._running)) > self._options.kv_tokens]
        if not taken.size and self._options.preempt_every and not self._steps % self._options.preempt_every:
            # One that has not got on since it was last taken out would never get on.
            taken = self._running[self._requests.missing[self._running] == 0][-1:]
        if not taken.size:
            return taken
        self.remove(taken)
        # What they had computed is given up; it is computed again before they go on.
        self._requests.missing[taken] = self._requests.prompts[taken] + self._requests.positions[taken]
        for slot in taken.tolist():
            insort(self._preempted, slot, key=self._requests.serials.__getitem__)
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
        self._running = running[np.argsort(self._requests.serials[running])]

    def _needed(self, slots: Ids) -> Ids:
        """Return how many tokens requests have after one more step, at most."""
        return np.asarray(self._requests.prompts[slots] + self._requests.positions[slots] + self._options.speculate + 1)
