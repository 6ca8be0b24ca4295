"""`python -m benchmarks`: which benchmarks there are, how one runs, and the page of their results."""

import json
import re
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from signal import SIGHUP, SIGTERM, Signals

import pytest

from benchmarks.__main__ import ROOT, main
from benchmarks.page import page
from benchmarks.running import Benchmark, Result, chosen, find, measure
from tests.services.cli.local import Command, children_of, environment, is_running, python

GOOD = '''\
"""Measure something: `python -m benchmarks.good`."""
import argparse, json, pathlib, sys
parser = argparse.ArgumentParser()
parser.add_argument("--quick", action="store_true")
parser.add_argument("--json", type=pathlib.Path)
parser.add_argument("--plot", type=pathlib.Path)
if __name__ == "__main__":
    options = parser.parse_args()
    print("half of it", file=sys.stderr, flush=True)
    print(f"a < b, quick {options.quick}\\n| what | us |\\n|---|---:|\\n| this | 1.5 |\\nthe end")
    goals = [{"goal": "fast", "measured": 1.23456, "met": True}, {"goal": "small", "measured": 9, "met": False}]
    options.json.write_text(json.dumps({"goals": goals, "machine": {"cpu": "<one>"}}))
    options.plot.mkdir()
    (options.plot / "good.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
'''
BROKEN = '''\
"""Measure nothing: `python -m benchmarks.broken`."""
import nothing_of_that_name
if __name__ == "__main__":
    pass
'''
ENDLESS = '''\
"""Measure forever: `python -m benchmarks.endless`."""
import subprocess, sys, time
if __name__ == "__main__" and "--help" not in sys.argv:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    print("started", file=sys.stderr, flush=True)
    time.sleep(3600)
'''
PARTLY = '''\
"""Measure what is here: `python -m benchmarks.partly`."""
import sys
if __name__ == "__main__" and "--help" not in sys.argv:
    print("what is here: 3")
    sys.exit("partly: no card")
'''.replace('sys.exit("partly: no card")', 'print("partly: no card", file=sys.stderr)\n    sys.exit(2)')


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder with a short path."""
    with tempfile.TemporaryDirectory(prefix="tb", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a checkout with benchmarks of a test's own."""
    folder = tmp_path / "benchmarks"
    (folder / "good").mkdir(parents=True)
    for name in ("__init__.py", "good/__init__.py"):
        (folder / name).touch()
    (folder / "good" / "__main__.py").write_text(GOOD)
    (folder / "broken.py").write_text(BROKEN)
    (folder / "endless.py").write_text(ENDLESS)
    (folder / "partly.py").write_text(PARTLY)
    (folder / "helper.py").write_text('"""Helps a benchmark: `python -m benchmarks.good`."""\n')
    return tmp_path


def run_one(name: str, root: Path, lines: list[str] | None = None, *, quick: bool = False) -> Result:
    """Run one of them."""
    return measure(chosen([name], find(root))[0], root, quick=quick, on_line=([] if lines is None else lines).append)


class Page(HTMLParser):
    """Notes what a page is made of."""

    def __init__(self, text: str) -> None:
        """Read a page."""
        super().__init__()
        self.cells: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note where it leads."""
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Refuse one that was not the last to be opened."""
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Note the text of a cell."""
        if "td" in self.open:
            self.cells.append(data)


def test_all_benchmarks_of_the_checkout_are_found() -> None:
    """Every package and module under benchmarks/ that can be run is found, with what it does, and nothing else."""
    found = {benchmark.name: benchmark.title for benchmark in find(ROOT)}
    assert {"bus", "codec", "ngram"} <= set(found)
    assert not {"machine", "errors", "paint", "workload"} & set(found)
    assert all(title and "`" not in title for title in found.values())


def test_one_that_runs(root: Path) -> None:
    """A benchmark is given what it offers, its progress is reported, and its tables, figures and plot are kept."""
    lines: list[str] = []
    result = run_one("good", root, lines, quick=True)
    assert (result.status, result.ran, lines) == (0, True, ["half of it"])
    assert "quick True" in result.report
    assert (result.plot or b"").startswith(b"<svg")
    assert result.verdict == "1 of 2 goals met"
    assert "quick False" in run_one("good", root).report


def test_one_that_cannot_run_says_why(root: Path) -> None:
    """What is missing is reported in its own last line."""
    result = run_one("broken", root)
    assert not result.ran
    assert result.verdict == "did not run: ModuleNotFoundError: No module named 'nothing_of_that_name'"


def test_one_that_runs_in_part_is_shown(root: Path) -> None:
    """What a benchmark could measure is kept, and beside it what it could not."""
    result = run_one("partly", root)
    assert (result.ran, result.verdict) == (True, "measured; partly: no card")


def test_page_holds_everything_and_needs_nothing(root: Path) -> None:
    """Tables become tables, the plot lies in the page, foreign text is escaped, and no address leads outside."""
    results = [run_one("good", root), run_one("broken", root)]
    text = page(results, quick=True, made="today", version="1")
    read = Page(text)
    assert read.open == ["html"] or not read.open
    assert {"this", "1.5", "fast", "1.235", "met", "small", "missed"} <= set(read.cells)
    assert "a &lt; b" in text
    assert "&lt;one&gt;" in text
    assert "their figures are rough" in text
    assert "No module named &#x27;nothing_of_that_name&#x27;" in text
    assert any(link.startswith("data:image/svg+xml;base64,") for link in read.links)
    assert all(link.startswith(("#", "data:")) for link in read.links)


def test_empty_cells_keep_their_place() -> None:
    """A table's cell that is empty, at either end too, is one, so that nothing moves under another heading."""
    report = "| | k = 0 | k = 5 |\n|---|---:|---:|\n| this | 1.5 | |\n| | | 2 |"
    text = page([Result(Benchmark("a", "b"), 0, 1, report, "")], quick=False, made="today", version="1")
    rows = re.findall(r"<tr>.*?</tr>", text)[-3:]
    cells = [re.findall(r"<t[hd]( class=\"number\")?>(.*?)</t[hd]>", row) for row in rows]
    assert [[word for _, word in row] for row in cells] == [["", "k = 0", "k = 5"], ["this", "1.5", ""], ["", "", "2"]]
    assert [bool(kind) for kind, _ in cells[0]] == [False, True, True]


def test_what_a_benchmark_prints_cannot_become_markup() -> None:
    """A name, a title, a goal and a report with markup in them are shown as they are."""
    bad = "<script>alert(1)</script>"
    record = {"goals": [{bad: bad}], "machine": {"cpu": bad}}
    text = page([Result(Benchmark(bad, bad), 1, 1, f"{bad}\n|{bad}|", bad, record)], quick=False, made=bad, version=bad)
    assert "<script" not in text


def test_real_benchmark_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m benchmarks --quick ngram` writes a page with its table, says where, and ends with status 0."""
    output = tmp_path / "bench.html"
    assert main(["--quick", "ngram", "--output", str(output)]) == 0
    assert "tokens/s" in output.read_text()
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("[1/1] ngram")
    assert said[-1] == f"the tables and plots are in {output}"


def test_json_and_status_of_failures(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --json standard output is one document, and one that did not run makes status 1."""
    monkeypatch.setattr("benchmarks.__main__.ROOT", root)
    output = str(tmp_path / "bench.html")
    assert main(["--json", "--output", output, "good", "broken"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [(each["name"], each["ran"]) for each in found] == [("good", True), ("broken", False)]
    assert found[0]["record"]["goals"][0]["goal"] == "fast"


@pytest.mark.parametrize("number", [SIGTERM, SIGHUP])
def test_signal_stops_what_runs_and_keeps_what_was_measured(root: Path, folder: Path, number: Signals) -> None:
    """SIGTERM and a terminal's end stop the benchmark and all it started; the page has those that were done before."""
    program = python(
        "import sys; from pathlib import Path; import benchmarks.__main__ as bench\n"
        f"bench.ROOT = Path({str(root)!r})\n"
        "sys.exit(bench.main(sys.argv[1:]))"
    )
    output = folder / "bench.html"
    arguments = ["good", "endless", "--output", str(output)]
    with Command(arguments, environment(folder), program) as command:
        command.line("good")

        def measuring() -> list[int]:
            """Return the benchmark's process, and the one that it started."""
            found = [pid for pid, words in children_of(command.process.pid) if "--help" not in words]
            return found + [pid for each in found for pid, _ in children_of(each)]

        command.wait_until(lambda: len(measuring()) > 1)
        running = measuring()
        command.signal(number)
        assert command.end()[0] == 130
    assert not any(map(is_running, running))
    assert "1 of 2 goals met" in output.read_text()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["steam"], "NAME: one of "),
        (["--output", "/nowhere/bench.html", "ngram"], "--output: a file in a directory that exists"),
        (["--output", "/proc/bench.html", "ngram"], "--output: /proc/bench.html: no such file or directory"),
        (["--output", "/", "ngram"], "--output: a file in a directory that exists"),
        (["--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_wrong_use(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be done is refused with status 2 and a line, before anything runs."""
    try:
        status = main(arguments)
    except SystemExit as end:  # as argparse ends
        status = int(end.code or 0)
    assert status == 2
    assert why in capsys.readouterr().err.splitlines()[-1]


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    """--list names the benchmarks and runs none, for people and for machines."""
    assert main(["--list"]) == 0
    assert "codec" in capsys.readouterr().out
    assert main(["--list", "--json"]) == 0
    assert "codec" in [each["name"] for each in json.loads(capsys.readouterr().out)]
