"""ModelCounts: what the requests of one model came to, as vLLM's server counts it."""

from collections import Counter

from tokenbus_services.metrics.families import Histogram

_FIRST = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_WHOLE = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
"""vLLM's own bounds."""


class ModelCounts:
    """Counts requests when they end; each choice of an answer is one."""

    def __init__(self) -> None:
        self.finished: Counter[str] = Counter()
        """By why they ended: `stop`, `length`, `abort` or `error`."""
        self.prompt_tokens = Histogram(_TOKENS)
        self.generation_tokens = Histogram(_TOKENS)
        self.first_token = Histogram(_FIRST)
        """In seconds, as is the latency."""
        self.latency = Histogram(_WHOLE)

    def count(self, reason: str, prompt_tokens: int, tokens: int, seconds: float) -> None:
        """Count a request that ended."""
        self.finished[reason] += 1
        self.prompt_tokens.observe(prompt_tokens)
        self.generation_tokens.observe(tokens)
        self.latency.observe(seconds)
