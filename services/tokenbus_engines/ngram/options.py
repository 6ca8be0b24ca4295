"""Options: how the engine is run, checked when they are given."""

from dataclasses import dataclass
from typing import Literal, get_args

from tokenbus_engines.ngram.model import WIDTH

Role = Literal["mixed", "prefill", "decode"]
_MOST_DRAFTS = 15
"""With the token after them, as many as the contract lets a row have."""
_LONGEST_CONTEXT = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramOptions:
    """How the engine is run. What is out of range is a ValueError with the option, the limit and the value."""

    role: Role = "mixed"
    """What it does: all of a request, its prompt and first token, or what follows them."""
    speculate: int = 3
    """How many tokens the draft proposes in a step; 0: none, and each request gets one token a step."""
    context: int = 2048
    """The most tokens that a request's prompt and output have together."""
    max_running: int = 256
    """The most requests in a step; others wait."""
    prefill_chunk: int = 512
    """The most tokens of a prompt that a step takes."""
    kv_tokens: int | None = None
    """The most tokens that all running requests have together; when it is not enough, the newest of them waits.

    None: as many as `max_running` requests can have.
    """
    preempt_every: int = 0
    """After how many steps the newest running request is preempted for no other reason; 0: never. For tests."""
    max_top_logprobs: int = 20
    """The most alternatives that a request may ask for."""

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        if self.role not in get_args(Role):
            raise ValueError(f"role: one of {', '.join(get_args(Role))}, got {self.role!r}")
        _hold("speculate", self.speculate, 0, _MOST_DRAFTS)
        _hold("context", self.context, 2, _LONGEST_CONTEXT)
        _hold("max_running", self.max_running, 1, 1024)
        _hold("prefill_chunk", self.prefill_chunk, 1, _LONGEST_CONTEXT)
        if self.preempt_every == 1:  # the newest would never run
            raise ValueError(f"preempt_every: 0 or 2 to {1 << 31}, got 1")
        _hold("preempt_every", self.preempt_every, 0, 1 << 31)
        _hold("max_top_logprobs", self.max_top_logprobs, 0, WIDTH)
        if self.kv_tokens is not None:
            # One request must always fit, or nothing would ever run.
            _hold("kv_tokens", self.kv_tokens, self.context + self.speculate, 1 << 40)


def _hold(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ValueError(f"{name}: {least} to {most}, got {value}")
