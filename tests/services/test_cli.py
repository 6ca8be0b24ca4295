"""The command line, run as users run it: a process of its own, its output and its exit status."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tokenbus_contracts import Limits

VECTORS = Path(__file__).resolve().parents[2] / "contracts" / "vectors" / "v1"
GOOD = str(VECTORS / "valid" / "mixed_scoring.binpb")
BAD = str(VECTORS / "invalid" / "nan_logprob.binpb")


def tokenbus(*arguments: str, stdin: bytes = b"", **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run the installed command."""
    command = Path(sys.executable).parent / "tokenbus"
    return subprocess.run(
        [command, *arguments], input=stdin, env=os.environ | environment, capture_output=True, check=False
    )


def lines(run: subprocess.CompletedProcess[bytes]) -> list[str]:
    """Return what was printed; nothing may have gone wrong on the way."""
    assert b"Traceback" not in run.stderr
    return run.stdout.decode().splitlines()


def test_file_that_holds() -> None:
    """A file that holds gets one line that says what is in it, and status 0."""
    run = tokenbus("check", GOOD)
    (line,) = lines(run)
    assert run.returncode == 0
    assert line.startswith("ok ")
    assert "worker-0/1790000000000000000 sequence 41 step 40 part 1/1 TARGET, 4 rows (4 ACTIVE), 7 tokens" in line


def test_file_that_does_not_hold() -> None:
    """A file that does not hold gets one line with the field, the limit and the value, and status 1."""
    run = tokenbus("check", GOOD, BAD)
    _, line = lines(run)
    assert run.returncode == 1
    assert line == f"refused  {BAD}: logprobs[1]: a finite number, got nan"


def test_row_by_row() -> None:
    """With --rows each row has its own verdict, also in a message that is refused."""
    held = lines(tokenbus("check", "--rows", GOOD))
    assert len(held) == 1 + 4
    assert "row 1 key 2 index 1 position 0 ACTIVE top-k 0: 42(-) 42(-) 42(-)" in held[2]
    refused = lines(tokenbus("check", str(VECTORS / "invalid" / "preempted_with_tokens.binpb"), "--rows"))
    assert refused[0].startswith("refused ")
    assert refused[1].startswith("  ok ")
    assert "row 1 key 9: token_counts[0]: no token in a row that is PREEMPTED, got 2" in refused[2]


def test_every_vector_row_by_row() -> None:
    """Row by row, the command names the faults of every golden message without failing itself."""
    for kind, status in (("valid", 0), ("invalid", 1)):
        names = [str(path) for path in sorted((VECTORS / kind).glob("*.binpb"))]
        run = tokenbus("check", "--rows", *names)
        verdicts = [line for line in lines(run) if not line.startswith("  ")]
        assert run.returncode == status
        assert len(verdicts) == len(names)
        assert {line.split()[0] for line in verdicts} == {"ok" if status == 0 else "refused"}


def test_json() -> None:
    """With --json one document says the same for machines."""
    run = tokenbus("check", "--json", "--rows", GOOD, BAD)
    report: dict[str, Any] = json.loads(run.stdout)
    assert run.returncode == 1
    assert report["ok"] is False
    held, refused = report["files"]
    assert (held["file"], held["ok"], held["holds"]["tokens"]) == (GOOD, True, 7)
    assert [row["token_ids"] for row in held["rows"]] == [[11, 12], [42, 42, 42], [42], [12]]
    assert (refused["field"], refused["rule"], refused["actual"]) == ("logprobs[1]", "finite", "nan")


def test_limits_can_be_the_schemas() -> None:
    """What a deployment refuses by default may hold against the schema's own bounds."""
    wide = str(VECTORS / "invalid" / "too_many_tokens.binpb")
    assert tokenbus("check", wide).returncode == 1
    assert tokenbus("check", "--limits", "schema", wide).returncode == 0


def test_standard_input() -> None:
    """A message may come through a pipe; one that never ends is read no further than the limit."""
    assert tokenbus("check", "-", stdin=Path(GOOD).read_bytes()).returncode == 0
    endless = tokenbus("check", "-", stdin=b"\0" * (Limits.default().max_message_bytes + 10))
    (line,) = lines(endless)
    assert endless.returncode == 1
    assert line == "refused  -: message: at most 2097152 bytes, got 2097153"


def test_what_is_no_message_file(tmp_path: Path) -> None:
    """A directory, a missing, an empty, a huge and an unreadable kind of file each get one clear line."""
    empty, huge, fifo = tmp_path / "empty", tmp_path / "huge", tmp_path / "fifo"
    empty.touch()
    with huge.open("wb") as file:
        file.truncate(2**40)  # sparse: nothing is on the disk, and nothing of it may be read
    os.mkfifo(fifo)
    missing = tmp_path / "missing"
    run = tokenbus("check", *map(str, (tmp_path, missing, empty, huge, fifo)))
    assert run.returncode == 1
    assert lines(run) == [
        f"refused  {tmp_path}: a directory, not a message file",
        f"refused  {missing}: no such file or directory",
        f"refused  {empty}: header: a header, got none",
        f"refused  {huge}: message: at most 2097152 bytes, got {2**40}",
        f"refused  {fifo}: no regular file",
    ]


@pytest.mark.parametrize("arguments", [["check"], ["check", "--limits", "loose", GOOD], ["chekc"], ["--frobnicate"]])
def test_wrong_use(arguments: list[str]) -> None:
    """A wrong use of the command line ends with status 2 and a line that names what is wrong."""
    run = tokenbus(*arguments)
    assert run.returncode == 2
    assert b"error: " in run.stderr.splitlines()[-1]
    assert b"Traceback" not in run.stderr


@pytest.mark.parametrize("arguments", [[], ["--help"], ["check", "--help"], ["demo", "--help"], ["--version"]])
def test_help(arguments: list[str]) -> None:
    """Help and the version are printed on request, and without any argument, with status 0."""
    run = tokenbus(*arguments)
    assert run.returncode == 0
    assert "tokenbus" in lines(run)[0]


def test_reader_that_goes_away() -> None:
    """A reader that closes the pipe early gets no traceback."""
    command = Path(sys.executable).parent / "tokenbus"
    files = " ".join([GOOD] * 200)
    script = f"'{command}' check --rows {files} | head -n 1"
    run = subprocess.run(["bash", "-c", script], capture_output=True, check=False)  # noqa: S607
    assert run.stdout.startswith(b"ok ")
    assert b"Traceback" not in run.stderr
    assert b"BrokenPipe" not in run.stderr


def test_demo() -> None:
    """The demo shows a batch, reads it with the generated classes, and has five damaged ones refused."""
    run = tokenbus("demo")
    printed = lines(run)
    assert run.returncode == 0
    assert "the same bytes from them, the same columns from decode: yes" in "\n".join(printed)
    refused = [line for line in printed if " refused " in line]
    assert len(refused) == 5
    assert refused[1].endswith("logprobs[1]: a finite number, got nan")
