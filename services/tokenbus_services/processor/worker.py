"""A worker as the processor knows it, and the checks of what it says of itself."""

from dataclasses import dataclass

from tokenbus_contracts import ContractError, Limits, Rule
from tokenbus_contracts.generated.stream_pb2 import Hello, RefusalReason, WorkerRole
from tokenbus_services.bus import Identity, Role
from tokenbus_services.delivery import PendingAck, Step
from tokenbus_services.processor.assembly import Assembler
from tokenbus_services.processor.requests import Source
from tokenbus_services.processor.stream import Stream


@dataclass(slots=True, eq=False)
class Worker:
    """One life of a worker: its stream, and the connection that it has just now, if any."""

    stream: Stream
    assembler: Assembler
    source: Source
    peer: bytes | None
    last_heard: float
    identity: Identity
    proof: bytes
    met_at: float
    """When this processor first heard of it."""
    next_heartbeat: float = 0.0
    echo_ns: int = 0
    acknowledged: int = 0
    last_turn: int = 0
    """Which of all new requests was the last that it was given, or was to go on with."""
    takes_no_more: bool = False
    """Whether it gets no new requests, because it leaves when those it has are done."""
    held_back: tuple[PendingAck, float] | None = None
    """What has held its stream back for the longest, and since when, while too much waits for more to be sent."""
    reconcile: tuple[int, frozenset[int]] | None = None
    """When the stream has come to that sequence, the worker has no other requests than these."""

    def count(self, step: Step) -> None:
        """Count a step that was handed out, with the rows of it that were."""
        counts, rows = self.stream.counts, step.rows
        counts.steps += 1
        counts.rows += rows.row_count
        counts.tokens += rows.token_ids.size
        counts.incomplete_steps += not step.is_whole
        if rows.draft_token_counts.any():
            counts.speculation.add(rows)
        self.stream.produced_at_ns = rows.header.produced_at_ns


class RefusedError(Exception):
    """A peer is not taken: the reason for machines, and one line for people."""

    def __init__(self, reason: RefusalReason, message: str) -> None:
        """Keep both."""
        super().__init__(message)
        self.reason = reason

    @property
    def name(self) -> str:
        """The reason's name in metrics."""
        return RefusalReason.Name(self.reason).removeprefix("REFUSAL_REASON_").lower()


MOST_SEQUENCE = 2**61
"""Beyond that a worker is not followed: half of the schema's bound, so that a grant beyond it can still be said."""


def check_hello(hello: Hello, limits: Limits, identity: Identity) -> None:
    """Refuse a worker that may not be here, or whose batches would be wider than what is taken."""
    if not identity.may(Role.WORKER, hello.worker_id):
        message = f"key {identity.name} may not be worker {hello.worker_id}"
        raise RefusedError(RefusalReason.REFUSAL_REASON_NOT_AUTHORIZED, message)
    for name in ("max_message_bytes", "max_rows", "max_tokens_per_row", "max_draft_tokens_per_row", "max_top_k"):
        most, found = getattr(limits, name), getattr(hello.limits, name)
        if found > most:
            error = ContractError(f"hello.limits.{name}", most, found, rule=Rule.MAX)
            raise RefusedError(RefusalReason.REFUSAL_REASON_LIMITS, str(error))
    if hello.next_sequence < hello.first_sequence:
        error = ContractError("hello.next_sequence", hello.first_sequence, hello.next_sequence, rule=Rule.MIN)
        raise RefusedError(RefusalReason.REFUSAL_REASON_PROTOCOL, str(error))
    if hello.next_sequence > MOST_SEQUENCE:
        error = ContractError("hello.next_sequence", MOST_SEQUENCE, hello.next_sequence, rule=Rule.MAX)
        raise RefusedError(RefusalReason.REFUSAL_REASON_PROTOCOL, str(error))
    if hello.request_owners and len(hello.request_owners) != len(hello.request_keys):
        limit = f"{len(hello.request_keys)}, one for each of request_keys"
        error = ContractError("hello.request_owners", limit, len(hello.request_owners), rule=Rule.LENGTH)
        raise RefusedError(RefusalReason.REFUSAL_REASON_PROTOCOL, str(error))


def protocol_error(error: ContractError) -> RefusedError:
    """Return the refusal of a peer whose frame breaks its bounds."""
    version = error.rule is Rule.VERSION
    reason = RefusalReason.REFUSAL_REASON_SCHEMA_VERSION if version else RefusalReason.REFUSAL_REASON_PROTOCOL
    return RefusedError(reason, str(error))


def takes_over(hello: Hello) -> bool:
    """Tell whether a worker goes on with requests that others began."""
    return bool(hello.role == WorkerRole.WORKER_ROLE_DECODE)
