"""Files of sessions: what pyarrow, DuckDB and Hugging Face's datasets read is what the sessions have."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.recordings.test_parquet import READERS, Values
from tests.recordings.test_sessions import Worker
from tokenbus.cli import main
from tokenbus.recordings import session_table
from tokenbus.recordings.items import Recorder
from tokenbus.recordings.sessions import Session, read_sessions
from tokenbus.testing import RowShape
from tokenbus_contracts import RowStatus


def saved(path: Path, worker: Worker) -> Path:
    recorder = Recorder(worker.epoch, worker.hello)
    path.write_bytes(b"".join(map(recorder.add, worker.items)))
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A session with an edited history, one whose request did not end, and one whose prompt is not recorded."""
    worker = Worker()
    first = worker.answer(1, [10, 11])
    worker.answer(2, [*first[:3], 77, 12])
    worker.answer(4, [10], session="hidden")
    worker.items[-3].payload = without_ids(worker.items[-3].payload)
    worker.admit(3, [10])
    worker.step(RowShape(3, 0, 2))
    return saved(tmp_path / "w0.tokenbus", worker)


def rows_of(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        return list(pq.read_table(path).to_pylist())
    with pa.memory_map(str(path)) as mapped:
        return list(pa.ipc.open_file(mapped).read_all().to_pylist())


def without_ids(payload: bytes) -> bytes:
    from tokenbus_contracts.generated.request_pb2 import RequestEvent  # noqa: PLC0415

    event = RequestEvent.FromString(payload)
    event.session_prompt.token_ids = b""
    return event.SerializeToString()


def expected(sessions: list[Session]) -> list[Values]:
    """Return the rows, without what has lists of messages."""
    rows = []
    for session in sessions:
        for index, branch in enumerate(session.branches):
            rows.append(
                {
                    "session": session.name.label,
                    "owner": session.name.owner,
                    "tenant": session.name.tenant,
                    "branch": index,
                    "token_ids": branch.token_ids.tolist(),
                    "is_output": branch.is_output.tolist(),
                    "logprobs": [None if math.isnan(each) else each for each in branch.logprobs.tolist()],
                    "ranks": [each or None for each in branch.ranks.tolist()],
                    "digest": branch.digest,
                    "is_complete": session.is_complete,
                    "missing": session.missing,
                }
            )
        if not session.branches:
            rows.append({"session": session.name.label, "branch": -1, "token_ids": [], "missing": session.missing})
    return rows


@pytest.mark.parametrize("read", READERS)
def test_rows_are_the_branches(read: Callable[[Path, Path], list[Values]], source: Path, tmp_path: Path) -> None:
    path = tmp_path / "sessions.parquet"
    assert main(["export", str(source), "--to", str(path), "--rows", "sessions"]) == 0
    rows = read(path, tmp_path / "cache")
    wanted = expected(list(read_sessions(source)))
    assert [{name: row[name] for name in want} for row, want in zip(rows, wanted, strict=True)] == wanted


def test_arrow_has_the_rest(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Requests, attempts, spans, and with a tokenizer the text where branches part."""
    path = tmp_path / "sessions.arrow"
    asked = ["export", str(source), "--to", str(path), "--rows", "sessions", "--session", "s", "--tokenizer", "ngram"]
    assert main([*asked, "--json"]) == 0
    (summary,) = json.loads(capsys.readouterr().out)["files"]
    assert summary == {
        "file": str(path), "sessions": 1, "incomplete_sessions": 1, "branches": 3, "tokens": 16, "items": 15,
        "refused_items": 0, "fault": None,
    }  # fmt: skip
    with pa.memory_map(str(path)) as mapped:
        first, second, _ = pa.ipc.open_file(mapped).read_all().to_pylist()
    assert [each["request_id"] for each in first["requests"]] == [1]
    assert second["divergence"]["position"] == 3
    assert second["divergence"]["after"][:2] == [77, 12]
    assert second["divergence"]["after_text"]
    assert first["workers"] == [{"begin": 2, "value": "w0"}]
    assert first["weight_versions"] == [{"begin": 2, "value": 0}]
    assert first["requests"][0]["attempts"][0]["worker_id"] == "w0"


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_unknown_label_makes_a_file_without_rows(source: Path, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"sessions.{suffix}"
    assert main(["export", str(source), "--to", str(path), "--rows", "sessions", "--session", "none"]) == 0
    assert rows_of(path) == []


def test_row_group_may_end_with_the_last_session(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_table, "_GROUP_TOKENS", 1)
    path = tmp_path / "sessions.arrow"
    assert main(["export", str(source), "--to", str(path), "--rows", "sessions", "--session", "s"]) == 0
    assert [row["branch"] for row in rows_of(path)] == [0, 1, 2]


def test_request_without_a_branch_is_in_a_row_of_its_session(tmp_path: Path) -> None:
    """Its session has a branch of another request."""
    worker = Worker()
    worker.answer(1, [10])
    worker.admit(2, [11])
    worker.step(RowShape(2, 1, 2, RowStatus.FINISHED_STOP))
    path = tmp_path / "sessions.arrow"
    assert main(["export", str(saved(tmp_path / "w0", worker)), "--to", str(path), "--rows", "sessions"]) == 0
    assert [(row["branch"], [each["request_id"] for each in row["requests"]]) for row in rows_of(path)] == [
        (0, [1]),
        (-1, [2]),
    ]


def test_broken_recording_is_named_in_every_session(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source.write_bytes(source.read_bytes()[:-3])
    path = tmp_path / "sessions.arrow"
    assert main(["export", str(source), "--to", str(path), "--rows", "sessions"]) == 1
    out = capsys.readouterr().out
    assert "RECOVERED up to the fault: " in out
    with pa.memory_map(str(path)) as mapped:
        rows: list[dict[str, Any]] = pa.ipc.open_file(mapped).read_all().to_pylist()
    assert all("the file ends within the entry" in row["missing"][-1] for row in rows)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--session", "s"], "--session: only with --rows sessions, got --rows tokens"),
        (["--tokenizer", "ngram"], "--tokenizer: only with --rows sessions, got --rows tokens"),
        (["again"], "RECORDING: one with --rows tokens, got 2"),
        (["--rows", "sessions", "--tokenizer", "none"], "none"),
    ],
)
def test_what_does_not_fit_is_refused(
    source: Path, tmp_path: Path, options: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(source), *options, "--to", str(tmp_path / "p")]) != 0
    assert error in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["w0.tokenbus"]
