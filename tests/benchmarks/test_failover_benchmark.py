"""The benchmark of failover: it measures what it says."""

import json
from pathlib import Path

import pytest

from benchmarks.scaling.failover.__main__ import main

RUN = {
    "machine": {"cpu": "one of many", "cores": "16"},
    "workers": 2,
    "requests": 8,
    "busy": 0,
    "ways": [
        {"how": "kill", "seen_by": "client", "seconds": [0.6, 0.5, 2.5]},
        {"how": "leader", "seen_by": "client", "seconds": [3.0, 4.0]},
        {"how": "leader", "seen_by": "reader of the log", "seconds": [6.0, 7.0]},
    ],
}


def test_requests_go_on_after_a_processor_was_killed_and_a_server_went(tmp_path: Path) -> None:
    """A killed processor, and the NATS server that all processes are connected to, cost each a pause that ends."""
    ways = ["kill", "node", "node-stop"]
    main(["--how", *ways, "--rounds", "1", "--workers", "1", "--requests", "2", "--json", f"{tmp_path}/found"])
    (run,) = json.loads((tmp_path / "found").read_text())["runs"]
    assert [(way["how"], way["seen_by"], len(way["seconds"])) for way in run["ways"]] == [
        ("kill", "client", 1),
        ("node", "client", 1),
        ("node", "new requests", 1),
        ("node-stop", "client", 1),
        ("node-stop", "new requests", 1),
    ]
    assert all(way["seconds"][0] > 0 for way in run["ways"])


def test_page_has_the_runs_of_all_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --record nothing is measured: the runs of all files are in one table, idle ones beside the goals."""
    for name, busy in (("idle", 0), ("busy", 14)):
        (tmp_path / name).write_text(json.dumps({"runs": [RUN | {"busy": busy}]}))
    main(["--record", f"{tmp_path}/idle", f"{tmp_path}/busy", "--write-docs", str(tmp_path)])
    printed = capsys.readouterr().out
    assert printed in (tmp_path / "failover.md").read_text()
    kill, leader, reader, *others = [line for line in printed.splitlines() if "killed" in line]
    assert kill.endswith("at most 2: missed")
    assert leader.endswith("at most 5: met")
    assert reader.endswith("at most 5: missed")
    assert reader.split()[-6:-4] == ["6.50", "7.00"]
    assert all(" 14 " in line and "at most" not in line for line in others)
    assert [run["busy"] for run in json.loads((tmp_path / "failover.json").read_text())["runs"]] == [0, 14]
