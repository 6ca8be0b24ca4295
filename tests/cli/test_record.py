"""tokenbus record: a stream is written as it was published, and gaps are named."""

import asyncio
from io import BytesIO
from pathlib import Path

import pytest

from tests.cli.helpers import EVENT, WORKER, after_hello, hello, memory_settings, payloads, publish, recording, take_all
from tests.support.waiting import MOST, until
from tokenbus.bus.memory import MemoryTransport
from tokenbus.cli import main
from tokenbus.cli.errors import CommandError
from tokenbus.cli.record import record
from tokenbus.cli.recording_files import Files
from tokenbus.cli.watching import watched
from tokenbus.processor import Processor
from tokenbus.recordings.items import StreamItem, read_items, read_recording


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(recording(payloads(drafts=True, parts=3)), id="drafts and parts"),
        pytest.param(recording(payloads(first=2**40, tokens=30), first=2**40), id="from the middle"),
        pytest.param(recording(payloads(requests=1, tokens=900), without=range(3, 300)), id="gap beyond credit"),
    ],
)
async def test_recording_is_what_was_published(data: bytes, tmp_path: Path) -> None:
    settings = memory_settings(client__window_frames=1000, processor__credit_items=64)
    transport, stop = MemoryTransport(settings.bus), asyncio.Event()
    files = Files(str(tmp_path / "again"))
    count = len(list(read_items(BytesIO(data))))
    async with Processor(settings, transport=transport) as processor:
        steps = asyncio.create_task(take_all(processor))
        recorded = asyncio.create_task(record(watched(settings, WORKER, stop, transport), files, count))
        await until(lambda: len(processor.clients.watchers))
        await publish(data, settings, transport)
        await asyncio.wait_for(recorded, MOST)
        steps.cancel()
    assert after_hello((tmp_path / "again").read_bytes()) == after_hello(data)
    assert files.summary()["missing_items"] == sum(item.missing_items for item in read_items(BytesIO(data)))


# Where streams are written.


def seen(worker_id: str, epoch: int, sequence: int = 1) -> StreamItem:
    return StreamItem(hello(worker_id), epoch, sequence, EVENT, b"payload")


def test_each_life_has_a_file(tmp_path: Path) -> None:
    files = Files(str(tmp_path / "{worker}-{epoch}"))
    for worker_id, epoch in (("a", 1), ("../b", 1), ("a", 2), (".", 3)):
        files.write(seen(worker_id, epoch))
    files.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["%2E%2E%2Fb-1", "%2E-3", "a-1", "a-2"]
    assert next(read_recording(tmp_path / "a-2")).epoch == 2


def test_second_stream_does_not_get_the_firsts_file(tmp_path: Path) -> None:
    files = Files(str(tmp_path / "steps"))
    for worker_id, epoch in (("a", 1), ("b", 1), ("a", 1), ("a", 2)):
        files.write(seen(worker_id, epoch, sequence=len(files.recorders) + 1))
    files.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["steps", "steps.a.2", "steps.b.1"]


def test_existing_file_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")
    with pytest.raises(CommandError, match="a: exists already") as caught:
        Files(str(tmp_path / "a"))
    assert caught.value.status == 2
    files = Files(str(tmp_path / "{worker}"))
    with pytest.raises(CommandError, match="a: exists already"):
        files.write(seen("a", 1))
    assert (tmp_path / "a").read_text() == "mine"


def test_disk_that_is_full(tmp_path: Path) -> None:
    files = Files(str(tmp_path / "{worker}"))
    files.write(seen("a", 1))
    opened = files._open["a"]
    opened.file.close()
    with Path("/dev/full").open("wb", buffering=0) as full:
        opened.file = full
        with pytest.raises(CommandError, match=r"/a: no space left on device"):
            files.write(seen("a", 1, sequence=2))
    with pytest.raises(CommandError, match=r"/1/a: no such file or directory"):
        Files(str(tmp_path / "{epoch}" / "{worker}")).write(seen("a", 1))


async def test_every_worker_is_recorded(tmp_path: Path) -> None:
    settings = memory_settings(client__window_frames=1000)
    transport, stop = MemoryTransport(settings.bus), asyncio.Event()
    files = Files(str(tmp_path / "{worker}"))
    async with Processor(settings, transport=transport) as processor:
        steps = asyncio.create_task(take_all(processor))
        recorded = asyncio.create_task(record(watched(settings, "", stop, transport), files))
        await until(lambda: len(processor.clients.watchers) == 1)
        for worker_id in ("a", "b"):
            await publish(recording(worker_id=worker_id), settings, transport)
        await until(lambda: files.total("items") == 2 * len(list(payloads())))
        stop.set()
        await asyncio.wait_for(recorded, MOST)
        steps.cancel()
    assert sorted(path.name for path in files.recorders) == ["a", "b"]
    assert files.total("missing_items") == 0


# The commands.


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "expected either FILE or --to ADDRESS"),
        (["a", "b"], "expected either FILE or --to ADDRESS"),
        (["a", "--to", "nats://127.0.0.1:1"], "expected either FILE or --to ADDRESS"),
    ],
)
def test_streams_go_to_one_place(capsys: pytest.CaptureFixture[str], arguments: list[str], line: str) -> None:
    assert main(["record", *arguments]) == 2
    assert capsys.readouterr().err == f"tokenbus: {line}\n"
