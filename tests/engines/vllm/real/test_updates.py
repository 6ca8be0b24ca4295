"""The benchmark of updates: both servers load their weights again, and their streams go on."""

import json
from pathlib import Path

from benchmarks import updates


def test_updates(tmp_path: Path) -> None:
    found = tmp_path / "found"
    updates.main(["--quick", "--json", str(found)])
    figures = json.loads(found.read_text())
    assert all(row["pause"] > 0 < row["update"] for row in figures["milliseconds"])
    (ratio,) = figures["figures"]
    assert 0 < ratio["least"] <= ratio["pause"] <= ratio["most"]
