"""What the tests of the services' parts share: settings, batches whose every value is true, and frames."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.support.settings import settings_of
from tokenbus.delivery import PendingAck, Step
from tokenbus.engines import synthetic
from tokenbus.settings import Settings
from tokenbus.testing import RowShape, batch, batches
from tokenbus.worker import StepArrays
from tokenbus_contracts import LogprobBatch, Row, Scoring, SpeculativeMethod, encode
from tokenbus_contracts.generated.client_pb2 import ClientHello
from tokenbus_contracts.generated.request_pb2 import ContinuationPolicy, Generate, SamplingParameters, TokenPrompt
from tokenbus_contracts.generated.stream_pb2 import Hello, Item, PayloadKind, StreamLimits, WorkerRole
from tokenbus_contracts.schema import MINOR

WORKER, EPOCH = batches.WORKER, batches.EPOCH
BATCH = PayloadKind.PAYLOAD_KIND_LOGPROB_BATCH
OFF = ContinuationPolicy.CONTINUATION_POLICY_OFF
EVENT = PayloadKind.PAYLOAD_KIND_REQUEST_EVENT


def settings(overrides: dict[str, object] | None = None) -> Settings:
    return settings_of(overrides or {})


def row_values(row: Row) -> tuple[Any, ...]:
    """Return a row as plain values, for comparisons; its place in the batch too."""
    return tuple(value.tolist() if isinstance(value, np.ndarray) else value for value in row)


def values_by_key(found: LogprobBatch) -> dict[int, tuple[Any, ...]]:
    return {row.request_id: row_values(row) for row in found.rows()}


def arrays_of(made: LogprobBatch) -> StepArrays:
    header = made.header
    return StepArrays(
        request_ids=made.request_ids,
        positions=made.positions,
        token_counts=made.token_counts,
        token_ids=made.token_ids,
        statuses=made.statuses,
        logprobs=made.logprobs,
        ranks=made.ranks,
        alternative_token_ids=made.alternative_token_ids,
        alternative_logprobs=made.alternative_logprobs,
        scored=made.scorings != Scoring.NONE,
        top_ks=made.top_ks,
        draft_token_counts=made.draft_token_counts,
        proposal_token_ids=made.proposal_token_ids,
        proposal_counts=made.proposal_counts,
        index_to_batch_id=made.batch_indices,
        kind=header.kind,
        phase=header.phase,
        method=SpeculativeMethod(header.method),
        value_kind=header.value_kind,
        step=header.step,
        draft_follows=header.draft_follows,
    )


def step_of(target: LogprobBatch, draft: LogprobBatch | None = None) -> Step:
    header = target.header
    return Step(header.worker_id, header.epoch, header.step, target, draft, PendingAck())


def ids(key: int, begin: int, end: int) -> list[int]:
    found: list[int] = synthetic.true_tokens(key, begin, end).ids.tolist()
    return found


def item_of(payload: bytes, sequence: int, kind: int = BATCH, *, checksum: int | None = None) -> Item:
    return Item(sequence=sequence, payload_kind=kind, payload_bytes=len(payload), payload_crc32=checksum)  # type: ignore[arg-type]


def encoded(wanted: Sequence[RowShape], sequence: int, **header: Any) -> bytes:  # noqa: ANN401 - as in `batch`
    return encode(batch(wanted, **{"sequence": sequence, "step": sequence} | header))


def hello_of(worker_id: str = WORKER, **fields: Any) -> Hello:  # noqa: ANN401 - as the message has them
    limits = StreamLimits(
        max_message_bytes=1024, max_rows=1, max_tokens_per_row=1, max_draft_tokens_per_row=1, max_top_k=1
    )
    usual: dict[str, Any] = {
        "schema_major": 1, "schema_minor": MINOR, "role": WorkerRole.WORKER_ROLE_MIXED, "limits": limits,
        "first_sequence": 1, "next_sequence": 1, "max_requests": 8, "proof": worker_id.encode(),
    }  # fmt: skip
    return Hello(worker_id=worker_id, **usual | fields)


def client_hello(session: int = 5, **fields: Any) -> ClientHello:  # noqa: ANN401 - as the message has them
    usual: dict[str, Any] = {"schema_major": 1, "name": "client", "window_frames": 64, "window_bytes": 2**24}
    usual["proof"] = b"%d" % session
    return ClientHello(session=session, **usual | fields)


def generate_of(key: int, max_tokens: int = 4, **fields: Any) -> Generate:  # noqa: ANN401 - as the message has them
    """Return a request that ends with its first error, unless it says otherwise."""
    usual: dict[str, Any] = {"sampling": SamplingParameters(max_tokens=max_tokens), "continuation_policy": OFF}
    if "text" not in fields:
        usual["tokens"] = TokenPrompt(token_ids=[0, 1, 2])
    return Generate(request_id=key, **usual | fields)
