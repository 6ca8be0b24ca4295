"""What the tests of the services' parts share: settings, batches whose every value is true, and frames."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tests.support.settings import settings_of
from tokenbus_contracts import (
    BatchHeader,
    BatchKind,
    LogprobBatch,
    Row,
    RowStatus,
    Scoring,
    SpeculativeMethod,
    ValueKind,
    encode,
)
from tokenbus_contracts.generated.client_pb2 import ClientHello
from tokenbus_contracts.generated.request_pb2 import Generate, SamplingParameters, TokenPrompt
from tokenbus_contracts.generated.stream_pb2 import Hello, Item, PayloadKind, StreamLimits, WorkerRole
from tokenbus_contracts.schema import MINOR
from tokenbus_engines import synthetic
from tokenbus_engines.sampling import Words
from tokenbus_services.delivery import PendingAck, Step
from tokenbus_services.settings import Settings
from tokenbus_services.worker import StepArrays

WORKER = "worker-0"
EPOCH = 7
BATCH = PayloadKind.PAYLOAD_KIND_LOGPROB_BATCH
EVENT = PayloadKind.PAYLOAD_KIND_REQUEST_EVENT
MAY_PROPOSE = (RowStatus.ACTIVE, RowStatus.HANDED_OFF)


def settings(overrides: dict[str, object] | None = None) -> Settings:
    """Return settings from defaults and overrides alone; refused messages are counted and not written."""
    return settings_of({"dead_letters.max_bytes": 1} | (overrides or {}))


class Wanted(NamedTuple):
    """A row as a test wants it; what it holds follows from its key and position."""

    key: int
    position: int = 0
    tokens: int = 1
    status: RowStatus = RowStatus.ACTIVE
    scoring: Scoring = Scoring.FULL
    top_k: int = 0
    stop: int = 0
    """Of one that is FINISHED_STOP."""


def rows(keys: Iterable[int], position: int = 0, tokens: int = 1, status: RowStatus = RowStatus.ACTIVE) -> list[Wanted]:
    """Return one row for each key, all alike; their top-k differ, as those of neighbours do."""
    return [Wanted(key, position, tokens, status, top_k=key % 3) for key in keys]


def batch(  # noqa: PLR0913 - each has a name and a default
    wanted: Sequence[Wanted],
    *,
    step: int = 1,
    sequence: int = 1,
    worker_id: str = WORKER,
    epoch: int = EPOCH,
    indices: Sequence[int] | None = None,
    kind: BatchKind = BatchKind.TARGET,
    method: SpeculativeMethod | int = SpeculativeMethod.NONE,
    step_rows: int | None = None,
    part: tuple[int, int] = (0, 1),
    draft_follows: bool = False,
    selection: bool = False,
) -> LogprobBatch:
    """Return a batch of these rows, in this order of columns; `indices` are their places in the original batch."""
    size = len(wanted)
    is_target = kind is BatchKind.TARGET
    counts = np.array([row.tokens for row in wanted], np.uint8)
    scored = np.repeat(np.array([row.scoring is not Scoring.NONE for row in wanted], np.bool_), counts)
    numbers = np.concatenate([np.zeros(0, np.uint64), *(_draws(row) for row in wanted)])
    tokens = synthetic.sampled(numbers)
    top_ks = np.array([row.top_k for row in wanted], np.uint8)
    stops = [row.stop for row in wanted if row.status is RowStatus.FINISHED_STOP]
    other_ids, other_logprobs = synthetic.alternatives(numbers, np.repeat(top_ks, counts))
    proposals = [row.key % 3 if is_target and row.status in MAY_PROPOSE else 0 for row in wanted]
    header = BatchHeader(
        worker_id,
        epoch,
        sequence,
        step,
        size if step_rows is None else step_rows,
        part_index=part[0],
        part_count=part[1],
        selection=selection,
        kind=kind,
        method=method,
        value_kind=ValueKind.RAW_LOGPROBS,
        vocabulary_size=synthetic.VOCABULARY_SIZE,
        draft_follows=draft_follows,
    )
    return LogprobBatch(
        header,
        request_keys=np.array([row.key for row in wanted], np.uint64),
        batch_indices=np.array(range(size) if indices is None else indices, np.uint32),
        positions=np.array([row.position for row in wanted], np.uint32),
        statuses=np.array([row.status for row in wanted], np.uint8),
        token_counts=counts,
        draft_token_counts=np.array([row.key % 2 if is_target else 0 for row in wanted], np.uint8),
        proposal_counts=np.array(proposals, np.uint8),
        scorings=np.array([row.scoring for row in wanted], np.uint8),
        top_ks=top_ks,
        token_ids=tokens.ids,
        logprobs=tokens.logprobs[scored],
        ranks=tokens.ranks[scored],
        alternative_token_ids=other_ids,
        alternative_logprobs=other_logprobs,
        proposal_token_ids=np.concatenate(
            [np.zeros(0, np.uint32), *(_proposals(row, count) for row, count in zip(wanted, proposals, strict=True))]
        ),
        stops=np.array(stops if any(stops) else (), np.uint8),
    )


def _draws(row: Wanted) -> Words:
    places = np.arange(row.position, row.position + row.tokens)
    return synthetic.draws(np.full(row.tokens, row.key, np.uint64), places)


def _proposals(row: Wanted, count: int) -> Any:  # noqa: ANN401 - an array
    return synthetic.true_tokens(row.key, row.position + row.tokens, row.position + row.tokens + count).ids


def row_values(row: Row) -> tuple[Any, ...]:
    """Return a row as plain values, for comparisons; its place in the batch too."""
    return tuple(value.tolist() if isinstance(value, np.ndarray) else value for value in row)


def values_by_key(found: LogprobBatch) -> dict[int, tuple[Any, ...]]:
    """Return each row's plain values by the request's key."""
    return {row.key: row_values(row) for row in found.rows()}


def arrays_of(made: LogprobBatch) -> StepArrays:
    header = made.header
    return StepArrays(
        request_keys=made.request_keys,
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


def encoded(wanted: Sequence[Wanted], sequence: int, **header: Any) -> bytes:  # noqa: ANN401 - as in `batch`
    """Return an encoded batch whose step is its sequence, unless `header` says otherwise."""
    return encode(batch(wanted, **{"sequence": sequence, "step": sequence} | header))


def hello_of(worker_id: str = WORKER, **fields: Any) -> Hello:  # noqa: ANN401 - as the message has them
    limits = StreamLimits(
        max_message_bytes=1024, max_rows=1, max_tokens_per_row=1, max_draft_tokens_per_row=1, max_top_k=1
    )
    usual: dict[str, Any] = {
        "schema_major": 1,
        "schema_minor": MINOR,
        "role": WorkerRole.WORKER_ROLE_MIXED,
        "limits": limits,
        "first_sequence": 1,
        "next_sequence": 1,
        "max_requests": 8,
        "proof": worker_id.encode(),
    }
    return Hello(worker_id=worker_id, **usual | fields)


def client_hello(session: int = 5, **fields: Any) -> ClientHello:  # noqa: ANN401 - as the message has them
    usual: dict[str, Any] = {"schema_major": 1, "name": "client", "window_frames": 64, "window_bytes": 2**24}
    usual["proof"] = b"%d" % session
    return ClientHello(session=session, **usual | fields)


def generate_of(key: int, max_tokens: int = 4, **fields: Any) -> Generate:  # noqa: ANN401 - as the message has them
    usual: dict[str, Any] = {"sampling": SamplingParameters(max_tokens=max_tokens)}
    if "text" not in fields:
        usual["tokens"] = TokenPrompt(token_ids=[0, 1, 2])
    return Generate(request_key=key, **usual | fields)
