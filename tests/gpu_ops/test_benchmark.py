"""The benchmark's own parts that need no card: its goals, its page, and the twin's times."""

import json
from pathlib import Path

import pytest

from benchmarks.gpu_ops import on_cpu
from benchmarks.gpu_ops.__main__ import main
from benchmarks.gpu_ops.cases import Case
from benchmarks.gpu_ops.goals import goals_of
from benchmarks.gpu_ops.tables import render
from benchmarks.paint import Paint

DOCS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"


def test_the_page_is_what_the_figures_say(tmp_path: Path) -> None:
    """The committed page is the committed record's, and so are its goals."""
    record = json.loads((DOCS / "gpu-ops.json").read_text())
    assert record["goals"] == goals_of(record)
    main(["--record", str(DOCS / "gpu-ops.json"), "--write-docs", str(tmp_path)])
    assert (tmp_path / "gpu-ops.md").read_text() == (DOCS / "gpu-ops.md").read_text()
    assert (tmp_path / "gpu-ops.png").stat().st_size > 0


def test_a_goal_is_as_good_as_its_worst_size() -> None:
    """One size above the limit is a goal missed, with that size's figure."""
    results = [
        {"dtype": "bfloat16", "kind": "random", "rows": rows, "top_k": 0, "floor_us": 10.0, "kernel_us": taken}
        for rows, taken in ((256, 12.0), (1536, 13.5), (1, 26.0))
    ]
    goals = {goal["goal"]: goal for goal in goals_of({"results": results, "host": {"rows 256, k = 0": 31.0}})}
    many = goals["k = 0, random, from 256 rows: times the floor"]
    assert (many["measured"], many["met"]) == (1.35, False)
    assert not goals["1 row, every k and kind: microseconds"]["met"]
    assert not goals["host, rows all alike: microseconds a call"]["met"]


def test_the_floor_is_the_bytes_of_the_logits() -> None:
    """256 rows of bfloat16 take eighteen microseconds to read at the goals' bandwidth."""
    assert Case("bfloat16", "random", 256, 0).floor_us == pytest.approx(18.09, abs=0.01)


def test_the_twin_is_timed_and_a_missing_card_is_told() -> None:
    """Without a card the report has the twin's times, and says why it has no others."""
    times = on_cpu.measure((1,))
    record = {"card": "not run: there is no CUDA card", "cpu": times, "cpu_name": "cpu", "numpy": "2"}
    assert "not run: there is no CUDA card" in render(record, Paint(colour=False))
    assert [result["twin_us"] > 0 for result in times] == [True, True]
