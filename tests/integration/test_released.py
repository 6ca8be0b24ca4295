"""The released package beside this tree: each reads the other's messages and recordings, and each serves the other."""

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet

import tokenbus
from schema_tools.check import release_faults
from schema_tools.compiled import Tree
from tests.integration.audit import Audit
from tests.integration.deployment import Deployment
from tests.integration.inprocess import working
from tests.integration.releases import FROZEN, run_released
from tests.pages import ROOT
from tests.services.cli import helpers
from tests.support.waiting import soon, until
from tokenbus import BatchKind, Limits, LogprobBatch, RowStatus, Scoring, SpeculativeMethod
from tokenbus.testing import RowShape, SyntheticEngine, batch, golden_messages, row_shapes, true_tokens
from tokenbus_contracts.generated.request_pb2 import Generate, SamplingParameters, TokenPrompt
from tokenbus_contracts.published.compatibility import changes
from tokenbus_contracts.published.descriptors import Schema
from tokenbus_contracts.schema import COLUMNS, EXTRA_COLUMNS
from tokenbus_services.items import Recorder, StreamItem, gap_entry, hello_entry, item_entry, read_items

NEW_COLUMNS = {"stops", *(column.name for column in EXTRA_COLUMNS)}
"""What this tree's minor has and the release's has not."""
LIMITS = Limits.schema()
TOKENS = 40
WORKER = "worker-0"
STREAM = FROZEN / "stream.tokenbus"


def _shapes() -> list[LogprobBatch]:
    """Return a batch of each shape that a worker may publish."""
    named = [status for status in RowStatus if status]
    statuses = [RowShape(100 + status, 4, int(status is RowStatus.ACTIVE), status) for status in named]
    scorings = [RowShape(9, 0, 2, scoring=scoring) for scoring in Scoring if scoring]
    drafted = [RowShape(2**64 - 1, 2**31 - 9, 8, top_k=127, drafted=7, proposals=16)]
    stopped = [RowShape(key, 1, 2, RowStatus.FINISHED_STOP, top_k=1, stop=key - 1) for key in (1, 2, 18)]
    return [
        batch(row_shapes([7])),
        batch(row_shapes(range(1, 41), tokens=3), indices=list(reversed(range(40)))),
        batch(statuses),
        *(batch([row]) for row in scorings),
        batch(drafted, method=SpeculativeMethod.MTP, draft_follows=True),
        batch(row_shapes(range(1, 6), tokens=4), kind=BatchKind.DRAFT, method=9),
        batch(row_shapes([1, 2]), part=(1, 3), step_rows=8, indices=[7, 3], step=2**40, sequence=2**60),
        batch(row_shapes([3], status=RowStatus.FINISHED_LENGTH), selection=True, step_rows=6, epoch=2**64 - 1),
        batch(row_shapes(range(1, 1025))),
        batch(stopped),
        batch([*stopped, *statuses[:2]], part=(0, 2), step_rows=9),
    ]


def _plain(found: LogprobBatch) -> dict[str, Any]:
    """Return a batch as released_program.py does, without columns that the release does not have."""
    names = [each.name for each in COLUMNS if each.name not in NEW_COLUMNS]
    return {"header": found.header._asdict(), "columns": {name: getattr(found, name).tolist() for name in names}}


def _for_release(found: LogprobBatch) -> dict[str, Any]:
    """Return what the release makes the same batch of; it says itself which minor it writes."""
    plain = _plain(found)
    del plain["header"]["schema_major"], plain["header"]["schema_minor"]
    return plain


def _without_new(found: LogprobBatch) -> LogprobBatch:
    """Return a batch as the release has it that has read it."""
    columns = {name: column for name, column in found.columns.items() if name not in NEW_COLUMNS}
    return LogprobBatch(found.header, **columns)


def _items(items: Iterable[StreamItem]) -> list[dict[str, Any]]:
    """Return what is in a recording, as contracts/baseline/0.1.0/stream.json has it."""
    return [_item(each) for each in items]


def _item(item: StreamItem) -> dict[str, Any]:
    found: dict[str, Any] = {"sequence": str(item.sequence)}
    if item.missing_items:
        found["missing_items"] = item.missing_items
    if item.event is not None:
        kind = str(item.event.WhichOneof("event"))
        return {**found, "kind": kind, "keys": [str(getattr(item.event, kind).request_key)]}
    assert item.batch is not None
    return {
        **found,
        "kind": item.batch.header.kind.name.lower(),
        "keys": [str(key) for key in item.batch.request_keys.tolist()],
        "statuses": item.batch.statuses.tolist(),
        "token_ids": item.batch.token_ids.tolist(),
    }


# What is kept of the release.


def test_golden_stream_is_read() -> None:
    """The stream that the release recorded has every payload kind, row status and scoring, and reads as it did then."""
    items = list(tokenbus.read_recording(STREAM))
    assert _items(items) == json.loads((FROZEN / "stream.json").read_text())
    batches = [item.batch for item in items if item.batch is not None]
    assert {int(each) for one in batches for each in one.statuses} == set(range(1, 10))
    assert {int(each) for one in batches for each in one.scorings} == {1, 2, 3}
    assert {int(item.kind) for item in items} == {1, 2}
    assert {one.header.kind for one in batches} == {BatchKind.TARGET, BatchKind.DRAFT}
    assert max(one.header.part_count for one in batches) == 2
    assert sum(one.alternative_token_ids.size for one in batches) > 20
    for row in [row for one in batches for row in one.rows()]:
        true = true_tokens(row.key, row.position, row.position + row.token_ids.size)
        assert row.token_ids.tolist() == true.ids.tolist()


def test_golden_stream_is_written_alike() -> None:
    """A recorder of today gives the golden stream's bytes again."""
    items = list(tokenbus.read_recording(STREAM))
    epoch = items[0].epoch
    parts = [hello_entry(epoch, items[0].hello, items[0].hello.next_sequence)]
    for each in items:
        if each.missing_items:
            parts.append(gap_entry(epoch, each.sequence - each.missing_items, each.sequence - 1))
        parts.append(item_entry(epoch, each.sequence, each.kind, each.payload))
    assert b"".join(parts) == STREAM.read_bytes()
    batches = [each.batch for each in items if each.batch is not None]
    assert [tokenbus.encode(each, LIMITS) for each in batches] == [each.payload for each in items if each.batch]


def test_schema_has_grown_since_the_release() -> None:
    """Nothing of the released schema is gone or bounded otherwise, but for what `published.compatibility` accepts."""
    tree = Tree()
    assert tree.baseline.read_bytes() == (FROZEN / "schema.binpb").read_bytes()
    assert list(release_faults(tree)) == []
    released = Schema(FileDescriptorSet.FromString(tree.baseline.read_bytes()))
    assert [change for change in changes(released, Schema.installed()) if change.breaks] == []


def test_files_of_the_release_are_the_ones_here(release_source: Path) -> None:
    """The golden messages of the release are here with the same bytes, and so is its schema."""
    folder = release_source / "contracts"
    assert (folder / "baseline" / "v1.binpb").read_bytes() == (FROZEN / "schema.binpb").read_bytes()
    messages = sorted(path.relative_to(folder) for path in (folder / "vectors").rglob("*.binpb"))
    assert len(messages) > 60
    changed = [path for path in messages if (folder / path).read_bytes() != (ROOT / "contracts" / path).read_bytes()]
    assert changed == []


# Messages and recordings.


@dataclass(frozen=True)
class Exchange:
    """What was given to the release, and what it made of that."""

    messages: dict[str, bytes]
    shapes: list[LogprobBatch]
    recording: bytes
    result: dict[str, Any]


@pytest.fixture(scope="module")
def exchange(released: Path, tmp_path_factory: pytest.TempPathFactory) -> Exchange:
    """Let the release read and write everything, in one process."""
    shapes = _shapes()
    messages = {each.name: each.data for each in golden_messages() if each.is_valid}
    messages |= {f"shape {place}": tokenbus.encode(each, LIMITS) for place, each in enumerate(shapes)}
    recorded = tmp_path_factory.mktemp("recordings") / "present"
    recorded.write_bytes(_recording())
    job = {
        "messages": [each.hex() for each in messages.values()],
        "batches": [_for_release(each) for each in shapes],
        "recordings": [str(STREAM), str(recorded)],
    }
    return Exchange(messages, shapes, recorded.read_bytes(), run_released(released, "contract", job))


def _recording() -> bytes:
    """Return a recording of this tree: parts, drafts and events, a gap, and a row that says which stop ended it."""
    stop = RowShape(99, 0, 2, RowStatus.FINISHED_STOP, top_k=2, stop=3)
    items = list(helpers.payloads(drafts=True, parts=2))
    last = len(items) + 1
    payload = tokenbus.encode(batch([stop], step=90, sequence=last))
    return helpers.recording(iter([*items, (last, helpers.BATCH, payload)]), without=range(5, 8))


def test_release_reads_messages(exchange: Exchange) -> None:
    """The release decodes every valid golden message, and every shape of a batch, to the same columns."""
    assert {each.name for each in COLUMNS} - set(exchange.result["decoded"][0]["columns"]) == NEW_COLUMNS
    for (name, data), found in zip(exchange.messages.items(), exchange.result["decoded"], strict=True):
        assert found == _plain(tokenbus.decode(data, LIMITS)), name


def test_release_writes_what_it_read_alike(exchange: Exchange) -> None:
    """What the release decoded it encodes to the same bytes as this tree, but for columns that it does not have."""
    with_new = with_extras = 0
    for (name, data), again in zip(exchange.messages.items(), exchange.result["again"], strict=True):
        found = tokenbus.decode(data, LIMITS)
        assert again == tokenbus.encode(_without_new(found), LIMITS).hex(), name
        with_new += found.stops.size > 0
        with_extras += found.has_extras
    assert with_new >= 3
    assert with_extras >= 1


def test_messages_of_the_release_are_read(exchange: Exchange) -> None:
    """This tree decodes what the release encoded to the same columns, and encodes it to the same bytes."""
    for expected, encoded in zip(exchange.shapes, exchange.result["encoded"], strict=True):
        found = tokenbus.decode(bytes.fromhex(encoded), LIMITS)
        assert found.header.schema_minor == 0
        assert found.header == expected.header._replace(schema_minor=0)
        assert _plain(found)["columns"] == _plain(expected)["columns"]
        assert tokenbus.encode(found, LIMITS).hex() == encoded


def test_release_reads_recordings(exchange: Exchange) -> None:
    """The release finds in the golden stream, and in a recording of this tree, what this tree finds."""
    golden, present = exchange.result["recordings"]
    assert golden == json.loads((FROZEN / "stream.json").read_text())
    assert present == _items(read_items(BytesIO(exchange.recording)))
    assert [each["missing_items"] for each in present if "missing_items" in each] == [3]


def test_golden_stream_is_what_the_release_writes(exchange: Exchange) -> None:
    """The golden stream is the one that released_program.py makes with the release."""
    golden = exchange.result["golden"]
    assert (golden["stream"], golden["items"]) == (STREAM.read_bytes().hex(), exchange.result["recordings"][0])


# Streams.

Steps = list[tuple[LogprobBatch, LogprobBatch | None]]


async def test_streams(deployment: Deployment, released: Path) -> None:
    """Workers, processors and clients of both take each other's tokens, logprobs and drafts, and record streams.

    A worker and a client of the release are at a processor of this tree, beside a client of this tree; a worker and a
    client of this tree are at a processor of the release, beside a client of the release.
    """
    before = ["env", f"PYTHONPATH={released}"]
    folder = deployment.folder
    theirs: dict[str, Any] = {f"bus__{kind}_address": f"ipc://{folder}/old-{kind}" for kind in ("workers", "clients")}
    places = [str(deployment.overrides["bus.clients_address"]), theirs["bus__clients_address"]]
    async with tokenbus.Processor(deployment.settings(processor__drain_timeout_ms=0)):
        await asyncio.gather(
            asyncio.to_thread(deployment.start_processor, before=before, **theirs),
            asyncio.to_thread(deployment.start_worker, WORKER, "--drafts", "--parts", "2", before=before),
        )
        async with working(deployment, SyntheticEngine(drafts=True, parts=2), **theirs) as publisher:
            await until(lambda: publisher.session.processor_id)
            old_keys, new_keys = list(range(101, 107)), list(range(201, 207))
            job = {"addresses": places, "keys": old_keys, "tokens": TOKENS}
            client = asyncio.to_thread(run_released, released, "client", job, deployment.environment())
            found, *taken = await soon(asyncio.gather(client, *(_take(deployment, each, new_keys) for each in places)))
            for address, peer in zip(places, ("a worker", "a processor"), strict=True):
                await soon(_ask_too_much(deployment, address, f"{peer} of schema minor 1"))
    minors = [{target.header.schema_minor for target, _ in steps} for steps, _ in taken]
    assert minors == [{0}, {1}]  # else this tree was beside itself
    for (steps, _), asked in zip(taken, found["asked"], strict=True):
        _check(new_keys, steps)
        _check(old_keys, [(_decoded(target), draft and _decoded(draft)) for target, draft in asked["steps"]])
        _check_recording(bytes.fromhex(asked["recording"]), old_keys)
    await asyncio.to_thread(_check_recordings, released, folder, [recording for _, recording in taken])


async def _ask_too_much(deployment: Deployment, address: str, peer: str) -> None:
    """Fail unless what an older peer would ignore is refused in a line that names its version."""
    settings = deployment.settings(bus__clients_address=address)
    async with tokenbus.Client(settings) as client:
        early = client.generate([1, 2], max_tokens=2, entropies=True)  # before it is known who answers
        with pytest.raises(tokenbus.RequestFailedError, match=f"token_scoring: {peer}, got"):
            await anext(aiter(early))
        asked: list[dict[str, Any]] = [{"mask_bound": 3}, {"prompt_logprobs": 1}]
        for each in asked:
            with pytest.raises((tokenbus.RequestFailedError, tokenbus.ContractError), match=f"scoring: {peer}, got"):
                async with client.generate([1, 2], max_tokens=2, **each) as generation:
                    await anext(aiter(generation))


async def _take(deployment: Deployment, address: str, keys: list[int]) -> tuple[Steps, bytes]:
    """Ask for tokens at a processor, and return the steps that came, and a recording of the worker's stream."""
    settings = deployment.settings(bus__clients_address=address, client__window_frames=512)
    async with tokenbus.Client(settings) as client, client.watch(WORKER) as items, client.steps() as steps:
        for key in keys:
            client.submit(_wanted(key))
        taken: Steps = []
        open_keys = set(keys)
        while open_keys:
            match await anext(steps):
                case tokenbus.StepRows(target, draft):
                    taken.append((target, draft))
                case tokenbus.RequestEnd() as end:
                    assert end.status is RowStatus.FINISHED_LENGTH, end
                    open_keys.remove(end.request_id)
        first = await anext(items)
        recorder = Recorder(first.epoch, first.hello)
        data, open_keys = recorder.add(first), set(keys)
        while open_keys:
            item = await anext(items)
            data += recorder.add(item)
            if item.batch is not None:
                open_keys -= _ended(item.batch)
    return taken, data


def _wanted(key: int) -> Generate:
    """Return a request; one with an even key wants ids alone."""
    return Generate(
        request_key=key,
        tokens=TokenPrompt(token_ids=[1, 2]),
        sampling=SamplingParameters(max_tokens=TOKENS),
        include_draft_logprobs=True,
        top_logprobs=2 if key % 2 else None,
    )


def _ended(found: LogprobBatch) -> set[int]:
    return set(found.request_keys[found.statuses == RowStatus.FINISHED_LENGTH].tolist())


def _decoded(data: str) -> LogprobBatch:
    return tokenbus.decode(bytes.fromhex(data), LIMITS)


def _check(keys: list[int], steps: Steps) -> None:
    """Fail unless each request got exactly its tokens from the target, and from the draft, as it wanted them."""
    for drafted in (False, True):
        audits = {key: Audit(key) for key in keys}
        for step in steps:
            found = step[drafted]
            for row in found.rows() if found is not None else ():
                audits[row.key].take(row)
                is_scored = bool(row.key % 2)
                assert row.scoring is (Scoring.FULL if is_scored else Scoring.NONE)
                assert row.alternative_token_ids.shape[1] == 2 * is_scored
        assert all(audit.is_exact and audit.position == TOKENS for audit in audits.values()), audits


def _check_recording(data: bytes, keys: list[int]) -> None:
    """Fail unless this tree finds in a recording of the release how the requests ended."""
    items = list(read_items(BytesIO(data)))
    batches = [item.batch for item in items if item.batch is not None]
    assert set(keys) <= set().union(*map(_ended, batches))
    assert items[0].worker_id == WORKER


def _check_recordings(released: Path, folder: Path, recordings: list[bytes]) -> None:
    """Fail unless the release finds in recordings of this tree what this tree finds."""
    paths = [folder / f"new-{number}" for number, _ in enumerate(recordings)]
    for path, data in zip(paths, recordings, strict=True):
        path.write_bytes(data)
    job = {"messages": [], "batches": [], "recordings": [str(path) for path in paths]}
    found = run_released(released, "contract", job)["recordings"]
    assert found == [_items(tokenbus.read_recording(path)) for path in paths]
