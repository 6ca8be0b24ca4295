"""Call: the requests of one call of `LLM.generate`, a bounded number of them in flight."""

import asyncio
import contextlib
import time

from tokenbus_contracts import RowStatus
from tokenbus_contracts.generated.request_pb2 import ErrorCode
from tokenbus_services.client import Client, RequestEnd, RequestFailedError, StepRows, Stream
from tokenbus_services.delivery.errors import request_error
from tokenbus_services.offline.collector import Collector
from tokenbus_services.offline.requests import Requests
from tokenbus_services.terminal import Progress

_FINISHED = frozenset({RowStatus.FINISHED_STOP, RowStatus.FINISHED_LENGTH})


class Call:
    """Sends requests by a client, and collects their rows."""

    def __init__(self, client: Client, requests: Requests, window: int, progress: Progress | None) -> None:
        self._client = client
        self._requests = requests
        self._window = window
        self._progress = progress
        self._begin = time.monotonic()
        self._sent = 0
        self._open: set[int] = set()
        """The ids of the requests in flight."""
        self._collector = Collector(requests.first_id, len(requests))

    async def run(self) -> Collector:
        """Return the rows once all requests have ended; raises RequestFailedError for the first that fails.

        Requests in flight are aborted when it raises, and when it is cancelled; it ends once they have ended.
        """
        async with self._client.steps() as steps:
            try:
                while self._sent < len(self._requests) or self._open:
                    self._send()
                    self._take(await anext(steps))
                    if self._progress is not None:
                        self._progress.show(self._shown)
            finally:
                if self._progress is not None:
                    self._progress.clear()
                await self._abort(steps)
        return self._collector

    def _send(self) -> None:
        """Send as many requests as may be in flight."""
        while self._sent < len(self._requests) and len(self._open) < self._window:
            self._open.add(self._client.submit(self._requests.make(self._sent)))
            self._sent += 1

    def _take(self, item: StepRows | RequestEnd) -> None:
        if isinstance(item, StepRows):
            self._collector.add(item.target)
            return
        self._open.remove(item.request_id)
        if item.error is not None:
            raise self._requests.failure(item.error)
        if item.status not in _FINISHED:
            why = f"its engine ended it: {item.status.name if item.status else 'no status'}"
            error = request_error(item.request_id, ErrorCode.ERROR_CODE_ENGINE, why)
            raise self._requests.failure(RequestFailedError(error))
        self._collector.end(item.request_id, item.status, item.stop)

    async def _abort(self, steps: Stream[StepRows | RequestEnd]) -> None:
        """Abort the requests in flight, and wait for their ends: until then they count as the worker's."""
        for request_id in self._open:
            self._client.abort(request_id)
        # The processor itself ends a request whose worker does not, after the first of the two.
        settings = self._client.settings
        most = (settings.processor.abort_timeout_ms + settings.bus.heartbeat_interval_ms) / 1000
        with contextlib.suppress(TimeoutError, StopAsyncIteration):
            async with asyncio.timeout(most):
                while self._open:
                    item = await anext(steps)
                    if isinstance(item, RequestEnd):
                        self._open.discard(item.request_id)

    def _shown(self) -> str:
        ended, tokens = self._sent - len(self._open), self._collector.tokens
        seconds = max(time.monotonic() - self._begin, 1e-3)
        return f"{ended:,} of {len(self._requests):,} requests, {tokens:,} tokens, {tokens / seconds:,.0f} tokens/s"
