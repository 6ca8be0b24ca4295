"""The command line: `tokenbus check`, wrong uses, help, and what standard output and error that take nothing do."""

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support import processes
from tokenbus.cli import main
from tokenbus_contracts import BatchHeader, Limits, LogprobBatch, encode

VECTORS = Path(__file__).resolve().parents[2] / "contracts" / "vectors" / "v1"
GOOD = str(VECTORS / "valid" / "mixed_scoring.binpb")
BAD = str(VECTORS / "invalid" / "nan_logprob.binpb")
COMMAND = Path(sys.executable).parent / "tokenbus"


class Run(NamedTuple):
    status: int
    out: str
    error: str

    @property
    def lines(self) -> list[str]:
        assert "Traceback" not in self.error
        return self.out.splitlines()


class Tokenbus:
    """Runs the command in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._capsys = capsys
        self._monkeypatch = monkeypatch
        self._folder = folder

    def __call__(self, *arguments: str, stdin: bytes = b"") -> Run:
        given = self._folder / "standard input"
        given.write_bytes(stdin)
        with given.open() as file:
            self._monkeypatch.setattr("sys.stdin", file)
            status = main(arguments)
        out, error = self._capsys.readouterr()
        return Run(status, out, error)


@pytest.fixture
def tokenbus(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Tokenbus:
    return Tokenbus(capsys, monkeypatch, tmp_path_factory.mktemp("cli"))


def redirected(redirection: str, *arguments: str, unbuffered: str = "") -> subprocess.CompletedProcess[bytes]:
    command = ["bash", "-c", f'exec "$0" "$@" {redirection}', str(COMMAND), *arguments]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    return subprocess.run(command, env=environment, capture_output=True, check=False)


def message(worker_id: str = "worker-0", number: int = 1) -> bytes:
    header = BatchHeader(worker_id, epoch=number, sequence=number, step=number, step_rows=0, vocabulary_size=8)
    return encode(LogprobBatch(header))


def no_constant(literal: str) -> None:
    """Refuse what Python's reader of JSON takes and JSON has not."""
    raise AssertionError(literal)


def test_files_that_hold_and_do_not(tokenbus: Tokenbus) -> None:
    run = tokenbus("check", GOOD, BAD)
    held, refused = run.lines
    assert run.status == 1
    assert held.startswith("ok ")
    assert "worker-0/1790000000000000000 sequence 41 step 40 part 1/1 TARGET, 4 rows (4 ACTIVE), 7 tokens" in held
    assert refused == f"refused  {BAD}: byte 110: logprobs[1]: a finite number, got nan"
    assert tokenbus("check", GOOD).status == 0
    wide = str(VECTORS / "invalid" / "too_many_tokens.binpb")  # what a deployment refuses by default
    assert [tokenbus("check", *limits, wide).status for limits in ((), ("--limits", "schema"))] == [1, 0]


def test_json_is_strict(tokenbus: Tokenbus, tmp_path: Path) -> None:
    (tmp_path / "\udcff").touch()
    names = [str(path) for path in sorted(VECTORS.glob("*/*.binpb"))]
    run = tokenbus("check", "--json", *names, str(tmp_path / "\udcff"))
    report: dict[str, Any] = json.loads(run.out, parse_constant=no_constant)
    assert (run.status, report["ok"]) == (1, False)
    assert [file["file"] for file in report["files"]] == [*names, f"{tmp_path}/\\udcff"]
    held, refused = (next(file for file in report["files"] if file["file"] == name) for name in (GOOD, BAD))
    assert (held["ok"], held["holds"]["tokens"]) == (True, 7)
    assert (refused["field"], refused["rule"], refused["actual"]) == ("logprobs[1]", "finite", "nan")


def test_json_keeps_64_bits(tokenbus: Tokenbus) -> None:
    """With --json every integer of 64 bits is a string: a reader that has only doubles would round it."""
    run = tokenbus("check", "--json", "-", stdin=message(number=2**63 + 1))
    holds = json.loads(run.out)["files"][0]["holds"]
    assert [holds[name] for name in ("epoch", "sequence", "step")] == [str(2**63 + 1)] * 3


@pytest.mark.nightly
def test_endless_standard_input() -> None:
    """A pipe that never ends is read no further than the limit."""
    endless = processes.run([COMMAND, "check", "-"], input=b"\0" * (Limits.default().max_message_bytes + 10))
    assert endless.returncode == 1
    assert endless.stdout.startswith(b"refused  -: byte 0: message: at most 2097152 bytes, got 20971")


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


def test_what_comes_from_outside_is_printed_escaped(tokenbus: Tokenbus) -> None:
    (line,) = tokenbus("check", "-", stdin=message("w\nok       x\x1b[2J\r\x9b\u202e")).out.split("\n")[:-1]
    assert line.startswith(r"ok       -: w\nok       x\x1b[2J\r\x9b\u202e/1 sequence 1 ")
    run = tokenbus("check", "a\nok\x1b[31m\udcff")
    assert run.out == r"refused  a\nok\x1b[31m\udcff: no such file or directory" + "\n"
    for arguments in (["x\n\x1b[2J"], ["check", GOOD, "--x\n\x1b[2J"], ["check", "--json=\n\x1b[2J", GOOD]):
        run = tokenbus(*arguments)
        assert run.status == 2
        assert "\x1b" not in run.error
        assert r"\n\x1b[2J" in run.error.splitlines()[-1]


@pytest.mark.parametrize(
    ("redirection", "unbuffered", "arguments", "why"),
    [
        (">&-", "", ["check", GOOD], "standard output is closed"),
        (">&-", "1", ["--version"], "standard output is closed"),
        ("> /dev/full", "", ["check", GOOD], "cannot write to standard output: no space left on device"),
        ("> /dev/full", "", ["--help"], "cannot write to standard output: no space left on device"),
        *((f"> /dev/full {error}", "", ["check", GOOD], "") for error in ("2>&-", "2> /dev/full")),
    ],
)
def test_output_that_cannot_be_written(redirection: str, unbuffered: str, arguments: list[str], why: str) -> None:
    run = redirected(redirection, *arguments, unbuffered=unbuffered)
    assert (run.returncode, run.stderr.decode()) == (1, f"tokenbus: {why}\n" if why else "")


def test_standard_input_that_is_closed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", None)  # as Python has it after `<&-`
    assert main(["check", "-"]) == 1
    assert capsys.readouterr().out == "refused  -: standard input is closed\n"


def test_output_without_unicode() -> None:
    environment = os.environ | {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [str(COMMAND), "check", "-"]
    run = subprocess.run(command, input=message("arbeiter-ü"), env=environment, capture_output=True, check=False)
    assert run.stdout.startswith(rb"ok       -: arbeiter-\xfc/1 ")
    assert (run.returncode, run.stderr) == (0, b"")


def test_names_that_begin_with_a_dash(tokenbus: Tokenbus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows `--` is a file, whatever it looks like; options may stand between the files before it."""
    monkeypatch.chdir(tmp_path)
    for name in ("-dash", "--json", "plain"):
        (tmp_path / name).write_bytes(message())
    run = tokenbus("check", "plain", "--limits", "schema", "plain", "--", "-dash", "plain", "--json")
    assert [line.split(":")[0].split()[1] for line in run.lines] == ["plain", "plain", "-dash", "plain", "--json"]
    assert run.status == 0
    assert tokenbus("check", "--", "-dash").lines[0].startswith("ok       -dash: ")


def test_what_is_no_message_file(tokenbus: Tokenbus, tmp_path: Path) -> None:
    empty, huge, fifo = tmp_path / "empty", tmp_path / "huge", tmp_path / "fifo"
    empty.touch()
    with huge.open("wb") as file:
        file.truncate(2**40)  # sparse: nothing is on the disk, and nothing of it may be read
    os.mkfifo(fifo)
    missing = tmp_path / "missing"
    run = tokenbus("check", *map(str, (tmp_path, missing, empty, huge, fifo)))
    assert run.status == 1
    assert run.lines == [
        f"refused  {tmp_path}: a directory, not a message file",
        f"refused  {missing}: no such file or directory",
        f"refused  {empty}: byte 0: header: a header, got none",
        f"refused  {huge}: byte 0: message: at most 2097152 bytes, got {2**40}",
        f"refused  {fifo}: no regular file",
    ]


def test_wrong_use(tokenbus: Tokenbus) -> None:
    for arguments in (
        ["check"],
        ["check", "--"],
        ["check", "--limits", "loose", GOOD],
        ["demo", "--", "-x"],
        ["chekc"],
        ["--frobnicate"],
    ):
        run = tokenbus(*arguments)
        assert run.status == 2, arguments
        assert "error: " in run.error.splitlines()[-1]


def test_reader_that_goes_away() -> None:
    files = " ".join([GOOD] * 200)
    script = f"'{COMMAND}' check {files} | head -n 1"
    run = subprocess.run(["bash", "-c", script], capture_output=True, check=False)  # noqa: S607
    assert run.stdout.startswith(b"ok ")
    assert b"Traceback" not in run.stderr
    assert b"BrokenPipe" not in run.stderr
