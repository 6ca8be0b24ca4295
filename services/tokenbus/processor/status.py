"""StatusReport: the status of a processor for its clients, with the processor's requests and workers."""

import math

from tokenbus.processor.dispatch import Dispatch
from tokenbus.processor.requests import RequestTable
from tokenbus.processor.workers import Worker
from tokenbus_contracts.frames import write_frame
from tokenbus_contracts.generated.client_pb2 import ProcessorStatus, ServerFrame, WorkerStatus
from tokenbus_contracts.schema import bounds_in

STATUS_INTERVAL = 0.1
"""Minimum time between two reports, and between two answers to one client, in seconds."""
STATUS_BURST_SECONDS = 2.0
"""Period without requests after which a client may send several requests at once, in seconds."""
_MOST_WORKERS = bounds_in(ProcessorStatus.DESCRIPTOR.fields_by_name["workers"].GetOptions()).max_items
_MOST_ADAPTER_BYTES = 128 * 1024
"""Maximum total bytes of adapter names, so that the status frame stays within its size limit."""
_ENCODED_BYTES = 4
"""Maximum number of bytes that the encoding adds to an adapter's name."""


class StatusReport:
    """The status frame, which is cached for an interval or until a worker's adapters change."""

    def __init__(self, processor_id: str, dispatch: Dispatch) -> None:
        self._processor_id = processor_id
        self._dispatch = dispatch
        self._message: list[bytes] = []
        self._made_at = -math.inf

    def message(self, now: float, connected_clients: int) -> list[bytes]:
        if now - self._made_at >= STATUS_INTERVAL:
            self._made_at = now
            self._message = [write_frame(ServerFrame(status=self._status(connected_clients)))]
        return self._message

    def expire(self) -> None:
        self._made_at = -math.inf

    def _status(self, connected_clients: int) -> ProcessorStatus:
        dispatch, registry = self._dispatch, self._dispatch.registry
        workers = sorted(dispatch.workers.by_id.values(), key=lambda worker: worker.peer is None)
        room = _MOST_ADAPTER_BYTES
        described = [_worker_status(worker, registry.table, self._processor_id) for worker in workers[:_MOST_WORKERS]]
        probed: set[int] = set()
        for worker, status in zip(workers, described, strict=False):
            if status.tokenizer_digest not in probed:
                probed.add(status.tokenizer_digest)
                status.tokenizer_probes.extend(worker.stream.hello.tokenizer_probes)
            for name in worker.stream.hello.lora_adapters:
                room -= len(name.encode()) + _ENCODED_BYTES
                if room >= 0:
                    status.lora_adapters.append(name)
        counts = [*dispatch.workers.departed.values(), *(worker.stream.counts for worker in workers)]
        return ProcessorStatus(
            open_requests=len(registry.table),
            finished_requests=registry.counts.finished,
            failed_requests=sum(registry.counts.failed.values()),
            refused_requests=sum(dispatch.refused.values()),
            connected_clients=connected_clients,
            steps=sum(each.steps for each in counts),
            tokens=sum(each.tokens for each in counts),
            lost_items=sum(each.lost for each in counts),
            gaps=sum(each.gaps for each in counts),
            workers=described,
        )


def _worker_status(worker: Worker, table: RequestTable, processor_id: str) -> WorkerStatus:
    stream, counts = worker.stream, worker.stream.counts
    heads = counts.speculation.heads()
    return WorkerStatus(
        worker_id=stream.worker_id,
        epoch=stream.epoch,
        token_scores=stream.hello.token_scores,
        role=stream.hello.role,
        model=stream.hello.model,
        is_connected=worker.peer is not None,
        is_stalled=worker.is_stalled,
        paused_since_unix_ms=stream.hello.paused_since_unix_ms,
        paused_by=stream.hello.paused_by,
        open_requests=table.load_of(worker.source.stream),
        lag_items=stream.lag,
        pending_items=len(stream.acks),
        steps=counts.steps,
        tokens=counts.tokens,
        gaps=counts.gaps,
        replays=counts.replays,
        draft_tokens=[drafted for _, drafted, _ in heads],
        accepted_tokens=[accepted for _, _, accepted in heads],
        max_model_tokens=stream.hello.max_model_tokens,
        tokenizer_digest=stream.hello.tokenizer_digest,
        processor_id=processor_id,
        kv_cache_permille=worker.kv_cache_permille,
    )
