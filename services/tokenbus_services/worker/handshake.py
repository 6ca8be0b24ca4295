"""The hello of a worker, from its settings."""

from typing import NamedTuple

from tokenbus_contracts.generated.stream_pb2 import Hello, StreamLimits, WorkerRole
from tokenbus_contracts.schema import MAJOR, MINOR
from tokenbus_services.settings import Settings

_ROLES = {
    "mixed": WorkerRole.WORKER_ROLE_MIXED,
    "prefill": WorkerRole.WORKER_ROLE_PREFILL,
    "decode": WorkerRole.WORKER_ROLE_DECODE,
}


class HandoffPoint(NamedTuple):
    """Where a decode worker takes hand-offs, and what a prefill worker needs there; empty: it takes none."""

    address: str = ""
    ticket: bytes = b""
    server_key: bytes = b""


def hello_of(settings: Settings, vocabulary_size: int, handoff: HandoffPoint) -> Hello:
    """Return how a worker introduces itself; what it retains just now is said beside that."""
    worker, limits = settings.worker, settings.limits
    return Hello(
        schema_major=MAJOR,
        schema_minor=MINOR,
        worker_id=worker.id,
        role=_ROLES[worker.role],
        limits=StreamLimits(
            max_message_bytes=limits.max_message_bytes,
            max_rows=limits.max_rows,
            max_tokens_per_row=limits.max_tokens_per_row,
            max_draft_tokens_per_row=limits.max_draft_tokens_per_row,
            max_top_k=limits.max_top_k,
        ),
        model=worker.model,
        vocabulary_size=vocabulary_size,
        tp_rank=worker.tp_rank,
        dp_rank=worker.dp_rank,
        max_requests=worker.max_requests,
        handoff_address=handoff.address,
        handoff_ticket=handoff.ticket,
        handoff_server_key=handoff.server_key,
    )
