"""The benchmark of several processors: it measures what it says."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scaling.__main__ import main
from benchmarks.scaling.model import fitted, predicted


def _cell(workers: int, processors: int, readers: int) -> dict[str, Any]:
    costs = {"worker": 400.0, "processor": 100.0 + 50.0 * readers, "reader": 20.0 + 30.0 * readers}
    return {
        "workers": workers,
        "processors": processors,
        "readers": readers,
        "steps_per_second": 1000.0,
        "microseconds_a_step": costs,
        "busiest": {"worker": 0.4, "processor": 0.95, "reader": 0.1},
        "rounds": [1000.0],
        "predicted": 1100.0,
        "limit": "processor",
    }


RUN: dict[str, Any] = {
    "machine": {"cpu": "one of many", "cores": "16"},
    "bus": "zeromq",
    "reading": "clients",
    "pace": 0,
    "k": 0,
    "rounds": 1,
    "seconds": 4.0,
    "model": {"worker": [400.0, 0.0], "processor": [100.0, 50.0], "reader": [20.0, 30.0]},
    "cells": [_cell(1, 1, 1), _cell(4, 2, 2), _cell(8, 4, 4)],
    "goals": [{"goal": "4 processors, times 2", "wanted": "at least 1.8", "measured": 1.9, "met": True}],
}
RECORD: dict[str, Any] = {
    "benchmark": "scaling",
    "rows": 256,
    "tokens_a_step": 768,
    "bytes_a_token": {"none": 11.4, "0": 19.4},
    "runs": [RUN],
}


@pytest.mark.parametrize(
    ("bus", "reading", "kinds"),
    [
        ("zeromq", "clients", {"worker", "processor", "reader"}),
        ("nats", "gateway", {"worker", "processor", "reader", "nats", "load"}),
    ],
)
def test_quick_run_measures_systems_of_real_processes(bus: str, reading: str, kinds: set[str], tmp_path: Path) -> None:
    """A quick run starts one processor, and then two, and has the rate and the costs of each system."""
    main(["--quick", "--bus", bus, "--reading", reading, "--json", str(tmp_path / "found")])
    (run,) = json.loads((tmp_path / "found").read_text())["runs"]
    assert (run["bus"], run["reading"], set(run["model"])) == (bus, reading, kinds)
    one, two = run["cells"]
    assert [cell["processors"] for cell in (one, two)] == [1, 2]
    for cell in (one, two):
        assert cell["steps_per_second"] > 0
        assert cell["microseconds_a_step"].keys() == cell["busiest"].keys() == kinds
        assert cell["microseconds_a_step"]["reader"] > 0  # others may take less than a tick of the clock at a pace
        assert all(cost >= 0 for cost in cell["microseconds_a_step"].values())
        assert all(0 <= share <= 1.5 for kind, share in cell["busiest"].items() if kind != "nats")


def test_page_is_drawn_from_the_records_of_runs_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --record nothing is measured: the tables, the models and the page are those of all the records' runs."""
    over_nats = RUN | {"bus": "nats", "machine": {"cpu": "another", "cores": "2"}}
    for name, run in (("one", RUN), ("two", over_nats)):
        (tmp_path / name).write_text(json.dumps(RECORD | {"runs": [run]}))
    main(["--record", str(tmp_path / "one"), str(tmp_path / "two"), "--write-docs", str(tmp_path)])
    page = (tmp_path / "scaling.md").read_text()
    assert set(capsys.readouterr().out.splitlines()) - set(page.splitlines()) == {
        "16 cores, ZeroMQ, clients",
        "2 cores, NATS, clients",
    }
    assert "## 2 cores, NATS, clients" in page
    assert len(re.findall("processor +100 [+] 50 a reader", page)) == 2
    assert "processor, 4 readers a step" in page
    assert json.loads((tmp_path / "scaling.json").read_text()) == RECORD | {"runs": [RUN, over_nats]}
    assert {path.suffix for path in tmp_path.glob("scaling.*")} == {".md", ".json", ".png", ".svg"}


def test_model_finds_the_costs_that_were_measured_and_what_limits() -> None:
    """Costs that grow with the readers are found again; the least of what each kind and the cores can do limits."""
    costs = fitted(RUN["cells"])
    assert costs["processor"] == pytest.approx((100.0, 50.0))
    assert costs["worker"] == pytest.approx((400.0, 0.0))
    steep = [{"readers": each, "microseconds_a_step": {"reader": 100.0 * each * each}} for each in (1, 2, 4)]
    assert fitted(steep)["reader"] == pytest.approx((0.0, 347.6), abs=0.1)  # no cost below nothing
    counts = {"worker": 8, "processor": 1, "reader": 4}
    found = predicted(costs, counts, cores=16)
    assert found.steps == pytest.approx(1e6 / 300)
    assert found.limit == "processor"
    assert predicted(costs, counts | {"processor": 8}, cores=64).limit == "worker"
    assert predicted(costs, counts, cores=1).limit == "cores"


@pytest.mark.parametrize("shapes", ["1/1", "1/0/1", "a/1/1", "1/1/3"])
def test_shapes_that_there_are_not(shapes: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each shape has three counts, and its requests spread evenly over its readers."""
    with pytest.raises(SystemExit, match="2"):
        main(["--shapes", shapes])
    assert f"workers/processors/readers, each at least 1, got '{shapes}'" in capsys.readouterr().err
