"""Targets: which step a draft belongs to. The engine does not say, so it follows from what came before."""

from collections import deque
from dataclasses import dataclass

import numpy as np

from tokenbus_contracts import ContractError, Rule
from tokenbus_services.worker.fastdeploy.message import Message
from tokenbus_services.worker.fastdeploy.slots import Rows

_MOST = 2
"""How many steps ago a draft's target may have been."""
_MISSED = 2
"""After so many targets without a draft none is waited for any more."""


@dataclass(slots=True, eq=False)
class Target:
    """A target that was published, and whose draft may come."""

    step: int
    message: Message
    rows: Rows
    is_announced: bool
    """Whether its draft is waited for."""


class Targets:
    """The last targets without a draft."""

    def __init__(self) -> None:
        """Begin without any; nothing is waited for until a draft has come once."""
        self._waiting: deque[Target] = deque(maxlen=_MOST)
        self._missed = _MISSED

    def expects_draft(self, message: Message) -> bool:
        """Tell whether the draft of a target is to be waited for: a step whose requests all finished has none."""
        return self._missed < _MISSED and message.is_running and message.slots > 0

    def add(self, target: Target) -> None:
        """Learn of a target."""
        if any(waiting.is_announced for waiting in self._waiting):
            self._missed += 1
        self._waiting.append(target)

    def find(self, draft: Message) -> Target:
        """Return the target that a draft is about."""
        fitting = [target for target in self._waiting if draft.slots <= target.message.slots]
        if not fitting:
            if self._waiting:
                most = max(target.message.slots for target in self._waiting)
                raise ContractError("token_num_per_batch", most, draft.slots, rule=Rule.ITEMS)
            raise ContractError("message_flag", "a target (3) before its draft", int(draft.flag), rule=Rule.KIND)
        for alike in (_has_same_lengths, _has_same_counts):
            for target in fitting:
                if alike(target.message, draft):
                    return target
        return fitting[-1]

    def take(self, target: Target) -> None:
        """Learn that a target's draft was published."""
        self._missed = 0
        self._waiting.remove(target)


def _has_same_counts(target: Message, draft: Message) -> bool:
    return np.array_equal(target.counts[: draft.slots], draft.counts)


def _has_same_lengths(target: Message, draft: Message) -> bool:
    return (
        target.decoder_lengths is not None
        and draft.decoder_lengths is not None
        and np.array_equal(target.decoder_lengths[: draft.slots], draft.decoder_lengths)
        and _has_same_counts(target, draft)
    )
