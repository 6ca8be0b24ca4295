"""Message: what one save op says and one get op is told, whichever of the ops it is."""

from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenbus_services.worker.fastdeploy.layout import UNRECOVERABLE, MessageFlag

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]
Tensor = Any
"""A tensor of paddle, or an array of numpy."""

NO_IDS = np.zeros(0, np.int64)


@dataclass(slots=True, kw_only=True, eq=False)
class Scores:
    """What is known of a message's tokens beyond their ids, in the order of its tokens."""

    logprobs: Floats
    ranks: Integers
    alternative_ids: Integers
    """One line a token, as wide as there are alternatives."""
    alternative_logprobs: Floats

    def of(self, tokens: Flags) -> "Scores":
        """Return what is known of some of the tokens."""
        return Scores(**{name: getattr(self, name)[tokens] for name in _SCORES})

    @property
    def columns(self) -> int:
        """How many values a token has: its own, and its alternatives'."""
        return int(self.alternative_ids.shape[1]) + 1


_SCORES = [column.name for column in fields(Scores)]


@dataclass(slots=True, kw_only=True, eq=False)
class Message:
    """One step of the engine by slot, its tokens one after the other."""

    flag: MessageFlag
    is_running: bool
    """Whether there is something left to do."""
    counts: Integers
    """Of slots: how many tokens; or a magic count, of a slot that was preempted or cannot be recovered."""
    token_ids: Integers
    scores: Scores | None = None
    proposal_counts: Integers | None = None
    """Of slots: how many draft ids come with its token, to be verified by who goes on with it."""
    proposal_ids: Integers = field(default_factory=lambda: NO_IDS)
    prefilling: Flags | None = None
    """Of slots: whether its prompt is not computed yet; None where the op does not tell."""
    decoder_lengths: Integers | None = None
    """Of slots: how much of its request is computed; None where the op does not tell."""
    prompt_lengths: Integers | None = None

    @property
    def slots(self) -> int:
        """How many slots it is about."""
        return self.counts.size

    @property
    def token_counts(self) -> Integers:
        """Of slots: how many tokens, 0 for a magic count."""
        return np.maximum(self.counts, 0)

    def without(self, slots: Flags) -> "Message":
        """Return the message with some slots told as not to be recovered, and nothing else of them."""
        tokens = np.repeat(~slots, self.token_counts)
        changed = replace(self, counts=np.where(slots, UNRECOVERABLE, self.counts), token_ids=self.token_ids[tokens])
        if self.scores is not None:
            changed.scores = self.scores.of(tokens)
        if self.proposal_counts is not None:
            changed.proposal_ids = self.proposal_ids[np.repeat(~slots, self.proposal_counts)]
            changed.proposal_counts = np.where(slots, 0, self.proposal_counts)
        return changed
