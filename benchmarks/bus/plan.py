"""How much is measured."""

from dataclasses import dataclass

from benchmarks.bus.lanes import OURS, TRANSPORTS
from benchmarks.workload import HEADLINE_ROWS, HEADLINE_TOKENS, Case

RATE = 200.0
TOP_KS = (0, 5, 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Sizes and times of a run."""

    rounds: int = 3
    """How often each peer has its turn; the order is drawn anew for every round."""
    seconds: float = 2.0
    """Of a turn flat out."""
    latency_steps: int = 1000
    """Of a turn at a rate."""
    rate: float = RATE
    top_ks: tuple[int, ...] = TOP_KS
    transports: tuple[str, ...] = TRANSPORTS
    lanes: tuple[str, ...] = ()
    """Which lines of the tables; none: all."""
    scaling_steps: int = 3000
    rows: tuple[int, ...] = (1, 4, 16, 64, 128, 256, 512)
    tokens: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    widths: tuple[int, ...] = (0, 1, 5, 10, 20)
    open_requests: tuple[int, ...] = (256, 4096, 65_536)
    memory_steps: int = 20_000
    seed: int = 1

    @property
    def cases(self) -> list[Case]:
        """The sizes that the goals are written for."""
        return [Case(HEADLINE_ROWS, HEADLINE_TOKENS, top_k) for top_k in self.top_ks]


def beside(lane: str) -> Plan:
    """Return a plan of what keys cost, or NATS: the first line and that one, over tcp."""
    return Plan(
        top_ks=(0, 20),
        transports=TRANSPORTS[1:],
        lanes=(OURS, lane),
        scaling_steps=200,
        rows=(256,),
        tokens=(3,),
        widths=(0,),
        open_requests=(256, 1024),
        memory_steps=1000,
    )


def quick() -> Plan:
    """Return a plan of seconds: one transport, one k, and the ends of each scale."""
    return Plan(
        rounds=1,
        seconds=0.3,
        latency_steps=60,
        top_ks=(0,),
        transports=TRANSPORTS[:1],
        scaling_steps=200,
        rows=(1, 256),
        tokens=(1, 3),
        widths=(0, 5),
        open_requests=(256, 1024),
        memory_steps=1000,
    )
