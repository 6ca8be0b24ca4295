"""What the released package does for tests: a program that imports the release 0.1.0, and nothing of this tree.

`python released_program.py JOB` reads the job's arguments as JSON and prints its result as JSON: `contract` reads and
writes messages and recordings, `client` asks for tokens, `golden` makes the golden stream in contracts/baseline/0.1.0.
"""

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenbus_services.recording import Recorder, entries

import tokenbus_contracts
from tokenbus_contracts import (
    BatchHeader,
    BatchKind,
    Limits,
    LogprobBatch,
    RowStatus,
    Scoring,
    SpeculativeMethod,
    StepPhase,
    ValueKind,
    decode,
    encode,
)
from tokenbus_contracts.frames import read_frame, write_frame
from tokenbus_contracts.generated.client_pb2 import WatchedStream
from tokenbus_contracts.generated.request_pb2 import (
    Admitted,
    ErrorCode,
    Generate,
    RequestError,
    RequestEvent,
    SamplingParameters,
    TokenPrompt,
)
from tokenbus_contracts.generated.stream_pb2 import Hello, PayloadKind, StreamLimits, WorkerRole
from tokenbus_contracts.schema import COLUMNS
from tokenbus_engines import synthetic_tokens
from tokenbus_services.client import Client
from tokenbus_services.delivery import RequestTokens
from tokenbus_services.settings import Settings

LIMITS = Limits.schema()
BATCH, EVENT = PayloadKind.PAYLOAD_KIND_LOGPROB_BATCH, PayloadKind.PAYLOAD_KIND_REQUEST_EVENT
WORKER, EPOCH = "worker-0", 1_764_000_000_000_000_007
FIRST, LAST = 1, 2**64 - 1
"""Request keys, the largest among them."""
SECONDS = 60.0

# The contract.


def plain(batch: LogprobBatch) -> dict[str, Any]:
    """Return a batch as JSON has it."""
    columns = {each.name: getattr(batch, each.name).tolist() for each in COLUMNS}
    return {"header": batch.header._asdict(), "columns": columns}


def contract(job: dict[str, Any]) -> dict[str, Any]:
    """Decode and encode messages, encode batches, and read recordings."""
    decoded = [decode(bytes.fromhex(each), LIMITS) for each in job["messages"]]
    made = [LogprobBatch(BatchHeader(**each["header"]), **each["columns"]) for each in job["batches"]]
    return {
        "decoded": [plain(each) for each in decoded],
        "again": [encode(each, LIMITS).hex() for each in decoded],
        "encoded": [encode(each, LIMITS).hex() for each in made],
        "recordings": [items_of(Path(each).read_bytes()) for each in job["recordings"]],
        "golden": golden({}),
    }


def items_of(recording: bytes) -> list[dict[str, Any]]:
    """Return what a reader finds in a recording; an integer of 64 bits is a string."""
    items, missing = [], 0
    for entry in entries([recording]):
        match entry.frame.WhichOneof("body"):
            case "gap":
                missing = entry.frame.gap.last_sequence - entry.frame.gap.first_sequence + 1
            case "item":
                item = entry.frame.item
                gap = {"missing_items": missing} if missing else {}
                contents = (batch_of if item.payload_kind == BATCH else event_of)(entry.payload)
                items.append({"sequence": str(item.sequence), **gap, **contents})
                missing = 0
    return items


def batch_of(payload: bytes) -> dict[str, Any]:
    batch = decode(payload, LIMITS)
    return {
        "kind": batch.header.kind.name.lower(),
        "keys": [str(key) for key in batch.request_keys.tolist()],
        "statuses": batch.statuses.tolist(),
        "token_ids": batch.token_ids.tolist(),
    }


def event_of(payload: bytes) -> dict[str, Any]:
    event = read_frame(RequestEvent, payload)
    kind = str(event.WhichOneof("event"))
    return {"kind": kind, "keys": [str(getattr(event, kind).request_key)]}


# The golden stream.


class Wanted(NamedTuple):
    """A row; its tokens follow from its key and position."""

    key: int
    position: int = 0
    tokens: int = 0
    status: RowStatus = RowStatus.ACTIVE
    scoring: Scoring = Scoring.FULL
    top_k: int = 0
    drafted: int = 0
    proposals: int = 0


OF_EVERY_STATUS = (
    Wanted(LAST, 4, 1, RowStatus.ACTIVE, Scoring.SHED),
    Wanted(2, 9, 0, RowStatus.IDLE),
    Wanted(3, 0, 0, RowStatus.PREFILLING),
    Wanted(4, 7, 0, RowStatus.PREEMPTED),
    Wanted(5, 0, 1, RowStatus.HANDED_OFF, Scoring.FULL, 3, 0, 1),
    Wanted(6, 11, 2, RowStatus.FINISHED_STOP, Scoring.FULL, 1, 2),
    Wanted(7, 20, 8, RowStatus.FINISHED_LENGTH, Scoring.FULL, 20, 7),
    Wanted(8, 3, 0, RowStatus.ABORTED),
    Wanted(9, 5, 0, RowStatus.UNRECOVERABLE),
)


def golden(_: dict[str, Any]) -> dict[str, Any]:
    """Return the golden stream, and what a reader must find in it."""
    limits = StreamLimits(
        max_message_bytes=2**21, max_rows=512, max_tokens_per_row=8, max_draft_tokens_per_row=8, max_top_k=20
    )
    hello = Hello(
        schema_major=1,
        worker_id=WORKER,
        role=WorkerRole.WORKER_ROLE_MIXED,
        limits=limits,
        model="golden",
        vocabulary_size=synthetic_tokens.VOCABULARY_SIZE,
        dp_rank=1,
        max_requests=16,
    )
    recorder = Recorder(EPOCH, hello)
    stream = b"".join(recorder.add(*item) for item in golden_items())
    return {"stream": stream.hex(), "items": items_of(stream)}


def golden_items() -> Iterator[tuple[int, PayloadKind, bytes]]:
    """Yield items with every kind, status and scoring, parts, drafts and alternatives; 10 to 12 are missing."""
    for sequence, key in ((5, FIRST), (6, LAST)):
        taken = Admitted(request_key=key, worker_id=WORKER, epoch=EPOCH, prompt_tokens=2)
        yield sequence, EVENT, write_frame(RequestEvent(sequence=sequence, admitted=taken))
    rows = [Wanted(FIRST, 0, 3, top_k=2, drafted=2, proposals=2), Wanted(LAST, 0, 4, scoring=Scoring.NONE, drafted=5)]
    for part, row in enumerate(rows):
        yield (
            7 + part,
            BATCH,
            message(7 + part, 1, [row], part_index=part, part_count=2, step_rows=2, draft_follows=True),
        )
    drafted = [row._replace(tokens=row.drafted, drafted=0, proposals=0) for row in rows]
    yield 9, BATCH, message(9, 1, drafted, kind=BatchKind.DRAFT)
    yield 13, BATCH, message(13, 3, OF_EVERY_STATUS)
    error = RequestError(request_key=LAST, code=ErrorCode.ERROR_CODE_ENGINE, message="the engine failed")
    error.emitted_tokens = 5
    yield 14, EVENT, write_frame(RequestEvent(sequence=14, error=error))
    last = [Wanted(10, 0, 1, top_k=1)]
    yield 15, BATCH, message(15, 4, last, phase=StepPhase.PREFILL, method=SpeculativeMethod.NONE)


def message(sequence: int, step: int, rows: "list[Wanted] | tuple[Wanted, ...]", **given: Any) -> bytes:  # noqa: ANN401
    """Return a batch of rows, encoded; `given` are fields of its header."""
    header = {
        "step_rows": len(rows),
        "method": SpeculativeMethod.MTP,
        "value_kind": ValueKind.RAW_LOGPROBS,
        "dp_rank": 1,
        "vocabulary_size": synthetic_tokens.VOCABULARY_SIZE,
        "produced_at_ns": EPOCH + step * 10**7,
        "schema_minor": 0,
        **given,
    }
    keys = np.array([row.key for row in rows for _ in range(row.tokens)], np.uint64)
    places = np.array([row.position + place for row in rows for place in range(row.tokens)], np.uint64)
    numbers = synthetic_tokens.draws(keys, places)
    scored = np.array([row.scoring is not Scoring.NONE for row in rows for _ in range(row.tokens)], np.bool_)
    top_ks = np.array([row.top_k for row in rows for _ in range(row.tokens)], np.uint8)
    tokens = synthetic_tokens.sampled(numbers)
    other_ids, other_logprobs = synthetic_tokens.alternatives(numbers, top_ks)
    return encode(
        LogprobBatch(
            BatchHeader(WORKER, EPOCH, sequence, step, **header),
            request_keys=[row.key for row in rows],
            batch_indices=[header["step_rows"] - 1 - header.get("part_index", 0) - place for place in range(len(rows))],
            positions=[row.position for row in rows],
            statuses=[row.status for row in rows],
            token_counts=[row.tokens for row in rows],
            draft_token_counts=[row.drafted for row in rows],
            proposal_counts=[row.proposals for row in rows],
            scorings=[row.scoring for row in rows],
            top_ks=[row.top_k for row in rows],
            token_ids=tokens.ids,
            logprobs=tokens.logprobs[scored],
            ranks=tokens.ranks[scored],
            alternative_token_ids=other_ids,
            alternative_logprobs=other_logprobs,
            proposal_token_ids=[7 + place for row in rows for place in range(row.proposals)],
        ),
        LIMITS,
    )


# The client.


async def ask(address: str, job: dict[str, Any]) -> dict[str, Any]:
    """Ask for the tokens of some requests at a processor; return the steps, and a recording of its worker's stream."""
    settings = Settings.load(overrides={"bus.clients_address": address, "client.window_frames": 512})
    async with Client(settings) as client, Client(settings) as watcher, asyncio.TaskGroup() as group:
        items = watcher.watch(WORKER)
        stream = await anext(items)
        assert isinstance(stream, WatchedStream)
        steps = group.create_task(steps_of(client, len(job["keys"]) * job["tokens"]))
        await asyncio.sleep(0)  # it takes the steps of what is asked for from now on
        for key in job["keys"]:
            group.create_task(end_of(client.generate(wanted(key, job["tokens"]))))
        recording = await recorded(stream, items, set(job["keys"]))
    return {"steps": steps.result(), "recording": recording.hex()}


async def steps_of(client: Client, tokens: int) -> list[tuple[str, str | None]]:
    """Return a client's steps until it has so many tokens, encoded: the target's rows and the draft's."""
    taken: list[tuple[str, str | None]] = []
    async with aclosing(client.outputs()) as steps:
        while tokens:
            target, draft = await anext(steps)
            tokens -= target.token_ids.size
            taken.append((encode(target, LIMITS).hex(), None if draft is None else encode(draft, LIMITS).hex()))
    return taken


async def end_of(request: RequestTokens) -> None:
    """Wait until a request has ended; raises its error."""
    async for _ in request.rows():
        pass


async def recorded(stream: WatchedStream, items: AsyncGenerator[Any, None], keys: set[int]) -> bytes:
    """Return a recording of a stream until some requests have ended in it."""
    recorder, data = Recorder(stream.epoch, stream.hello), b""
    async with aclosing(items):
        while keys:
            item, payload = await anext(items)
            data += recorder.add(item.sequence, item.payload_kind, payload)
            if item.payload_kind == BATCH:
                batch = decode(payload, LIMITS)
                keys -= set(batch.request_keys[batch.statuses == RowStatus.FINISHED_LENGTH].tolist())
    return data


def wanted(key: int, tokens: int) -> Generate:
    """Return a request; one with an even key wants ids alone."""
    request = Generate(
        request_key=key,
        tokens=TokenPrompt(token_ids=[1, 2]),
        sampling=SamplingParameters(max_tokens=tokens),
        include_draft_logprobs=True,
    )
    if key % 2:
        request.top_logprobs = 2
    return request


async def client(job: dict[str, Any]) -> dict[str, Any]:
    """Ask at each processor at the same time."""
    asked = [ask(address, job) for address in job["addresses"]]
    return {"asked": await asyncio.wait_for(asyncio.gather(*asked), SECONDS)}


def main() -> None:
    job = json.load(sys.stdin)
    match sys.argv[1]:
        case "contract":
            result = contract(job)
        case "client":
            result = asyncio.run(client(job))
        case _:
            result = golden(job)
    json.dump({"package": tokenbus_contracts.__file__, **result}, sys.stdout)


if __name__ == "__main__":
    main()
