"""The command line, run as users run it: a process of its own, its output and its exit status."""

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import processes
from tokenbus_contracts import BatchHeader, Limits, LogprobBatch, encode

VECTORS = Path(__file__).resolve().parents[2] / "contracts" / "vectors" / "v1"
GOOD = str(VECTORS / "valid" / "mixed_scoring.binpb")
BAD = str(VECTORS / "invalid" / "nan_logprob.binpb")
COMMAND = Path(sys.executable).parent / "tokenbus"


def tokenbus(
    *arguments: str | bytes, stdin: bytes = b"", cwd: Path | None = None, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    return processes.run([COMMAND, *arguments], input=stdin, cwd=cwd, env=os.environ | (environment or {}))


def redirected(redirection: str, *arguments: str, unbuffered: str = "") -> subprocess.CompletedProcess[bytes]:
    command = ["bash", "-c", f'exec "$0" "$@" {redirection}', str(COMMAND), *arguments]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    return subprocess.run(command, env=environment, capture_output=True, check=False)


def message(worker_id: str = "worker-0", number: int = 1) -> bytes:
    """Return a message without rows, from a worker of this name, whose 64-bit integers are all this number."""
    header = BatchHeader(worker_id, epoch=number, sequence=number, step=number, step_rows=0, vocabulary_size=8)
    return encode(LogprobBatch(header))


def no_constant(literal: str) -> None:
    """Refuse what Python's reader of JSON takes and JSON has not."""
    raise AssertionError(literal)


def lines(run: subprocess.CompletedProcess[bytes]) -> list[str]:
    """Return what was printed; nothing may have gone wrong on the way."""
    assert b"Traceback" not in run.stderr
    return run.stdout.decode().splitlines()


def test_file_that_holds() -> None:
    run = tokenbus("check", GOOD)
    (line,) = lines(run)
    assert run.returncode == 0
    assert line.startswith("ok ")
    assert "worker-0/1790000000000000000 sequence 41 step 40 part 1/1 TARGET, 4 rows (4 ACTIVE), 7 tokens" in line


def test_file_that_does_not_hold() -> None:
    run = tokenbus("check", GOOD, BAD)
    _, line = lines(run)
    assert run.returncode == 1
    assert line == f"refused  {BAD}: byte 110: logprobs[1]: a finite number, got nan"


def test_row_by_row() -> None:
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
    run = tokenbus("check", "--json", "--rows", GOOD, BAD)
    report: dict[str, Any] = json.loads(run.stdout)
    assert run.returncode == 1
    assert report["ok"] is False
    held, refused = report["files"]
    assert (held["file"], held["ok"], held["holds"]["tokens"]) == (GOOD, True, 7)
    assert [row["token_ids"] for row in held["rows"]] == [[11, 12], [42, 42, 42], [42], [12]]
    assert (refused["field"], refused["rule"], refused["actual"]) == ("logprobs[1]", "finite", "nan")


def test_json_is_strict(tmp_path: Path) -> None:
    """With --json nothing is NaN or Infinity, whatever the messages hold, and a name without UTF-8 is escaped."""
    (tmp_path / "\udcff").touch()
    names = [str(path) for path in sorted(VECTORS.glob("*/*.binpb"))]
    run = tokenbus("check", "--json", "--rows", *names, os.fsencode(tmp_path / "\udcff"))
    files = json.loads(run.stdout, parse_constant=no_constant)["files"]
    assert [file["file"] for file in files] == [*names, f"{tmp_path}/\\udcff"]


def test_json_keeps_64_bits() -> None:
    """With --json every integer of 64 bits is a string: a reader that has only doubles would round it."""
    run = tokenbus("check", "--json", "-", stdin=message(number=2**63 + 1))
    holds = json.loads(run.stdout)["files"][0]["holds"]
    assert [holds[name] for name in ("epoch", "sequence", "step")] == [str(2**63 + 1)] * 3
    rows = json.loads(tokenbus("check", "--json", "--rows", GOOD).stdout)["files"][0]["rows"]
    assert [row["request_key"] for row in rows] == ["1", "2", "3", "4"]


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
    assert line.startswith("refused  -: byte 0: message: at most 2097152 bytes, got 20971")


def test_each_file_is_reported_when_it_is_read() -> None:
    """A file's line does not wait for the next file, which may be a pipe without a writer yet."""
    command = [str(COMMAND), "check", GOOD, "-"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert select.select([process.stdout], [], [], 60)[0], "no line while standard input is open"
            assert process.stdout.readline().startswith(b"ok ")
        finally:
            process.stdin.close()
        assert process.stdout.readline().startswith(b"refused  -: ")


def test_worker_id_is_printed_escaped() -> None:
    run = tokenbus("check", "-", stdin=message("w\nok       x\x1b[2J\r\x9b\u202e"))
    (line,) = run.stdout.decode().split("\n")[:-1]
    assert line.startswith(r"ok       -: w\nok       x\x1b[2J\r\x9b\u202e/1 sequence 1 ")


def test_file_name_is_printed_escaped() -> None:
    """Nor can a file's name, even one that is no UTF-8."""
    run = tokenbus("check", b"a\nok\x1b[31m\xff")
    assert run.stdout == rb"refused  a\nok\x1b[31m\udcff: no such file or directory" + b"\n"


def test_wrong_use_is_quoted_escaped() -> None:
    for arguments in (["x\n\x1b[2J"], ["check", GOOD, "--x\n\x1b[2J"], ["check", "--json=\n\x1b[2J", GOOD]):
        run = tokenbus(*arguments)
        assert run.returncode == 2
        assert b"\x1b" not in run.stderr
        assert rb"\n\x1b[2J" in run.stderr.splitlines()[-1]


@pytest.mark.parametrize("arguments", [["check", GOOD], ["check", "--json", GOOD], ["--help"], ["--version"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("redirection", "why"),
    [
        (">&-", "standard output is closed"),
        ("> /dev/full", "cannot write to standard output: no space left on device"),
    ],
)
def test_output_that_cannot_be_written(redirection: str, why: str, arguments: list[str], unbuffered: str) -> None:
    """Where standard output takes nothing, one line on standard error says why, with status 1."""
    run = redirected(redirection, *arguments, unbuffered=unbuffered)
    assert run.stderr.decode() == f"tokenbus: {why}\n"
    assert run.returncode == 1


@pytest.mark.parametrize("redirection", [">&- 2>&-", "> /dev/full 2>&-", "> /dev/full 2> /dev/full"])
def test_nowhere_to_complain(redirection: str) -> None:
    """Where standard error takes nothing either, status 1 is all there is."""
    run = redirected(redirection, "check", GOOD)
    assert (run.returncode, run.stdout, run.stderr) == (1, b"", b"")


def test_standard_input_that_is_closed() -> None:
    run = redirected("<&-", "check", GOOD, "-")
    assert lines(run)[1] == "refused  -: standard input is closed"
    assert (run.returncode, run.stderr) == (1, b"")


@pytest.mark.parametrize(
    "environment",
    [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}],
)
def test_output_without_unicode(environment: dict[str, str]) -> None:
    """Where the output holds only ASCII, other letters are escaped, and the verdict is the same."""
    run = tokenbus("check", "-", stdin=message("arbeiter-ü"), environment=environment)
    assert run.stdout.startswith(rb"ok       -: arbeiter-\xfc/1 ")
    assert (run.returncode, run.stderr) == (0, b"")


def test_names_that_begin_with_a_dash(tmp_path: Path) -> None:
    """What follows `--` is a file, whatever it looks like; options may stand between the files before it."""
    for name in ("-dash", "--json", "plain"):
        (tmp_path / name).write_bytes(message())
    run = tokenbus("check", "plain", "--rows", "plain", "--", "-dash", "plain", "--json", cwd=tmp_path)
    assert [line.split(":")[0].split()[1] for line in lines(run)] == ["plain", "plain", "-dash", "plain", "--json"]
    assert run.returncode == 0
    assert lines(tokenbus("check", "--", "-dash", cwd=tmp_path))[0].startswith("ok       -dash: ")


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
        f"refused  {empty}: byte 0: header: a header, got none",
        f"refused  {huge}: byte 0: message: at most 2097152 bytes, got {2**40}",
        f"refused  {fifo}: no regular file",
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ["check"],
        ["check", "--"],
        ["check", "--limits", "loose", GOOD],
        ["demo", "--", "-x"],
        ["chekc"],
        ["--frobnicate"],
    ],
)
def test_wrong_use(arguments: list[str]) -> None:
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


def test_help_lists_all_commands_in_groups() -> None:
    printed = lines(tokenbus("--help"))
    headings = [line for line in printed if line.endswith(":")]
    assert headings == ["run:", "look:", "keys:", "schema:", "engines and plugins:", "options:"]
    commands = [line.split()[0] for line in printed[: printed.index("options:")] if line.startswith("  ")]
    assert len(commands) <= 14
    assert {"demo", "worker", "record", "keys", "check", "fastdeploy"} <= set(commands)


def test_reader_that_goes_away() -> None:
    files = " ".join([GOOD] * 200)
    script = f"'{COMMAND}' check --rows {files} | head -n 1"
    run = subprocess.run(["bash", "-c", script], capture_output=True, check=False)  # noqa: S607
    assert run.stdout.startswith(b"ok ")
    assert b"Traceback" not in run.stderr
    assert b"BrokenPipe" not in run.stderr
