"""What the tests of the command line share: streams to record, and services as processes of their own."""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.support.processes import start
from tests.support.settings import environment_of, settings_of
from tests.support.waiting import MOST
from tests.system.programs import Program
from tokenbus.bus import Transport, transport_for
from tokenbus.bus.link import Link
from tokenbus.clock import SystemClock
from tokenbus.engines.synthetic import SyntheticEngine
from tokenbus.processor import Processor
from tokenbus.recordings.items import gap_entry, hello_entry, item_entry, public_hello, read_items
from tokenbus.settings import Settings
from tokenbus.worker.assembler import StepAssembler
from tokenbus.worker.retention import Retention
from tokenbus.worker.session import WorkerSession
from tokenbus_contracts import BatchHeader, Limits, LogprobBatch, encode
from tokenbus_contracts.frames import write_frame
from tokenbus_contracts.generated import request_pb2 as pb
from tokenbus_contracts.generated.stream_pb2 import Hello, PayloadKind, StreamLimits, WorkerRole
from tokenbus_contracts.schema import MAJOR

COMMAND = Path(sys.executable).parent / "tokenbus"
WORKER, EPOCH = "worker-0", 7
BATCH, EVENT = PayloadKind.PAYLOAD_KIND_LOGPROB_BATCH, PayloadKind.PAYLOAD_KIND_REQUEST_EVENT


def memory_settings(**overrides: object) -> Settings:
    values: dict[str, object] = {"bus.workers_address": "memory://workers", "bus.clients_address": "memory://clients"}
    return settings_of(values | {key.replace("__", "."): overrides[key] for key in overrides})


def generate(max_tokens: int, key: int = 11, **fields: Any) -> pb.Generate:  # noqa: ANN401 - as the message has them
    sampling = pb.SamplingParameters(max_tokens=max_tokens)
    return pb.Generate(
        request_id=key, tokens=pb.TokenPrompt(token_ids=[1]), sampling=sampling, top_logprobs=2, **fields
    )


def hello(worker_id: str = WORKER) -> Hello:
    limits = StreamLimits(
        max_message_bytes=2**20, max_rows=64, max_tokens_per_row=8, max_draft_tokens_per_row=8, max_top_k=20
    )
    return Hello(
        schema_major=MAJOR, worker_id=worker_id, role=WorkerRole.WORKER_ROLE_MIXED, limits=limits, max_requests=64,
        first_sequence=1, next_sequence=1,
    )  # fmt: skip


def admitted(key: int, sequence: int, worker_id: str = WORKER) -> bytes:
    taken = pb.Admitted(request_id=key, worker_id=worker_id, epoch=EPOCH, prompt_tokens=1)
    return write_frame(pb.RequestEvent(sequence=sequence, admitted=taken))


def payloads(  # noqa: PLR0913 - a test names what it needs
    requests: int = 3,
    tokens: int = 9,
    *,
    first: int = 1,
    drafts: bool = False,
    parts: int = 1,
    scoring: Mapping[int, pb.TokenScoring] = MappingProxyType({}),
    worker_id: str = WORKER,
) -> Iterator[tuple[int, PayloadKind, bytes]]:
    """Yield the items of a worker that answers some requests, from a sequence on, ten milliseconds a step.

    `scoring` has what some of the requests, by key, ask for beside logprobs.
    """
    sequence = first
    engine = SyntheticEngine(drafts=drafts, parts=parts)
    for key in range(1, requests + 1):
        engine.admit(generate(tokens, key, token_scoring=scoring.get(key)))
        yield sequence, EVENT, admitted(key, sequence, worker_id)
        sequence += 1
    assembler = StepAssembler(Limits.default())
    while engine.has_work:
        for arrays in engine.step():
            for batch in assembler.assemble(arrays):
                yield sequence, BATCH, encode(addressed(batch, sequence, worker_id))
                sequence += 1


def addressed(batch: LogprobBatch, sequence: int, worker_id: str = WORKER) -> LogprobBatch:
    header: BatchHeader = batch.header._replace(
        worker_id=worker_id, epoch=EPOCH, sequence=sequence, produced_at_ns=10**18 + batch.header.step * 10**7
    )
    return LogprobBatch.of_views(header, batch.columns)


def recording(
    items: Iterator[tuple[int, PayloadKind, bytes]] | None = None,
    without: range = range(0),
    first: int = 1,
    worker_id: str = WORKER,
) -> bytes:
    data = [hello_entry(EPOCH, hello(worker_id), first)]
    for sequence, kind, payload in items or payloads(first=first, worker_id=worker_id):
        if sequence not in without:
            data.append(item_entry(EPOCH, sequence, kind, payload))
        elif sequence == without[-1]:
            data.append(gap_entry(EPOCH, without[0], without[-1]))
    return b"".join(data)


async def take_all(processor: Processor) -> None:
    async for _ in processor.steps():
        pass


async def publish(data: bytes, settings: Settings, transport: Transport | None = None) -> None:
    """Publish a recording as its worker did, and wait until all of it is acknowledged."""
    items = list(read_items(BytesIO(data)))
    retention = Retention(len(data), len(data), checksum=True)
    retention.next_sequence = items[0].sequence - items[0].missing_items
    for item in items:
        for _ in range(item.missing_items):
            retention.drop(())
        retention.keep(item.kind, item.payload)
    session = WorkerSession(
        public_hello(items[0].hello),
        items[0].epoch,
        retention,
        interval=settings.bus.heartbeat_interval_ms / 1000,
        timeout=settings.bus.heartbeat_timeout_ms / 1000,
        on_request=lambda _: None,
        on_room=lambda: None,
    )
    link = Link(session, nullcontext(), SystemClock(), "worker")
    processors = [settings.bus.workers_address]
    running = await link.start(transport or transport_for(settings.bus, settings.bus.workers_address), processors)
    link.stop(MOST)
    await running
    assert not session.outstanding


def after_hello(data: bytes) -> bytes:
    """Return a recording without its hello, which has a size of one byte or two."""
    size, head = (data[0], 1) if data[0] < 128 else (data[0] % 128 + data[1] * 128, 2)
    return data[head + size :]


class Service(Program):
    def __init__(self, *arguments: str, **values: object) -> None:
        variables = environment_of({key.replace("__", "."): values[key] for key in values})
        super().__init__(arguments[0], start([str(COMMAND), *arguments], {**os.environ, **variables}))

    def logged(self, event: str) -> dict[str, Any]:
        while True:
            values: dict[str, Any] = json.loads(self.complaint(f'"{event}"'))
            if values["event"] == event:
                return values


def addresses(folder: Path) -> list[str]:
    return ["--workers-address", f"ipc://{folder}/w", "--clients-address", f"ipc://{folder}/c"]
