"""A service that starts: what counts as a sign that it does something, and what is shown of one that failed."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE

import pytest

from tests.cli.test_local import plan
from tokenbus.cli.errors import CommandError
from tokenbus.cli.starting import Output, SignsOfLife
from tokenbus.cli.supervisor import Child, News

NO_SESSION = 2**31 - 1
_COMPUTES = """
import sys, time
sys.stdin.readline()
while time.process_time() < 0.3:
    pass
print("computed", flush=True)
sys.stdin.readline()
"""


def test_line_is_a_sign() -> None:
    signs = SignsOfLife(NO_SESSION, 0.0)
    assert [signs.seen(lines, now) for lines, now in ((0, 1.0), (1, 2.0), (1, 3.0), (3, 4.0))] == [False, True] * 2


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="the system does not say what processes use")
def test_what_a_process_computes_is_a_sign() -> None:
    """A twentieth of a processor is; how much there was since the last look counts, not since the beginning."""
    command = [sys.executable, "-c", _COMPUTES]
    with subprocess.Popen(command, start_new_session=True, stdin=PIPE, stdout=PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        signs = SignsOfLife(process.pid, 0.0)
        process.stdin.write(b"compute\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"computed\n"
        assert signs.seen(0, 2.0)
        assert not signs.seen(0, 1e9)


def test_end_of_a_process_hides_no_work_of_the_others(tmp_path: Path) -> None:
    """Nor does a later process of the same number, which has used less."""

    def use(pid: int, since: int, ticks: int, read: int) -> None:
        fields = ["S", "1", "1", "77", *["0"] * 7, str(ticks), *["0"] * 7, str(since)]
        (tmp_path / str(pid)).mkdir(exist_ok=True)
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a) b) {' '.join(fields)}\n")
        (tmp_path / str(pid) / "io").write_text(f"rchar: 1\nread_bytes: {read}\n")

    use(77, 5, 100, 0)
    use(78, 6, 90_000, 10**12)
    signs = SignsOfLife(77, 0.0, tmp_path)
    shutil.rmtree(tmp_path / "78")
    use(77, 5, 200, 0)
    assert signs.seen(0, 1.0)
    assert not signs.seen(0, 2.0)
    use(77, 5, 200, 2_000_000)
    assert signs.seen(0, 3.0)
    use(77, 9, 100, 0)
    assert signs.seen(0, 4.0)
    assert not signs.seen(0, 5.0)


def test_output_is_shown_from_the_first_error() -> None:
    output = Output()
    assert output.take() == []
    for line in ["one", "", "two"]:
        output.add(line)
    assert output.take() == ["one", "two"]
    said = [f"line {number}" for number in range(300)]
    said[5] = said[9] = "(EngineCore pid=7) ERROR 11-27 12:00:00 [core.py:1] ValueError: no memory"
    said[6] = "torch.OutOfMemoryError: so many bytes"
    for line in said:
        output.add(line)
    assert output.take() == [said[5], said[6], "...", *said[-40:]]
    assert output.take() == []


async def test_service_that_fails_shows_what_it_wrote(folder: Path) -> None:
    told: list[News] = []
    child = Child(replace(plan(folder).services[0], arguments=("processor", "--no-such")), told.append)
    await child.start(folder)
    with pytest.raises(CommandError, match=r"^processor: ended with status 2 before it was ready: .*--no-such"):
        await child.ready(60)
    (shown,) = [news for news in told if news.event == "output"]
    assert "--no-such" in shown.text
    assert shown.values["lines"] == shown.text.splitlines()
