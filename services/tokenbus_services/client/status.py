"""The statuses of several processors as one."""

from collections.abc import Sequence

from tokenbus_contracts.generated.client_pb2 import ProcessorStatus, WorkerStatus

_SUMS = (
    "open_requests",
    "finished_requests",
    "failed_requests",
    "refused_requests",
    "steps",
    "tokens",
    "lost_items",
    "gaps",
)


def merged(statuses: Sequence[ProcessorStatus]) -> ProcessorStatus:
    """Return the sums of processors' statuses, and all workers; one that moved is where it is connected."""
    if len(statuses) == 1:
        return statuses[0]
    told: list[WorkerStatus] = sorted(
        (worker for status in statuses for worker in status.workers), key=lambda worker: not worker.is_connected
    )
    workers: dict[str, WorkerStatus] = {}
    for worker in told:
        workers.setdefault(worker.worker_id, worker)
    return ProcessorStatus(
        **{name: sum(getattr(status, name) for status in statuses) for name in _SUMS},
        connected_clients=max(status.connected_clients for status in statuses),
        workers=workers.values(),
    )
