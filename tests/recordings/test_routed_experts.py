"""Places of routed experts: a session has them, and reading checks the array."""

from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from tests.recordings.test_session_table import rows_of, saved
from tests.recordings.test_sessions import Worker, only
from tokenbus.cli import main
from tokenbus.recordings.items import RecordingError
from tokenbus.recordings.routed_experts import RoutedExperts
from tokenbus.testing import RowShape
from tokenbus_contracts import RowStatus
from tokenbus_contracts.generated import request_pb2 as pb

ARRAY = np.arange(24, dtype=np.uint16).reshape(4, 3, 2)
FILE = "w0.0.experts"


def place_of(request_id: int = 1) -> pb.RoutedExperts:
    return pb.RoutedExperts(
        request_id=request_id,
        file=FILE,
        offset=5,
        length=48,
        dtype="uint16",
        shape=[4, 3, 2],
        digest=sha256(ARRAY.tobytes()).digest(),
    )


def answered(worker: Worker, request_id: int, *places: pb.RoutedExperts) -> Worker:
    worker.admit(request_id, [10, 11])
    worker.step(RowShape(request_id, 0, 2))
    for place in places:
        worker.event(pb.RequestEvent(routed_experts=place))
    worker.step(RowShape(request_id, 2, 1, RowStatus.FINISHED_STOP))
    return worker


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    (tmp_path / FILE).write_bytes(bytes(5) + ARRAY.tobytes() + bytes(3))
    return tmp_path


def test_session_has_the_place_of_each_array(spool: Path) -> None:
    session = only(answered(answered(Worker(), 1, place_of()), 2))
    first, second = session.requests
    assert first.routed_experts is not None
    array = first.routed_experts.read(spool)
    assert (array.dtype, array.tolist()) == (ARRAY.dtype, ARRAY.tolist())
    assert (second.routed_experts, session.is_complete) == (None, True)


def test_lost_array_is_missing_in_its_session() -> None:
    session = only(answered(Worker(), 1, pb.RoutedExperts(request_id=1, missing="no room")))
    assert session.missing == ["request 0000000000000001: its routed experts are missing: no room"]
    assert session.requests[0].routed_experts is None


def test_table_has_the_places(tmp_path: Path) -> None:
    worker = answered(answered(Worker(), 1, place_of()), 2)
    path = tmp_path / "sessions.parquet"
    assert main(["export", str(saved(tmp_path / "w0", worker)), "--to", str(path), "--rows", "sessions"]) == 0
    found = [request["routed_experts"] for row in rows_of(path) for request in row["requests"]]
    place = RoutedExperts.of(place_of())
    assert found == [asdict(place) | {"shape": list(place.shape)}, None]


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=FILE):
        RoutedExperts.of(place_of()).read(tmp_path)


def test_short_or_different_file_is_an_error(spool: Path) -> None:
    place, path = RoutedExperts.of(place_of()), spool / FILE
    data = path.read_bytes()
    for written, reason in (
        (data[:-4], "an array of 48 bytes, got 47"),
        (b"", "an array of 48 bytes, got 0"),
        (data.replace(b"\x07\0", b"\x08\0"), f"an array with the SHA-256 {place.digest}, got "),
    ):
        path.write_bytes(written)
        with pytest.raises(RecordingError) as raised:
            place.read(spool)
        assert str(raised.value).startswith(f"{path}: byte 5: {reason}")


@pytest.mark.parametrize(
    "changed",
    [
        {"file": f"../{FILE}"},
        {"file": f"/{FILE}"},
        {"file": ""},
        {"length": 47},
        {"shape": (4, 3)},
        {"dtype": "object"},
        {"dtype": "V48", "shape": (1,)},
    ],
)
def test_broken_place_is_an_error(changed: dict[str, object], spool: Path) -> None:
    """The place may come from a process that nobody trusts: it names no file elsewhere."""
    with pytest.raises(RecordingError, match="not the place of an array"):
        replace(RoutedExperts.of(place_of()), **changed).read(spool)  # type: ignore[arg-type]
