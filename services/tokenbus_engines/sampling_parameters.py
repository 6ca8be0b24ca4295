"""What a request asks of any engine: its sampling parameters with their defaults, or a ValueError that says why not."""

import math
import secrets

from tokenbus_contracts.generated.request_pb2 import SamplingParameters


def temperature_of(sampling: SamplingParameters) -> float:
    """Return what logits are divided by; 0: the most probable token is taken."""
    temperature: float = sampling.temperature if sampling.HasField("temperature") else 1.0
    if not 0 <= temperature < math.inf:
        raise ValueError(f"sampling.temperature: a finite number of at least 0, got {temperature}")
    return temperature


def top_p_of(sampling: SamplingParameters) -> float:
    """Return which share of the probability is sampled from."""
    top_p: float = sampling.top_p if sampling.HasField("top_p") else 1.0
    if not 0 < top_p <= 1:
        raise ValueError(f"sampling.top_p: above 0 and at most 1, got {top_p}")
    return top_p


def max_tokens_of(sampling: SamplingParameters) -> int | None:
    """Return how many tokens the output has at most, or None: as many as fit."""
    if not sampling.HasField("max_tokens"):
        return None
    if not sampling.max_tokens:
        raise ValueError("sampling.max_tokens: at least 1, got 0")
    return int(sampling.max_tokens)


def seed_of(sampling: SamplingParameters) -> int:
    """Return the seed: the request's own, or one drawn for it."""
    return int(sampling.seed) if sampling.HasField("seed") else secrets.randbits(64)
