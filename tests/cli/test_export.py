"""tokenbus export: whole recordings, and what a killed recorder left."""

import json
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.cli.helpers import payloads, recording
from tests.recordings.test_parquet import tokens_of
from tokenbus.cli import main
from tokenbus.recordings.items import read_items

DATA = recording(payloads(requests=4, tokens=24, drafts=True))
ITEMS = list(read_items(BytesIO(DATA)))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "steps.tokenbus"
    path.write_bytes(DATA)
    return path


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return rows


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
    (tmp_path / "_steps.parquet.unfinished").symlink_to(other)
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
        ([source, "--to", taken], f"{taken}: exists already; nothing is overwritten"),
        ([source, "--to", nowhere], f"{nowhere.parent}: not a directory"),
    ):
        assert main(["export", *map(str, arguments)]) == 2
        assert capsys.readouterr().err == f"tokenbus: {reason}\n"
    assert taken.read_text() == "mine"


def test_without_pyarrow(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delitem(sys.modules, "tokenbus.recordings.parquet", raising=False)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert main(["export", "a", "--to", "b"]) == 1
    complaints = capsys.readouterr().err.splitlines()
    assert complaints == ["tokenbus: Parquet needs pyarrow: pip install 'tokenbus[parquet]'"]
