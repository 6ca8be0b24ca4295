"""What FastDeploy's token processor makes of a step, whichever way it came: lists for every request.

Written from that system's interface, not its code; where a choice was open, the one that is faster for the peer was
taken. What the token processor does beyond building the lists (metrics, logging, resources) is left out.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks.codec.peer import Peer
from benchmarks.workload import Share


class LogprobsLists(NamedTuple):
    """A request's tokens with their alternatives: one list a token, the sampled token first."""

    logprob_token_ids: list[list[int]]
    logprobs: list[list[float]]
    sampled_token_ranks: list[int]


@dataclass
class CompletionOutput:
    """A request's share of a step."""

    index: int
    send_idx: int
    token_ids: list[int]
    draft_token_ids: list[int] = field(default_factory=list)
    logprob: float | None = None
    top_logprobs: LogprobsLists | None = None


@dataclass
class RequestOutput:
    """What the engine hands on for a request."""

    request_id: str
    outputs: CompletionOutput
    finished: bool = False


class FastDeploy(Peer):
    """A peer that delivers such outputs."""

    def plain(self, delivered: RequestOutput, top_k: int) -> Share:
        """Read a request's output."""
        outputs = delivered.outputs
        if outputs.top_logprobs is None:
            raise ValueError(f"request {delivered.request_id} got no logprobs")
        ids, logprobs, ranks = outputs.top_logprobs
        return Share(
            outputs.token_ids,
            [values[0] for values in logprobs],
            ranks,
            [values[1 : top_k + 1] for values in ids],
            [values[1 : top_k + 1] for values in logprobs],
        )
