"""The benchmark of the durable log: it measures what it says."""

import json
from pathlib import Path

import pytest

from benchmarks.durable_log.__main__ import main


def test_quick_run_measures_the_log_and_its_readers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A quick run has the rates of bare nats-py and of the log, and what one, two and four readers cost its writer."""
    main(["--quick", "--json", str(tmp_path / "found")])
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "found").read_text())
    assert all(rate > 0 for name in ("bare", "log") for rate in found[name]["per_second"])
    assert found["log"]["items_a_message"] >= 1
    assert {(each["replicas"], each["pace"], each["readers"]) for each in found["readers"]} == {
        (replicas, pace, readers) for replicas in (1, 3) for pace in (0, 300) for readers in ("1", "1 again", "2", "4")
    }
    assert all(each["per_second"] > 0 and each["writer_us"] > 0 for each in found["readers"])
    assert all(each["rate_of_one"] == [1.0] for each in found["readers"] if each["readers"] == "1")
    assert len(found["goals"]) == 1 + 2 * 4
    main(["--record", str(tmp_path / "found"), "--write-docs", str(tmp_path)])
    assert capsys.readouterr().out == printed
    assert printed in (tmp_path / "durable-log.md").read_text()
