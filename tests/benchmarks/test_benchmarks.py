"""The benchmarks: each measures what it says, through real processes, and prints it."""

import gc
import json
import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from benchmarks.errors import NotRunError
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


@pytest.mark.nightly
def test_codec(run: Run) -> None:
    """A run has every peer that is there, and leaves cores, IPC namespace and garbage collection as they were."""

    def state() -> list[object]:
        return [os.sched_getaffinity(0), Path("/proc/self/ns/ipc").readlink(), gc.isenabled()]

    before = state()
    times, _ = run("codec", "--turns", "1").values()
    assert state() == before
    assert {row["peer"] for row in times} >= {"Tokenbus", "Tokenbus + ZeroMQ", "FastDeploy pickle", "protobuf classes"}


def test_sessions(run: Run) -> None:
    rows, (processor_seconds, _) = run("sessions").values()
    assert processor_seconds["with"] > 0 < processor_seconds["without"]
    assert [row["logprobs"] for row in rows] == ["none", "k = 0", "k = 20"]
    assert all(row["tokens/s"] > 0 for row in rows)


@pytest.mark.nightly
def test_bus(run: Run) -> None:
    (rows,) = run("bus").values()
    assert {row[""] for row in rows} >= {"Tokenbus", "Tokenbus, remote client", "limit: raw ZeroMQ"}
    assert all(row["p50 us"] > 0 < row["steps/s"] for row in rows)


@pytest.mark.nightly
def test_revision(run: Run) -> None:
    """Beside the commit that it is, the tree has its own times, the other's, and the ratios of every line."""
    try:
        codec, bus = run("revision", "HEAD").values()
    except SystemExit:
        pytest.skip("not run: there is no commit here, or nothing to build one with")
    assert len(codec) == 5 * 5
    for row in [*codec, *bus]:
        assert row["this tree"] > 0 < row["the other"]
        assert float(row["ratio"]) > 0


@pytest.mark.nightly
def test_gateway(run: Run) -> None:
    assert [(row["logprobs"], row["tokens/s"] > 0) for row in run("gateway")["figures"]] == [
        ("none", True),
        ("k = 0", True),
    ]


@pytest.mark.nightly
def test_fastdeploy(run: Run) -> None:
    try:
        rows, shares = run("fastdeploy").values()
    except SystemExit:
        skip(NotRunError("no System V queue of this size, or no C compiler"))
    assert all(row["p50"] > 0 < row["steps"] for row in rows)
    assert shares[0]["p50"] > 0


def test_vllm_rows(run: Run) -> None:
    """Each row has its token, or those that were accepted of its drafts, in every case."""
    rows = run("vllm_rows")["figures"]
    assert all(row["us"] > 0 and row["tokens"] >= 256 for row in rows)
    assert [row["tokens"] > 256 for row in rows if "drafts" in row["a step of 256 rows"]] == [True]


@pytest.mark.nightly
def test_scaling(run: Run) -> None:
    """A quick run starts one processor, and then two, and has the rate and the costs of each system."""
    systems = run("scaling")["figures"]
    assert [(row["processor"], row["steps/s"] > 0) for row in systems] == [(1, True), (2, True)]
    assert all(row[f"{kind}, us a step"] > 0 for row in systems for kind in ("worker", "processor", "reader"))


def test_gpu_ops_without_a_card(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    (twin, *_) = run("gpu_ops").values()
    assert all(row["twin"] > 0 and row["numpy"] > 0 for row in twin)
    assert "On a card: " in capsys.readouterr().out
