"""Routed experts of sessions' requests: their arrays in files, their places on the bus, and their losses by name."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.engines.vllm.test_published import Bus, FinishReason, configuration, items_of, output_of
from tests.support.settings import settings_of
from tokenbus.engines.vllm import routed_experts
from tokenbus.engines.vllm.columns import NO_ROWS, Rows
from tokenbus.engines.vllm.request_ids import ARGUMENT
from tokenbus.engines.vllm.routed_experts import SessionExperts, Spool, check_routed_experts, refuse_routed_experts
from tokenbus.engines.vllm.sessions import SESSION
from tokenbus.recordings.routed_experts import RoutedExperts
from tokenbus_contracts import RowStatus
from tokenbus_contracts.generated import request_pb2 as pb

LAYERS, EXPERTS = 3, 2
ROW_BYTES = LAYERS * EXPERTS
PROMPT = [1, 2, 3, 4]
LENGTH, STOP = RowStatus.FINISHED_LENGTH, RowStatus.FINISHED_STOP


def part(rows: int, first: int = 0, dtype: str = "uint8") -> np.ndarray:
    """Return rows as vLLM does: a view of an array of a whole step."""
    every = np.arange(first * ROW_BYTES, (first + rows + 1) * ROW_BYTES).astype(dtype)
    return every.reshape(-1, LAYERS, EXPERTS)[:rows]


def spool_in(folder: Path, most: int = 1 << 20, epoch: int = 7) -> Spool:
    given = {"worker.routed_experts_folder": str(folder), "worker.routed_experts_bytes": most, "worker.id": "v/0"}
    return Spool(settings_of(given).worker, epoch)


def experts_in(folder: Path, most: int = 1 << 20) -> SessionExperts:
    return SessionExperts(spool_in(folder, most))


def begun(experts: SessionExperts, name: str = "a", request_id: int = 1, **sampling: int) -> SessionExperts:
    session = pb.Generate(request_id=request_id, tokens=pb.TokenPrompt(token_ids=PROMPT))
    experts.add(name, session, SimpleNamespace(**sampling))
    return experts


def last_row(position: int, tokens: int, status: RowStatus = LENGTH, request_id: int = 1) -> Rows:
    columns = {name: getattr(NO_ROWS, name) for name in Rows.__slots__}
    columns["request_ids"] = np.array([request_id], np.uint64)
    columns["positions"] = np.array([position], np.uint32)
    columns["token_counts"] = np.array([tokens], np.uint8)
    columns["statuses"] = np.array([status], np.uint8)
    return Rows(**columns)


def ended(experts: SessionExperts, rows: Rows) -> list[pb.RoutedExperts]:
    return [event.routed_experts for event in experts.ended(rows)]


@pytest.fixture
def spooling(folder: Path, tmp_path: Path) -> Iterator[Bus]:
    made = Bus(folder, worker__routed_experts_folder=str(tmp_path))
    yield made
    made.core.shutdown()


async def test_place_of_the_array_precedes_the_last_row(spooling: Bus, tmp_path: Path) -> None:
    """Neither requests without a session nor aborted ones have an array."""
    core = spooling.core
    core.prompt = PROMPT
    core.add("labelled", extra_args={ARGUMENT: 1, SESSION: "run"})
    core.add("aborted", extra_args={ARGUMENT: 2, SESSION: "run"})
    core.add("plain", extra_args={ARGUMENT: 3})
    names = list(core.requests)
    for step, rows in enumerate((part(4), part(1, 4), part(1, 5))):
        ends: dict[str, Any] = {"reason": FinishReason.LENGTH} if step == 2 else {}
        core.more = {name: {"routed_experts": rows} for name in names}
        for name in ("labelled", "plain"):
            core.more[name] |= ends
        core.step()
    for name in names:
        core.drop(name)
    core.step()
    *_, event, last, aborted = await items_of(spooling, 9)
    assert (last.request_ids.tolist(), last.statuses.tolist()) == ([1, 2, 3], [LENGTH, RowStatus.ACTIVE, LENGTH])
    assert aborted.request_ids.tolist() == [2]
    place = event.routed_experts
    assert (place.request_id, place.position, list(place.shape)) == (1, 0, [6, LAYERS, EXPERTS])
    assert RoutedExperts.of(place).read(tmp_path).tolist() == part(6).tolist()


def test_arrays_of_requests_follow_each_other(tmp_path: Path) -> None:
    """A row of 16-bit numbers has two bytes for each; rows of an ended request are ignored."""
    experts = begun(begun(experts_in(tmp_path)), "b", 2)
    first, second = part(5), part(5, 9, dtype="uint16")
    experts.collect([output_of("a", [8, 9], routed_experts=first), output_of("b", [8, 9], routed_experts=second)])
    (place,) = ended(experts, last_row(0, 2))
    experts.collect([output_of("a", [8], routed_experts=part(1))])
    (behind,) = ended(experts, last_row(0, 2, STOP, request_id=2))
    assert (behind.file, behind.offset, behind.length, behind.dtype) == (place.file, place.length, 60, "uint16")
    assert place.file == "v%2F0.0000000000000007.0.experts"
    for found, rows in ((place, first), (behind, second)):
        array = RoutedExperts.of(found).read(tmp_path)
        assert (array.dtype, array.tolist()) == (rows.dtype, rows.tolist())
    assert ended(experts, last_row(0, 2)) == []


def test_rows_behind_a_stop_string_are_cut(tmp_path: Path) -> None:
    """Of the last three tokens, one is kept."""
    experts = begun(experts_in(tmp_path))
    experts.collect([output_of("a", [8], routed_experts=part(4))])
    experts.collect([output_of("a", [7, 8, 9], routed_experts=part(3, 4))])
    (place,) = ended(experts, last_row(1, 1, STOP))
    assert RoutedExperts.of(place).read(tmp_path).tolist() == part(5).tolist()


@pytest.mark.parametrize(("start", "position"), [(3, 3), (4, 4), (9, 4)])
def test_first_rows_may_be_left_out(tmp_path: Path, start: int, position: int) -> None:
    """A client that has the experts of the prompt's beginning asks vLLM for the others."""
    experts = begun(experts_in(tmp_path), routed_experts_prompt_start=start)
    experts.collect([output_of("a", [7, 8], routed_experts=part(5 - position, position))])
    (place,) = ended(experts, last_row(0, 2))
    assert (place.position, place.shape[0], place.missing) == (position, 5 - position, "")
    assert RoutedExperts.of(place).read(tmp_path).tolist() == part(5 - position, position).tolist()


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([None, None], "vLLM returned 0 rows instead of 5"),
        ([part(3), part(1, 3)], "vLLM returned 4 rows instead of 5"),
        ([part(4), part(2, 4)], "vLLM returned 6 rows instead of 5"),
    ],
)
def test_wrong_number_of_rows_is_a_named_loss(
    parts: list[np.ndarray | None], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    experts = begun(experts_in(tmp_path))
    for each in parts:
        experts.collect([output_of("a", [8], routed_experts=each)])
    assert ended(experts, last_row(1, 1)) == [pb.RoutedExperts(request_id=1, missing=reason)]
    assert caplog.messages == [f'routed experts lost request="0000000000000001" reason="{reason}"']
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [0]


def test_full_folder_loses_arrays_until_files_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of the worker's earlier life count, those of other workers do not; a file ends at its size."""
    monkeypatch.setattr(routed_experts, "_FILE_BYTES", 1)
    for other in ("other", "v%2F0.b"):
        (tmp_path / f"{other}.0000000000000001.0.experts").write_bytes(bytes(1000))
    earlier = tmp_path / "v%2F0.0000000000000001.0.experts"
    earlier.write_bytes(bytes(40))
    experts = experts_in(tmp_path, most=100)
    found = []
    for request_id in range(1, 5):
        begun(experts, request_id=request_id).collect([output_of("a", [8, 9], routed_experts=part(5))])
        found += ended(experts, last_row(0, 2, request_id=request_id))
        if request_id == 3:
            earlier.unlink()
    full = "100 of 100 bytes (worker.routed_experts_bytes) are in use"
    assert [(each.file[-9:], each.offset, each.missing) for each in found] == [
        ("0.experts", 0, ""),
        ("1.experts", 0, ""),
        ("", 0, full),
        ("2.experts", 0, ""),
    ]


def test_folder_must_be_one_that_can_have_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    message = r"^worker\.routed_experts_folder: a folder in which files can be made, got .*file/inner"
    with pytest.raises(ValueError, match=message):
        spool_in(tmp_path / "file" / "inner")
    spool_in(tmp_path / "new" / "inner")


def test_file_that_cannot_be_written_is_a_named_loss(tmp_path: Path) -> None:
    experts = begun(experts_in(tmp_path / "spool"))
    experts.collect([output_of("a", [8], routed_experts=part(4))])
    (path,) = (tmp_path / "spool").iterdir()
    path.unlink()
    path.parent.rmdir()
    assert ended(experts, last_row(0, 1)) == [pb.RoutedExperts(request_id=1, missing="No such file or directory")]


@pytest.mark.parametrize("is_old", [True, False])
def test_option_is_found_in_both_places(*, is_old: bool) -> None:
    given = configuration(enable_return_routed_experts=is_old)
    if not is_old:
        given.aux_output_config = SimpleNamespace(enable_return_routed_experts=True)
    check_routed_experts(given, settings_of({"worker.routed_experts_folder": "/spool"}))
    with pytest.raises(ValueError, match=r"^--enable-return-routed-experts: only with vLLM's own server and "):
        refuse_routed_experts(given)
    refuse_routed_experts(configuration())
