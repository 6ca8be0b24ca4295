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
FLAG_BITS = 8
"""In the field of the message flag, columns are counted above these."""


class MessageFlag(IntEnum):
    """What a message is about."""

    TARGET = 3
    DRAFT = 4
