"""From the stamps of turns to figures."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.bus.orders import Received, Sent, Stamps

Figures = dict[str, Any]

QUANTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9, 100)
_WARM = 0.1
"""The share of a turn's steps at a rate that come before all is warm."""
_EDGE = 0.2
"""The share of a turn's time, at both ends, that is no part of its throughput."""


def latency(turns: Sequence[tuple[Sent, Received]]) -> Figures:
    """Return percentiles over all turns' steps, in microseconds."""
    figures = _percentiles([_late(sent.at, received.at) for sent, received in turns])
    taken = [(sent, received.taken_at) for sent, received in turns if received.taken_at is not None]
    if taken:
        figures["taken"] = _percentiles([_late(sent.at, stamps).ravel() for sent, stamps in taken])
        figures["last_taken"] = _percentiles([_late(sent.at, stamps).max(axis=0) for sent, stamps in taken])
    return figures


def throughput(turns: Sequence[tuple[Sent, Received]], tokens: int, message_bytes: int) -> Figures:
    """Return the median turn's steps a second, and what a step costs each process."""
    rates = [rate_of(received.at) for _, received in turns]
    rate = float(np.median(rates))
    return {
        "steps_s": round(rate, 1),
        "steps_s_of_turns": [round(each, 1) for each in rates],
        "tokens_s": round(rate * tokens),
        "message_bytes": message_bytes,
        "mb_s": round(rate * message_bytes / 1e6, 1),
        "sender_cpu_us": cost([(sent.cpu_ns, sent.at.size) for sent, _ in turns]),
        "receiver_cpu_us": cost([(received.cpu_ns, received.at.size) for _, received in turns]),
    }


def rate_of(at: Stamps) -> float:
    """Return the steps a second over the middle of a turn."""
    begin, end = at[0] + (at[-1] - at[0]) * _EDGE, at[-1] - (at[-1] - at[0]) * _EDGE
    middle = at[(at >= begin) & (at <= end)]
    if middle.size < 2:  # noqa: PLR2004 - a rate needs two
        middle = at
    seconds = (middle[-1] - middle[0]) / 1e9
    return float((middle.size - 1) / seconds) if seconds else 0.0


def cost(spent: Sequence[tuple[int, int]]) -> float:
    """Return the median microseconds of processor time a step."""
    return round(float(np.median([cpu_ns / 1e3 / max(1, steps) for cpu_ns, steps in spent])), 1)


def _late(sent: Stamps, came: Stamps) -> Stamps:
    warm = int(sent.size * _WARM)
    late: Stamps = came[..., warm:] - sent[warm:]
    return late


def _percentiles(late: Sequence[Stamps]) -> Figures:
    values = np.percentile(np.concatenate(late) / 1e3, QUANTILES)
    return {str(quantile): round(float(value), 1) for quantile, value in zip(QUANTILES, values, strict=True)}
