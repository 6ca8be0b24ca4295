"""Dead letters: refused messages are kept for inspection, within bounds, whatever the state of the disk."""

import errno
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import run
from tokenbus.testing import ManualClock
from tokenbus_contracts import ContractError, Rule, decode
from tokenbus_contracts.frames import read_frame
from tokenbus_contracts.generated.stream_pb2 import Goodbye, WorkerFrame
from tokenbus_services.logs import configure
from tokenbus_services.processor.dead_letters import DeadLetters
from tokenbus_services.settings import DeadLetterSettings, LogSettings

VECTORS = Path(__file__).resolve().parents[3] / "contracts" / "vectors" / "v1"
COMMAND = Path(sys.executable).parent / "tokenbus"
NAME = re.compile(r"[0-9]{8}T[0-9]{6}\.[0-9]{6}Z-[0-9]{8}-[a-z]+\.(binpb|json)")
ERROR = ContractError("logprobs[1]", "a finite number", float("nan"), rule=Rule.FINITE)
NOON = 1_767_355_200.25  # 2026-01-02T12:00:00.25Z


@pytest.fixture
def lines() -> Callable[[], list[dict[str, Any]]]:
    stream = io.StringIO()
    configure(LogSettings(format="json"), stream)
    return lambda: [json.loads(line) for line in stream.getvalue().splitlines()]


def settings(
    directory: Path, *, max_files: int = 1000, max_bytes: int = 2**28, per_second: int = 1000
) -> DeadLetterSettings:
    return DeadLetterSettings(str(directory), max_files=max_files, max_bytes=max_bytes, per_second=per_second)


def opened(chosen: DeadLetterSettings, *, wall: float = NOON) -> DeadLetters:
    return DeadLetters(chosen, wall=ManualClock(wall).now, now=ManualClock().now)


def keep(letters: DeadLetters, *messages: bytes) -> None:
    for message in messages:
        letters.keep(message, ERROR, "w/1")


def payloads(directory: Path) -> list[bytes]:
    """Return the messages in a directory in the order of their names, which is that of their time."""
    return [path.read_bytes() for path in sorted(directory.glob("*.binpb"))]


def size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


def refusal(data: bytes) -> ContractError:
    with pytest.raises(ContractError) as refused:
        decode(data)
    return refused.value


def test_letter_is_a_message_and_a_note(tmp_path: Path) -> None:
    letters = opened(settings(tmp_path / "deep" / "letters"))
    letters.keep(b"\x00\xffraw", ERROR, "worker-0/7", 2**63)
    name = "20260102T120000.250000Z-00000001-finite"
    folder = tmp_path / "deep" / "letters"
    assert sorted(path.name for path in folder.iterdir()) == [f"{name}.binpb", f"{name}.json"]
    assert (folder / f"{name}.binpb").read_bytes() == b"\x00\xffraw"
    assert json.loads((folder / f"{name}.json").read_text()) == {
        "stream": "worker-0/7",
        "sequence": str(2**63),
        "time": "2026-01-02T12:00:00.250000Z",
        "field": "logprobs[1]",
        "rule": "finite",
        "limit": "a finite number",
        "actual": "nan",
        "error": "logprobs[1]: a finite number, got nan",
        "bytes": 5,
    }


def test_no_letter_no_directory(tmp_path: Path) -> None:
    letters = opened(settings(tmp_path / "letters"))
    assert (letters.kept, letters.dropped, letters.by_rule) == (0, 0, {})
    assert not (tmp_path / "letters").exists()


def test_letters_are_for_their_owner_alone(tmp_path: Path) -> None:
    opened(settings(tmp_path / "letters")).keep(b"x", ERROR, "w/1")
    assert (tmp_path / "letters").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "letters").iterdir()} == {0o600}


@pytest.mark.parametrize(
    "text", ["../../x", "/etc/passwd", "a\nb\x1b[2J", "\0", "\udcff\u202e", "x" * 10_000], ids=range(6)
)
def test_nothing_from_outside_reaches_a_name(tmp_path: Path, text: str) -> None:
    letters = opened(settings(tmp_path / "letters"))
    letters.keep(text.encode(errors="replace"), ContractError(text, text, text), text)
    assert all(NAME.fullmatch(path.name) for path in (tmp_path / "letters").iterdir())
    assert [path.name for path in tmp_path.iterdir()] == ["letters"]
    (note,) = (tmp_path / "letters").glob("*.json")
    assert note.stat().st_size < 2500
    assert all(str(value).isprintable() for value in json.loads(note.read_text()).values())


def test_number_that_cannot_be_printed(tmp_path: Path) -> None:
    letters = opened(settings(tmp_path))
    letters.keep(b"x", ContractError("x", 10**5000, 10**5000, rule=Rule.MAX), "w/1")
    (note,) = tmp_path.glob("*.json")
    assert json.loads(note.read_text())["actual"] == "a number of too many digits to print"


def test_oldest_go_first_by_number(tmp_path: Path) -> None:
    letters = opened(settings(tmp_path, max_files=3))
    for number in range(8):
        letters.keep(b"%d" % number, ERROR, "w/1")
        assert len(list(tmp_path.iterdir())) == 2 * min(number + 1, 3)
    assert payloads(tmp_path) == [b"5", b"6", b"7"]
    assert letters.kept == 8


def test_oldest_go_first_by_size(tmp_path: Path) -> None:
    letters = opened(settings(tmp_path, max_bytes=5000))
    for number in range(20):
        letters.keep(b"%d" % number * 100, ERROR, "w/1")
        assert size(tmp_path) <= 5000
    assert size(tmp_path) > 4400, "room for one more letter is not used"
    before = payloads(tmp_path)
    letters.keep(b"x" * 3000, ERROR, "w/1")
    *older, newest = payloads(tmp_path)
    assert size(tmp_path) <= 5000
    assert 0 < len(older) < len(before) - 1
    assert [*older, newest] == [*before[-len(older) :], b"x" * 3000]


def test_letter_that_fits_nowhere_is_counted_by_its_rule_and_displaces_nothing(tmp_path: Path) -> None:
    letters = opened(settings(tmp_path, max_bytes=1000))
    keep(letters, b"", b"first", bytes(1000))
    letters.keep(bytes(1001), ContractError("x", 1, 2, rule=Rule.MAX), "w/1")
    assert payloads(tmp_path) == [b"", b"first"]
    assert (letters.kept, letters.dropped) == (2, 2)
    assert letters.by_rule == {"finite": 3, "max": 1}


def test_letters_of_earlier_runs_count(tmp_path: Path) -> None:
    before = opened(settings(tmp_path, max_files=4))
    keep(before, b"a", b"b", b"c")
    after = opened(settings(tmp_path, max_files=4), wall=NOON - 86_400)
    keep(after, b"d", b"e")
    assert sorted(payloads(tmp_path)) == [b"b", b"c", b"d", b"e"]
    last = opened(settings(tmp_path, max_files=2), wall=NOON - 86_400)
    last.keep(b"f", ERROR, "w/3")
    assert sorted(payloads(tmp_path)) == [b"e", b"f"]
    assert len(list(tmp_path.iterdir())) == 4
    opened(settings(tmp_path, max_bytes=400)).keep(b"g", ERROR, "w/4")
    assert payloads(tmp_path) == [b"g"], "their bytes count too"


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    foreign = ["notes.json", "step-41.binpb", "20260102T120000.250000Z-00000001-finite.txt", "1-1-finite.binpb"]
    for name in foreign:
        (tmp_path / name).write_bytes(bytes(5000))
    (tmp_path / "20200101T000000.000000Z-00000009-max.binpb").mkdir()
    letters = opened(settings(tmp_path, max_files=1, max_bytes=1000))
    keep(letters, b"a", b"b")
    assert letters.kept == 2
    assert [path.read_bytes() for path in tmp_path.glob("*-finite.binpb") if path.name not in foreign] == [b"b"]
    assert all((tmp_path / name).stat().st_size == 5000 for name in foreign)
    assert (tmp_path / "20200101T000000.000000Z-00000009-max.binpb").is_dir()


@pytest.mark.parametrize("suffixes", [[".json.part"], [".json"], [".json", ".binpb.part"]], ids=str)
def test_half_letter_of_a_run_that_died_counts(tmp_path: Path, suffixes: list[str]) -> None:
    name = "20250102T120000.250000Z-00000041-finite"
    for suffix in suffixes:
        (tmp_path / f"{name}{suffix}").write_bytes(bytes(300))
    letters = opened(settings(tmp_path, max_files=2))
    letters.keep(b"a", ERROR, "w/1")
    assert len(list(tmp_path.iterdir())) == len(suffixes) + 2
    assert (tmp_path / "20260102T120000.250000Z-00000042-finite.binpb").exists()
    letters.keep(b"b", ERROR, "w/1")
    assert not list(tmp_path.glob(f"{name}*"))
    assert payloads(tmp_path) == [b"a", b"b"]


def test_no_reader_sees_half_a_letter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    rename = Path.rename

    def watched(path: Path, target: Path) -> Path:
        content = path.read_bytes()
        steps.append((target.suffix, target.exists(), content == b"payload" or json.loads(content)["bytes"]))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", watched)
    opened(settings(tmp_path)).keep(b"payload", ERROR, "w/1")
    assert steps == [(".json", False, 7), (".binpb", False, True)]


def test_flood_does_not_reach_the_disk(tmp_path: Path) -> None:
    now = ManualClock(100.0)
    letters = DeadLetters(settings(tmp_path, per_second=3), wall=ManualClock(NOON).now, now=now.now)
    kept = []
    for tenth in range(25):
        now.set(100 + tenth / 10)
        for _ in range(2):
            letters.keep(b"x", ERROR, "w/1")
        kept.append(letters.kept)
    assert kept[:10] == [2, 3, 3, 3, 3, 3, 3, 3, 3, 3]
    assert all(kept[tenth + 9] - kept[tenth - 1] <= 3 for tenth in range(1, 16))
    assert kept[-1] == 9
    assert letters.kept + letters.dropped == letters.by_rule["finite"] == 50
    assert len(payloads(tmp_path)) == 9


def test_failed_tries_are_part_of_the_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []
    (tmp_path / "file").touch()
    mkdir = Path.mkdir

    def counted(path: Path, mode: int = 0o777, *, parents: bool = False, exist_ok: bool = False) -> None:
        tries.append(path)
        mkdir(path, mode, parents, exist_ok)

    monkeypatch.setattr(Path, "mkdir", counted)
    letters = opened(settings(tmp_path / "file", per_second=3))
    for _ in range(10):
        letters.keep(b"x", ERROR, "w/1")
    assert (len(tries), letters.dropped) == (3, 10)


def test_directory_that_cannot_be_written(tmp_path: Path, lines: Callable[[], list[dict[str, Any]]]) -> None:
    (tmp_path / "taken").touch()
    now = ManualClock(0.0)
    letters = DeadLetters(settings(tmp_path / "taken" / "letters"), wall=ManualClock(NOON).now, now=now.now)
    for _ in range(5):
        letters.keep(b"x", ERROR, "w/1")
    (line,) = lines()
    assert (line["level"], line["event"]) == ("warning", "dead letters cannot be written")
    assert line["directory"] == str(tmp_path / "taken" / "letters")
    assert "Not a directory" in line["reason"]
    (tmp_path / "taken").unlink()
    letters.keep(b"y", ERROR, "w/1")
    assert len(lines()) == 1
    now.set(60.0)
    letters.keep(b"z", ERROR, "w/1")
    assert [line["event"] for line in lines()[1:]] == ["dead letters cannot be written: over"]
    assert lines()[1]["count"] == 5
    assert (letters.kept, letters.dropped) == (2, 5)
    assert payloads(tmp_path / "taken" / "letters") == [b"y", b"z"]


def test_directory_that_is_no_name(tmp_path: Path, lines: Callable[[], list[dict[str, Any]]]) -> None:
    letters = opened(settings(tmp_path / "a\0b"))
    letters.keep(b"x", ERROR, "w/1")
    assert (letters.dropped, len(lines())) == (1, 1)


@pytest.mark.usefixtures("lines")
@pytest.mark.parametrize("suffix", [".json", ".binpb"])
def test_disk_that_fills_leaves_no_half_letter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    letters = opened(settings(tmp_path, max_files=2))
    letters.keep(b"a", ERROR, "w/1")
    rename = Path.rename

    def full(path: Path, target: Path) -> Path:
        if target.suffix == suffix:
            raise OSError(errno.ENOSPC, "No space left on device")
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", full)
        letters.keep(b"b", ERROR, "w/1")
    assert len(list(tmp_path.iterdir())) == 2
    letters.keep(b"c", ERROR, "w/1")
    assert payloads(tmp_path) == [b"a", b"c"]
    assert (letters.kept, letters.dropped) == (2, 1)


@pytest.mark.usefixtures("lines")
def test_bounds_hold_where_nothing_can_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    letters = opened(settings(tmp_path, max_files=2))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        patch.setattr(Path, "rename", refuse)
        for _ in range(10):
            letters.keep(b"x", ERROR, "w/1")
    assert letters.dropped == 10
    assert len(list(tmp_path.iterdir())) == 2
    keep(letters, b"a", b"b", b"c")
    assert payloads(tmp_path) == [b"b", b"c"]
    assert len(list(tmp_path.iterdir())) == 4


def test_letters_that_somebody_took_away(tmp_path: Path) -> None:
    letters = opened(settings(tmp_path / "letters", max_files=2))
    keep(letters, b"a", b"b")
    for path in (tmp_path / "letters").iterdir():
        path.unlink()
    (tmp_path / "letters").rmdir()
    keep(letters, b"c", b"d")
    assert payloads(tmp_path / "letters") == [b"c", b"d"]


@pytest.mark.process
def test_check_says_why(tmp_path: Path) -> None:
    """`tokenbus check` refuses every dead letter for the field, rule, limit and value that its note names."""
    letters = opened(settings(tmp_path))
    for path in sorted((VECTORS / "invalid").glob("*.binpb")):
        data = path.read_bytes()
        letters.keep(data, refusal(data), path.stem)
    assert letters.kept > 40
    reports = checked(tmp_path)
    assert [report["file"] for report in reports] == sorted(map(str, tmp_path.glob("*.binpb")))
    for report in reports:
        note = json.loads(Path(report["file"]).with_suffix(".json").read_text())
        names = ("field", "rule", "limit", "actual", "error")
        assert [report[name] for name in names] == [note[name] for name in names], note["stream"]


@pytest.mark.process
def test_what_is_no_batch_at_all_is_kept_as_it_came(tmp_path: Path) -> None:
    # To protobuf any other message is a batch with unknown fields, and without what a batch must have.
    control = WorkerFrame(epoch=7, goodbye=Goodbye()).SerializeToString()
    messages = [b"\xff", b"\xff\xfe not protobuf \xff", control]
    letters = opened(settings(tmp_path))
    for data in messages:
        with pytest.raises(ContractError) as refused:
            read_frame(WorkerFrame, data)
        letters.keep(data, refused.value, "unknown peer")
    assert payloads(tmp_path) == messages
    assert [report["rule"] for report in checked(tmp_path)] == ["malformed", "malformed", "required"]


def checked(folder: Path) -> list[dict[str, Any]]:
    """Return what `tokenbus check` prints of the letters in a folder."""
    done = run([COMMAND, "check", "--json", *map(str, sorted(folder.glob("*.binpb")))])
    assert done.returncode == 1
    found: list[dict[str, Any]] = json.loads(done.stdout)["files"]
    return found
