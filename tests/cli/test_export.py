"""tokenbus export and tokenbus record --format parquet: whole files, and what a killed recorder left."""

import fcntl
import json
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.cli.helpers import WORKER, payloads, recording
from tests.recordings.test_parquet import tokens_of
from tokenbus.cli import main
from tokenbus.cli.errors import CommandError
from tokenbus.cli.export import unfinished
from tokenbus.cli.recording_files import Files
from tokenbus.recordings.items import read_items

DATA = recording(payloads(requests=4, tokens=24, drafts=True))
ITEMS = list(read_items(BytesIO(DATA)))
PART_BYTES = 2000


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "steps.tokenbus"
    path.write_bytes(DATA)
    return path


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return rows


def abandon(folder: Path, count: int) -> None:
    """Leave what a recorder leaves that is killed after so many items: nothing is closed but by the system."""
    files = Files(str(folder), PART_BYTES)
    for item in ITEMS[:count]:
        files.write(item)
    for _, opened in files._open.values():
        opened.file.close()


# Whole recordings.


def test_recording_becomes_a_file(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "steps.parquet"
    assert main(["export", str(source), "--to", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: {len(tokens_of(ITEMS))} tokens of {len(ITEMS)} items\n"
    assert rows_of(path) == tokens_of(ITEMS)
    requests = tmp_path / "requests.parquet"
    assert main(["export", str(source), "--to", str(requests), "--rows", "requests", "--json"]) == 0
    (summary,) = json.loads(capsys.readouterr().out)["files"]
    assert (summary["items"], summary["fault"]) == (len(ITEMS), None)
    assert len(rows_of(requests)) == 4
    assert sorted(each.name for each in tmp_path.iterdir()) == ["requests.parquet", "steps.parquet", "steps.tokenbus"]


def test_planted_link_is_not_followed(source: Path, tmp_path: Path) -> None:
    """Whoever may write beside the file has no other file of its owner's written over."""
    other = tmp_path / "other"
    other.write_text("mine")
    unfinished(tmp_path / "steps.parquet").symlink_to(other)
    assert main(["export", str(source), "--to", str(tmp_path / "steps.parquet")]) == 0
    assert other.read_text() == "mine"
    assert rows_of(tmp_path / "steps.parquet") == tokens_of(ITEMS)


def test_missing_items_are_told(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source.write_bytes(recording(without=range(5, 6)))
    assert main(["export", str(source), "--to", str(tmp_path / "p")]) == 0
    assert capsys.readouterr().out.endswith("of 5 items, 1 MISSING in the recording\n")


def test_torn_recording_is_recovered_up_to_its_fault(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever a recording ends, the items before are written, and one line says how many and where it ends."""
    places = [int(item.position.partition(".")[0]) for item in ITEMS]
    for cut in range(places[3], len(DATA), 997):
        source.write_bytes(DATA[:cut])
        path = tmp_path / f"{cut}.parquet"
        whole = [item for item, place in zip(ITEMS, places, strict=True) if place <= cut]
        status = main(["export", str(source), "--to", str(path)])
        line = capsys.readouterr().out
        assert rows_of(path) == tokens_of(whole)
        if cut in places:
            assert (status, "RECOVERED" in line) == (0, False)
        else:
            fault = f"{source}: byte {places[len(whole) - 1]}: the file ends within the entry"
            assert status == 1
            assert f"{len(whole)} items; RECOVERED up to the fault: {fault}" in line
            assert line.count("\n") == 1


@pytest.mark.parametrize("contents", [None, b"", b"\x05hello"])
def test_file_that_is_no_recording(
    contents: bytes | None, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source.unlink()
    if contents is not None:
        source.write_bytes(contents)
    assert main(["export", str(source), "--to", str(tmp_path / "p")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tokenbus: {source}: ")
    assert [each.name for each in tmp_path.iterdir()] == ([] if contents is None else [source.name])


def test_wrong_uses(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken, nowhere = tmp_path / "taken", tmp_path / "nowhere" / "p"
    taken.write_text("mine")
    for arguments, reason in (
        ([source], "--to FILE is missing"),
        ([source, "--to", taken], f"{taken}: exists already; nothing is overwritten"),
        ([source, "--to", nowhere], f"{nowhere.parent}: not a directory"),
        ([tmp_path, "--rows", "requests"], "--to, --rows: only with a recording, not with a folder to complete"),
    ):
        assert main(["export", *map(str, arguments)]) == 2
        assert capsys.readouterr().err == f"tokenbus: {reason}\n"
    assert taken.read_text() == "mine"


@pytest.mark.parametrize("command", [["export", "a", "--to", "b"], ["record", "a", "--format", "parquet"]])
def test_without_pyarrow(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "tokenbus.recordings.parquet", raising=False)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert main(command) == 1
    complaints = capsys.readouterr().err.splitlines()
    assert complaints == ["tokenbus: Parquet needs pyarrow: pip install 'tokenbus[parquet]'"]


# Folders of parts.


def test_parts_of_a_folder(tmp_path: Path) -> None:
    """Each part has items of so many bytes and says which; together, in the order of their names, they have all."""
    files = Files(str(tmp_path / "{worker}-{epoch}"), PART_BYTES)
    for item in [*ITEMS[:9], ITEMS[3], *ITEMS[9:14], *ITEMS[15:]]:  # one came again, and one is missing
        files.write(item)
    files.close()
    folder = tmp_path / "worker-0-7"
    parts = sorted(folder.iterdir())
    assert rows_of(folder) == [row for part in parts for row in rows_of(part)]
    assert rows_of(folder) == tokens_of([*ITEMS[:14], *ITEMS[15:]])
    told = [json.loads(pq.read_metadata(part).metadata[b"tokenbus.recording"]) for part in parts]
    assert len(told) > 3
    assert [part.name for part in parts] == [f"part-{int(each['first_sequence']):020}.parquet" for each in told]
    assert sum(each["items"] for each in told) == len(ITEMS) - 1
    summary = files.summary()
    assert [each["file"] for each in summary["files"]] == list(map(str, parts))
    assert (summary["items"], summary["missing_items"]) == (len(ITEMS) - 1, 1)


def test_part_that_cannot_be_written_stays_a_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Files(str(tmp_path / "steps"), PART_BYTES)
    files.write(ITEMS[0])
    _, opened = files._open[WORKER]
    monkeypatch.setattr(opened.table, "_add", _full)
    with pytest.raises(CommandError, match="no space left on device"):
        files.write(ITEMS[1])
    files.close()
    assert main(["export", str(tmp_path / "steps")]) == 0
    assert rows_of(tmp_path / "steps") == tokens_of(ITEMS[:2])


def _full(_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("items", [0, 12, 13])
def test_killed_recorder_loses_nothing(items: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After a kill, `tokenbus export` completes the folder, and says in a line what it recovered."""
    folder = tmp_path / "steps"
    abandon(folder, items)
    if not items:
        assert not folder.exists()
        return
    (left,) = folder.glob("_part-*.tokenbus")
    finished = sorted(folder.glob("part-*.parquet"))
    assert main(["export", str(folder)]) == 0
    recovered = capsys.readouterr().out
    assert recovered.startswith(f"{folder}/{left.stem.removeprefix('_')}.parquet: ")
    assert recovered.count("\n") == 1
    assert rows_of(folder) == tokens_of(ITEMS[:items])
    assert len(list(folder.iterdir())) == len(finished) + 1
    assert main(["export", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder}: complete\n"


def test_torn_part_is_recovered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As after a loss of power: the recording of the last part ends within an item, or before its first one."""
    folder = tmp_path / "steps"
    abandon(folder, 13)
    (left,) = folder.glob("_part-*.tokenbus")
    left.write_bytes(left.read_bytes()[:-1])
    assert main(["export", str(folder)]) == 1
    assert "RECOVERED up to the fault: " in capsys.readouterr().out
    assert rows_of(folder) == tokens_of(ITEMS[:12])
    (kept,) = folder.glob("_broken-*.tokenbus")
    assert kept.stat().st_size
    assert not left.exists()
    left.write_bytes(b"")
    assert main(["export", str(folder)]) == 1
    assert "0 tokens of 0 items" in capsys.readouterr().out
    assert rows_of(folder) == tokens_of(ITEMS[:12])
    assert kept.stat().st_size
    assert len(list(folder.glob("_broken-*.tokenbus"))) == 2


def test_folder_that_is_still_written_is_not_completed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "steps"
    abandon(folder, 13)
    (left,) = folder.glob("_part-*.tokenbus")
    with left.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # as a recorder does
        assert main(["export", str(folder)]) == 2
        assert f"{folder}: a recorder is writing it" in capsys.readouterr().err
    assert main(["export", str(folder)]) == 0
    assert rows_of(folder) == tokens_of(ITEMS[:13])
