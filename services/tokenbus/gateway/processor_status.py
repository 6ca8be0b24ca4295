"""The processor's status, for the inspector's page and for readiness."""

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Any

from tokenbus.client import Client
from tokenbus.gateway.completion_request import DEFAULT_MODEL
from tokenbus_contracts.generated.client_pb2 import ProcessorStatus, WorkerStatus
from tokenbus_contracts.generated.stream_pb2 import WorkerRole

_FRESH_SECONDS = 0.5
"""Number of seconds for which a status is reused, unless a caller needs a new one."""


class StatusCache:
    """Asks the processor for its status over the bus. Callers share the answer."""

    def __init__(self, client: Client, timeout_ms: int) -> None:
        self._client = client
        self._timeout_ms = timeout_ms
        self._lock = asyncio.Lock()
        self._status: ProcessorStatus | None = None
        self._asked_at = -math.inf

    async def get(self, *, is_new: bool = False) -> ProcessorStatus:
        """Return the status. If `is_new`, an earlier status is not reused. Raises a TimeoutError."""
        since = time.monotonic() - (0 if is_new else _FRESH_SECONDS)
        async with self._lock:
            if self._asked_at < since:
                asked_at = time.monotonic()
                try:
                    self._status = await self._client.status(timeout_seconds=self._timeout_ms / 1000)
                except TimeoutError:
                    self._status = None
                self._asked_at = asked_at
        if self._status is None:
            raise TimeoutError(f"no processor sent its status within {self._timeout_ms} ms")
        return self._status


def takes_requests(workers: Sequence[WorkerStatus], models: Sequence[str]) -> bool:
    """Return whether any model has a connected mixed worker, or a connected prefill worker and decode worker.

    Stalled workers do not count.
    """
    connected = [worker for worker in workers if worker.is_connected and not worker.is_stalled]
    decoding = {worker.model for worker in connected if worker.role == WorkerRole.WORKER_ROLE_DECODE}
    return any(
        worker.role == WorkerRole.WORKER_ROLE_MIXED
        or (worker.role == WorkerRole.WORKER_ROLE_PREFILL and worker.model in decoding)
        for worker in connected
        if DEFAULT_MODEL in models or worker.model in models
    )


def bus_panel(status: ProcessorStatus, at: float) -> dict[str, Any]:
    return {
        "workers": [_worker(worker) for worker in status.workers],
        "processor": {
            "open_requests": status.open_requests,
            "steps": status.steps,
            "tokens": status.tokens,
            "refused": status.refused_requests,
            "lost": status.lost_items,
        },
        "clients": status.connected_clients,
        "at": at,
    }


def _worker(worker: WorkerStatus) -> dict[str, Any]:
    return {
        "id": worker.worker_id,
        "role": WorkerRole.Name(worker.role).removeprefix("WORKER_ROLE_").lower(),
        "model": worker.model,
        "epoch": str(worker.epoch),
        "processor": worker.processor_id,
        "token_scores": list(worker.token_scores),
        "connected": worker.is_connected,
        "stalled": worker.is_stalled,
        "paused_since": worker.paused_since_unix_ms / 1000 or None,
        "paused_by": worker.paused_by or None,
        "open_requests": worker.open_requests,
        "lag": worker.lag_items,
        "gaps": worker.gaps,
        "replays": worker.replays,
        "retained": worker.pending_items,
        "tokens": worker.tokens,
        "steps": worker.steps,
        "acceptance_by_head": [
            accepted / drafted
            for drafted, accepted in zip(worker.draft_tokens, worker.accepted_tokens, strict=True)
            if drafted
        ],
    }
