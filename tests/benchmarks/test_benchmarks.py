"""The benchmarks: each measures what it says, through real processes, and prints it."""

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main, titles
from benchmarks.errors import NotRunError
from benchmarks.report import Report
from tests.engines.fastdeploy.kernel import skip

Tables = dict[str, list[dict[str, Any]]]
Run = Callable[..., Tables]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def measured(name: str, *arguments: str) -> Tables:
        command = import_module(f"benchmarks.{name}")
        command = command if hasattr(command, "main") else import_module(f"benchmarks.{name}.__main__")
        command.main(["--quick", "--json", str(tmp_path / "found"), *arguments])
        tables: Tables = json.loads((tmp_path / "found").read_text())
        assert tables.pop("machine")
        return tables

    return measured


def test_all_benchmarks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """Every module that can be run is named with what it does, and what helps them is not."""
    assert main(["--list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == titles()
    assert {"bus", "codec", "failover", "vllm"} <= set(found)
    assert not {"processes", "report", "workload"} & set(found)


def test_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["steam"])
    assert "NAME: one of affinity, attacks, bus, " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("ngram", ["--steps", "-1"], "--steps: 1 to 2000, got -1"),
        ("scaling.__main__", ["--shapes", "1/1/3"], "workers/processors/readers, each at least 1, got '1/1/3'"),
        ("vllm.__main__", ["--k", "none,21"], "argument --k: none, or 0 to 20, got '21'"),
    ],
)
def test_wrong_options(name: str, arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        import_module(f"benchmarks.{name}").main(arguments)
    assert why in capsys.readouterr().err


def test_report_prints_markdown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table is Markdown with a column for each key, and --json has the figures as they were measured."""
    made = Report("some_thing", "measures")
    made.parse(["--json", str(tmp_path / "found")])
    made.table([{"": "a", "us": 4.251, "a second": 12_345.6, "more": None}, {"": "b", "us": 1}])
    made.write()
    shown = capsys.readouterr().out
    assert shown.startswith("`python -m benchmarks.some_thing --json ")
    assert "\n| a   | 4.25 | 12,346   |      |\n| b   | 1    |          |      |\n" in shown
    assert json.loads((tmp_path / "found").read_text())["figures"][0]["us"] == 4.251


def test_ngram(run: Run) -> None:
    """Every row gets a token and what was accepted of its drafts; without drafts it is one, and there is no rate."""
    for row in run("ngram", "--steps", "20")["figures"]:
        assert row["tokens a row"] == pytest.approx(1 + row["drafts"] * (row["accepted"] or 0))
        assert (row["accepted"] is None) == (not row["drafts"])


def test_revision(run: Run) -> None:
    """Beside the commit that it is, the tree has its own times, the other's, and the ratios of every line."""
    try:
        codec, with_all, bus = run("revision", "HEAD").values()
    except SystemExit:
        pytest.skip("not run: there is no commit here, or nothing to build one with")
    assert len(codec) == 5 * 5
    for row in [*codec, *with_all, *bus]:
        assert row["this tree"] > 0 < row["the other"]
        assert float(row["ratio"]) > 0
    assert all(row["with"] > 0 for row in with_all)


def test_worker(run: Run) -> None:
    for row in run("worker")["figures"]:
        assert 0 < row["assemble, us"] < row["both, us"]
        assert 0 < row["to a thread, us"] < row["its process, us"]
        assert 0 < row["to a process, us"] < row["its process then, us"]
        assert row["publish, us"] > 0


def test_recording(run: Run) -> None:
    """Each k has a row for each way to write, whose times are those of its row."""
    rows = run("recording")["figures"]
    assert len(rows) == 4 * 5
    for row in rows:
        assert row["us a step"] * row["steps/s of one core"] == pytest.approx(1e6, rel=0.01)
        assert row["bytes a token"] > 4


def test_affinity(run: Run) -> None:
    (row,) = run("affinity", "--lives", "6")["figures"]
    assert 1 <= row["clients in a step"] <= 2
    assert 1 <= row["busiest worker, of the mean"] <= row["worst"] <= 1.5


def test_processor(run: Run) -> None:
    """Each k has a row for one reader and one for two, with the time of both and their ratio."""
    rows = run("processor")["figures"]
    assert [(row["k"], row["readers"]) for row in rows] == [(k, n) for k in ("none", "0", "20") for n in (1, 2)]
    assert all(0 < row["of these its event loop"] < row["us a step"] for row in rows)
    assert all((row["times one reader"] == 1) == (row["readers"] == 1) for row in rows)


@pytest.mark.xdist_group("gateway")
def test_gateway(run: Run) -> None:
    assert [(row["logprobs"], row["tokens/s"] > 0) for row in run("gateway")["figures"]] == [
        ("none", True),
        ("k = 0", True),
    ]


@pytest.mark.xdist_group("attacks")
def test_attacks(run: Run) -> None:
    rows = run("attacks")["figures"]
    assert len(rows) == 4
    assert all(row["share"] >= 0 and not row["failed"] for row in rows)  # 0 on a busy machine, in half a second


def test_storm(run: Run) -> None:
    (rows,) = run("storm").values()
    assert [row["failed"] for row in rows] == [0, 0]
    assert all(row["all are connected, s"] > 0 for row in rows)


def test_durable_log(run: Run) -> None:
    """The log's rate is beside bare nats-py's, and its writer's with one, two and four readers beside one's."""
    (bare, log), readers = run("durable_log").values()
    assert bare["a second"] > 0 < log["of bare nats-py"]
    assert len(readers) == 2 * 2 * 4
    assert all(row["per_second"] > 0 and row["writer_us"] > 0 for row in readers)
    assert all(row["rate, of one reader's"] == 1 for row in readers if row["readers"] == "1")


def test_fastdeploy(run: Run) -> None:
    try:
        rows, shares, shown = run("fastdeploy").values()
    except SystemExit:
        skip(NotRunError("no System V queue of this size, or no C compiler"))
    assert all(row["p50"] > 0 < row["steps"] for row in rows)
    assert shares[0]["p50"] > 0
    assert all(row["its process, us"] > 0 < row["to a process: of its own, us"] for row in shown)


def test_vllm_rows(run: Run) -> None:
    """Each row has its token, or those that were accepted of its drafts, in every case."""
    rows = run("vllm_rows")["figures"]
    assert all(row["us"] > 0 and row["tokens"] >= 256 for row in rows)
    assert [row["tokens"] > 256 for row in rows if "drafts" in row["a step of 256 rows"]] == [True]


def test_prompt_scores(run: Run) -> None:
    rows = run("prompt_scores")["figures"]
    assert [row["parts"] for row in rows if row["k"] == 20] == [5, 5]  # a first one, and four of 170 positions
    assert all(0 < row["the longest, ms"] <= row["all of them, ms"] for row in rows)


@pytest.mark.parametrize(("bus", "reading", "kinds"), [("zeromq", "clients", 3), ("nats", "gateway", 5)])
def test_scaling(run: Run, bus: str, reading: str, kinds: int) -> None:
    """A quick run starts one processor, and then two, and has the rate and the costs of each system."""
    systems, on_paper = run("scaling", "--bus", bus, "--reading", reading).values()
    assert [(row["processor"], row["steps/s"] > 0) for row in systems] == [(1, True), (2, True)]
    assert sum(name.endswith(", us a step") for name in systems[0]) == kinds
    assert all(row["reader, us a step"] > 0 for row in systems)
    assert [row["k"] for row in on_paper] == ["none", 0, 5, 20]


def test_failover(run: Run) -> None:
    (rows,) = run("failover", "--how", "kill", "node", "node-stop", "--workers", "1", "--requests", "2").values()
    assert [row["who waits"] for row in rows] == ["client", "client", "new requests", "client", "new requests"]
    assert all(row["worst, s"] > 0 for row in rows)


def test_gpu_ops_without_a_card(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    (twin, *_) = run("gpu_ops").values()
    assert all(row["twin"] > 0 and row["numpy"] > 0 for row in twin)
    assert "On a card: " in capsys.readouterr().out


def test_testing(run: Run) -> None:
    found = run("testing")
    assert all(row["ms"] > 0 for row in found["figures"])
    assert [row["s"] > 0 for row in found["commands"]] == [True] * 3
