"""What the processor tells of itself at its metrics address: who its workers are, and how they do."""

import asyncio
import http.client
import math
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tokenbus_services.settings import Settings

_FRESH_SECONDS = 0.5
"""For so long an answer is given again: however many look, the processor is asked no more often."""
_MOST_BYTES = 16 * 2**20
_ANY_HOST = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104 - nothing is bound here
_DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Whatever proxy the environment names for others: it could not reach a processor of this host."""
_Samples = dict[str, list[tuple[dict[str, str], float]]]


class UnknownBusError(Exception):
    """The processor's metrics cannot be had, and why."""


class ProcessorMetrics:
    """Asks when somebody wants to know, at most twice a second."""

    def __init__(self, settings: Settings) -> None:
        """Take where the processor serves its metrics, and how long that may take."""
        host, _, port = settings.metrics.address.rpartition(":")
        self._url = f"http://{_ANY_HOST.get(host, host)}:{port}/metrics" if host and int(port) else ""
        self._timeout = settings.gateway.bus_timeout_ms / 1000
        self._lock = asyncio.Lock()
        self._known: dict[str, Any] | UnknownBusError | None = None
        self._known_at = -math.inf

    @property
    def is_asked(self) -> bool:
        """Whether the settings say where to ask."""
        return bool(self._url)

    async def bus(self) -> dict[str, Any]:
        """Return the bus as the page shows it, or raise an UnknownBusError."""
        async with self._lock:
            if time.monotonic() - self._known_at > _FRESH_SECONDS or self._known is None:
                self._known = await self._ask()
                self._known_at = time.monotonic()
        if isinstance(self._known, UnknownBusError):
            raise self._known
        return self._known

    async def _ask(self) -> dict[str, Any] | UnknownBusError:
        if not self._url:
            return UnknownBusError("metrics.address: HOST:PORT of the processor's metrics, got none that can be asked")
        try:
            # In a thread: a page of many workers takes milliseconds to read, in which no token would be sent.
            async with asyncio.timeout(2 * self._timeout):
                return await asyncio.to_thread(self._fetch)
        except (OSError, ValueError, TimeoutError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or str(error) or type(error).__name__
            return UnknownBusError(f"the processor's metrics cannot be had at {self._url}: {reason}")

    def _fetch(self) -> dict[str, Any]:
        with _DIRECTLY.open(self._url, timeout=self._timeout) as answer:
            text = answer.read(_MOST_BYTES).decode()
        samples: _Samples = defaultdict(list)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples[sample.name].append((sample.labels, sample.value))
        return _bus(samples, time.time())


def _bus(samples: _Samples, at: float) -> dict[str, Any]:
    return {
        "workers": [_worker(samples, labels, value) for labels, value in samples["tokenbus_worker_assigned_requests"]],
        "processor": {
            "open_requests": _sum(samples["tokenbus_open_requests"]),
            "steps": _sum(samples["tokenbus_stream_steps_total"]),
            "tokens": _sum(samples["tokenbus_stream_tokens_total"]),
            "refused": _sum(samples["tokenbus_refused_requests_total"]),
            "lost": _sum(samples["tokenbus_stream_lost_items_total"]),
        },
        "clients": _sum(sample for sample in samples["tokenbus_known_clients"] if sample[0]["state"] == "connected"),
        "at": at,
    }


def _worker(samples: _Samples, labels: dict[str, str], requests: float) -> dict[str, Any]:
    name = labels["worker"]
    proposed = _of(samples, "tokenbus_speculative_head_draft_tokens_total", name)
    accepted = _of(samples, "tokenbus_speculative_head_accepted_tokens_total", name)
    heads = {int(each["head"]): value for each, value in accepted}
    return {
        "id": name,
        "role": labels["role"],
        "model": labels["model"],
        "epoch": labels["epoch"],
        "connected": labels["state"] == "connected",
        "open_requests": int(requests),
        "lag": _sum(_of(samples, "tokenbus_stream_lag_items", name)),
        "gaps": _sum(_of(samples, "tokenbus_stream_gaps_total", name)),
        "replays": _sum(_of(samples, "tokenbus_stream_replays_total", name)),
        "retained": _sum(_of(samples, "tokenbus_stream_pending_ack_items", name)),
        "tokens": _sum(_of(samples, "tokenbus_stream_tokens_total", name)),
        "steps": _sum(_of(samples, "tokenbus_stream_steps_total", name)),
        "acceptance_by_head": [
            heads.get(int(each["head"]), 0) / value
            for each, value in sorted(proposed, key=lambda sample: int(sample[0]["head"]))
            if value
        ],
    }


def _of(samples: _Samples, name: str, worker: str) -> list[tuple[dict[str, str], float]]:
    return [sample for sample in samples[name] if sample[0].get("worker") == worker]


def _sum(samples: Iterable[tuple[dict[str, str], float]]) -> int:
    return int(sum(value for _, value in samples))
