"""tokenbus record and tokenbus replay: a stream goes through both unchanged, and gaps are named."""

import asyncio
import json
from io import BytesIO
from pathlib import Path
from signal import SIGTERM

import pytest

from tests.services.cli.helpers import (
    EVENT,
    WORKER,
    Service,
    addresses,
    after_hello,
    hello,
    memory_settings,
    payloads,
    recording,
    take_all,
)
from tests.support.waiting import MOST, until
from tokenbus_engines.synthetic import true_tokens
from tokenbus_services.bus import Transport
from tokenbus_services.bus.memory import MemoryTransport
from tokenbus_services.cli import main
from tokenbus_services.cli.errors import CommandError
from tokenbus_services.cli.record import Files, record
from tokenbus_services.cli.watching import watched
from tokenbus_services.items import RecordingError, StreamItem, read_items, read_recording
from tokenbus_services.processor import Processor
from tokenbus_services.settings import Settings
from tokenbus_services.worker.replay import Replay, Replayed, ReplayError


async def replayed(
    data: bytes,
    settings: Settings,
    transport: Transport,
    *,
    renamed_to: tuple[str, int] | None = None,
    stop: asyncio.Event | None = None,
) -> Replayed:
    replay = Replay(read_items(BytesIO(data)), settings, speed=0, renamed_to=renamed_to, transport=transport)
    return await asyncio.wait_for(replay.run(stop or asyncio.Event()), MOST)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(recording(payloads()), id="plain"),
        pytest.param(recording(payloads(drafts=True, parts=3)), id="drafts and parts"),
        pytest.param(recording(payloads(), without=range(5, 6)), id="gap"),
        pytest.param(recording(payloads(first=2**40, tokens=30), first=2**40), id="from the middle"),
        pytest.param(recording(payloads(requests=1, tokens=900), without=range(3, 300)), id="gap beyond credit"),
    ],
)
async def test_recording_a_replay_gives_the_same_file(data: bytes, tmp_path: Path) -> None:
    settings = memory_settings(client__window_frames=1000, processor__credit_items=64)
    transport, stop = MemoryTransport(settings.bus), asyncio.Event()
    files = Files(str(tmp_path / "again"))
    count = len(list(read_items(BytesIO(data))))
    async with Processor(settings, transport=transport) as processor:
        steps = asyncio.create_task(take_all(processor))
        recorded = asyncio.create_task(record(watched(settings, WORKER, stop, transport), files, count))
        await until(lambda: len(processor.clients.watchers))
        done = await replayed(data, settings, transport)
        await asyncio.wait_for(recorded, MOST)
        steps.cancel()
    assert (done.items, done.unacknowledged) == (count, 0)
    assert after_hello((tmp_path / "again").read_bytes()) == after_hello(data)
    assert files.summary()["missing_items"] == done.missing_items


async def test_replay_as_another_worker_has_the_same_tokens() -> None:
    settings = memory_settings()
    transport = MemoryTransport(settings.bus)
    data = recording(payloads(requests=2, tokens=30, drafts=True, parts=2))
    async with Processor(settings, transport=transport) as processor:
        tokens = [processor.request(key) for key in (1, 2)]
        publishing = asyncio.create_task(replayed(data, settings, transport, renamed_to=("again/1", 99)))
        for key, each in zip((1, 2), tokens, strict=True):
            assert [token.id async for token in each] == true_tokens(key, 0, 30).ids.tolist()
        done = await publishing
    assert (done.worker_id, done.epoch, done.unacknowledged) == ("again/1", 99, 0)


async def test_replay_takes_no_requests() -> None:
    settings = memory_settings()
    transport, stop = MemoryTransport(settings.bus), asyncio.Event()
    async with Processor(settings, transport=transport) as processor:
        steps = asyncio.create_task(take_all(processor))
        await replayed(recording(), settings, transport)
        begun: list[int] = []
        processor.intake.stream_observers.append(lambda worker: begun.append(worker.stream.hello.max_requests))
        await replayed(recording(), settings, transport, renamed_to=("other", 1), stop=stop)
        steps.cancel()
    assert begun == [0]


async def test_replay_without_a_processor_ends() -> None:
    settings = memory_settings(worker__block_timeout_ms=1)
    with pytest.raises(ReplayError, match="no processor answered for 1 ms"):
        await replayed(recording(), settings, MemoryTransport(settings.bus))


async def test_replay_stops_when_told() -> None:
    settings = memory_settings()
    transport, stop = MemoryTransport(settings.bus), asyncio.Event()
    async with Processor(settings, transport=transport) as processor:
        steps = asyncio.create_task(take_all(processor))
        replay = Replay(read_items(BytesIO(recording())), settings, speed=0.001, transport=transport)
        running = asyncio.create_task(replay.run(stop))
        await until(lambda: processor.intake.steps)
        stop.set()
        done = await asyncio.wait_for(running, MOST)
        steps.cancel()
    assert done.unacknowledged == 0
    assert 4 <= done.items < 6


async def test_broken_recording_is_replayed_up_to_its_fault() -> None:
    settings = memory_settings()
    transport = MemoryTransport(settings.bus)
    data = recording()
    *_, before, _ = read_items(BytesIO(data))
    async with Processor(settings, transport=transport) as processor:
        steps = asyncio.create_task(take_all(processor))
        replay = Replay(read_items(BytesIO(data[:-1])), settings, speed=0, transport=transport)
        with pytest.raises(RecordingError) as caught:
            await asyncio.wait_for(replay.run(asyncio.Event()), MOST)
        steps.cancel()
    assert caught.value.offset == int(before.position.split(".")[0])
    assert replay.done.items == 5


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


def test_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="nowhere: no directory"):
        Files(str(tmp_path / "nowhere" / "steps"))


def test_disk_that_is_full(tmp_path: Path) -> None:
    files = Files(str(tmp_path / "{worker}"))
    files.write(seen("a", 1))
    _, opened = files._open["a"]
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
            await replayed(recording(), settings, transport, renamed_to=(worker_id, 2))
        await until(lambda: files.total("items") == 2 * len(list(payloads())))
        stop.set()
        await asyncio.wait_for(recorded, MOST)
        steps.cancel()
    assert sorted(path.name for path in files.recorders) == ["a", "b"]
    assert files.total("missing_items") == 0


# The commands.


def test_recorded_and_replayed_by_processes(tmp_path: Path) -> None:
    source = tmp_path / "source"
    data = recording(without=range(5, 6))
    source.write_bytes(data)
    workers, clients = addresses(tmp_path)[:2], addresses(tmp_path)[2:]
    patience = ["--set", "bus.heartbeat_timeout_ms=600000", "--metrics-address", ""]
    with (
        Service("processor", *addresses(tmp_path), *patience, processor__unclaimed_timeout_ms=1) as processor,
        Service("record", str(tmp_path / "again"), "--worker", WORKER, "--json", *clients) as recorder,
    ):
        processor.logged("client connected")
        recorder.logged("connected")
        with Service("replay", str(source), "--speed", "max", *workers) as replay:
            status, output, _ = replay.end()
        assert status == 0
        assert output.startswith("5 items, ")
        assert output.endswith("bytes as worker-0/7, 1 MISSING in the recording\n")
        with Service("replay", str(source), "--speed", "max", *workers) as replay:
            status, output, log = replay.end()
        assert (status, output) == (1, "")
        assert log.splitlines()[-1].startswith(
            "tokenbus: refused by the processor: epoch 7 of worker worker-0: a younger life was here, at least 8"
        )
        recorder.signal(SIGTERM)
        status, output, _ = recorder.end()
    summary = json.loads(output)
    assert status == 1
    assert (summary["items"], summary["missing_items"]) == (5, 1)
    assert summary["files"][0]["last_sequence"] == "6"
    assert after_hello((tmp_path / "again").read_bytes()) == after_hello(data)


@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        (None, "no such file or directory"),
        (b"", "byte 0: a recording begins with a hello, got an empty file"),
        (b"\x05hello", "byte 0: "),
    ],
)
def test_file_that_cannot_be_replayed(
    contents: bytes | None, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "steps"
    if contents is not None:
        file.write_bytes(contents)
    assert main(["replay", str(file), "--log-level", "error"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tokenbus: {file}: {reason}")


@pytest.mark.parametrize("speed", ["0", "-1", "nan", "inf", "fast"])
def test_speed_that_cannot_be(speed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "steps", "--speed", speed]) == 2
    assert f"argument --speed: a number above 0, or max, got {speed!r}" in capsys.readouterr().err


@pytest.mark.parametrize("worker_id", ["", "w" * 65])
def test_worker_that_cannot_be(worker_id: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "steps", "--as", worker_id, "--log-level", "error"]) == 2
    assert capsys.readouterr().err == f"tokenbus: --as: text of 1 to 64 bytes, got {worker_id!r}\n"
