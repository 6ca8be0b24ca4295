"""What the two processes of a turn are told to do, and what they answer."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from benchmarks.workload import Case, Share, Step, make_steps

Stamps = npt.NDArray[np.int64]
"""Nanoseconds of the monotonic clock, which all processes of a machine share, one a step."""

STEPS = 8
"""How many different steps take turns, so that nothing that was computed for one serves the next."""
BUFFERS, ROWS, BY_STEP = "buffers", "rows", "steps"
"""How rows are taken: from the buffers all at once, by one task a request, or step by step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One turn: what is sent, how fast, for how long, and how it is taken."""

    case: Case
    address: str
    clients_address: str
    seed: int = 1
    taking: str = BUFFERS
    steps: int = 0
    """How many steps to send; 0: as many as there is time for."""
    seconds: float = 0.0
    rate: float = 0.0
    """How many steps a second; 0: as many as the peer takes."""
    open_requests: int = 0
    """How many requests are open in all, where that is more than there are rows."""
    queue: int = 0
    """Of the peer that goes through a System V queue."""
    is_profiled: bool = False
    keys: str = ""
    """The folder of the key that both processes prove themselves by; empty: they use none."""


@dataclass(slots=True)
class Sent:
    """What the sender knows: when each step began on its way, and what that cost its process."""

    at: Stamps
    cpu_ns: int


@dataclass(slots=True)
class Received:
    """What the receiver knows: when each step was with its requests, and what that cost its process."""

    at: Stamps
    cpu_ns: int
    first: list[Share]
    """What the first step delivered, in row order; nothing of a peer that does not deliver."""
    taken_at: Stamps | None = None
    """When each request's own task had each of its rows, one line a request."""
    sections: dict[str, float] = field(default_factory=dict)
    """Microseconds a step by section, where the turn was profiled."""


def steps_of(order: Order) -> list[Step]:
    """Return the steps that take turns: the same requests in each, as an engine has."""
    steps = make_steps(order.case, STEPS, order.seed)
    keys, ids = steps[0].keys, steps[0].request_ids
    places = np.random.default_rng(order.seed).permutation(order.case.rows).astype("u4")
    shared = {"request_keys": steps[0].columns["request_keys"], "batch_indices": places}
    return [
        Step(
            step.case,
            step.number,
            keys,
            ids,
            step.top_ks,
            step.columns | shared,
            step.rectangle_ids,
            step.rectangle_logprobs,
            step.ranks,
        )
        for step in steps
    ]


def keys_of(order: Order) -> list[int]:
    """Return the requests of every step."""
    return steps_of(order)[0].keys


def step_at(steps: list[Step], number: int) -> Step:
    """Return what stands in for a step; they are numbered from 1."""
    return steps[(number - 1) % len(steps)]
