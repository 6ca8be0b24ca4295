"""What a running system says of itself: a few figures from its processor's own metrics."""

import asyncio
import math
import urllib.request
from collections import Counter
from dataclasses import dataclass, field

_SECONDS = 2.0
_MOST_BYTES = 4_194_304


@dataclass(frozen=True, slots=True)
class State:
    """How much of what there is."""

    open_requests: int = 0
    finished: int = 0
    failed: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    """By worker, what reached a request from it."""
    gaps: int = 0

    def line(self, seconds: float, before: "State") -> str:
        """Return it as a line; the rate is that of some seconds since another state."""
        rate = (self.all_tokens - before.all_tokens) / seconds
        return (
            f"{self.open_requests} open requests, {self.finished:,} finished, {self.failed:,} failed, "
            f"{self.all_tokens:,} tokens, {rate:,.0f} a second, {self.gaps} gaps"
        )

    @property
    def all_tokens(self) -> int:
        """The tokens of all workers."""
        return sum(self.tokens.values())


async def state_of(metrics: str) -> State | None:
    """Return what the processor that serves its metrics there says, or None if it does not answer."""
    try:
        return _read(await asyncio.to_thread(_got, f"{metrics}/metrics"))
    except (OSError, ValueError):
        return None


def _got(url: str) -> str:
    with urllib.request.urlopen(url, timeout=_SECONDS) as answer:  # noqa: S310 - our own processor's, on this host
        return str(answer.read(_MOST_BYTES).decode())


def _read(page: str) -> State:
    # Imported where it is needed, because only a system that runs asks for it.
    from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415

    totals: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            totals[sample.name] += int(sample.value) if math.isfinite(sample.value) else 0
            if sample.name == "tokenbus_stream_tokens_total":
                tokens[sample.labels["worker"]] += int(sample.value)
    return State(
        open_requests=totals["tokenbus_open_requests"],
        finished=totals["tokenbus_finished_requests_total"],
        failed=totals["tokenbus_failed_requests_total"],
        tokens=dict(tokens),
        gaps=totals["tokenbus_stream_gaps_total"],
    )
