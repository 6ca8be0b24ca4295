"""What that engine's ops agree on: how large their messages are, and which numbers mean something else."""

from enum import IntEnum

SLOTS = 512
"""The most slots of a message; of one without logprobs under speculation, SPECULATIVE_SLOTS."""
SPECULATIVE_SLOTS = 256
TOKENS = 6
"""The most tokens of a slot, the proposals of a first token among them."""
ALTERNATIVES = 20
COLUMNS = ALTERNATIVES + 1
"""The sampled token, and its alternatives."""

PREEMPTED = -9
UNRECOVERABLE = -3
NOTHING = -1
"""In the place of a token: there is none."""
NOTHING_READ = -2
"""In the place of the stop flag: no message was there."""
TARGET, DRAFT = 3, 4
"""The message flags that are known. Others are carried, too."""
FLAG_BITS = 8
"""In the field of the message flag, columns are counted above these."""


class Kind(IntEnum):
    """Which struct a message would be in: a get op reads one of them."""

    SPECULATED_SCORED = 1
    SINGLE_SCORED = 2
    SPECULATED = 3
    SINGLE = 4

    @property
    def is_scored(self) -> bool:
        """Whether tokens have columns, scores and ranks."""
        return self in {Kind.SPECULATED_SCORED, Kind.SINGLE_SCORED}

    @property
    def is_single(self) -> bool:
        """Whether each slot has one token, which may be a magic number instead."""
        return self in {Kind.SINGLE, Kind.SINGLE_SCORED}

    @property
    def slots(self) -> int:
        """The most slots of the struct."""
        return SPECULATIVE_SLOTS if self is Kind.SPECULATED else SLOTS
