"""The gateway's benchmark: it measures what it says."""

import pytest

from benchmarks.gateway.__main__ import main
from benchmarks.gateway.measure import Figures, quantile
from benchmarks.gateway.tables import render


def test_quantile_lies_within_its_bucket() -> None:
    """Counts in buckets are spread evenly, as Prometheus has it; without any there is none."""
    waits = {0.001: 0.0, 0.005: 50.0, 0.01: 100.0, 0.025: 100.0}
    assert quantile(waits, 0.5) == pytest.approx(0.005)
    assert quantile(waits, 0.25) == pytest.approx(0.003)
    assert quantile(waits, 0.99) == pytest.approx(0.0099)
    assert quantile({}, 0.5) == 0


def test_goals_are_compared_with_what_was_found() -> None:
    """Each goal's line says what was found, and whether that is enough."""
    text = render([
        Figures(40, 1, "k = 0", 1000.0, 0.96, 1.0, 0.5, 500.0, 4.9, 9.0),
        Figures(40, 1, "k = 20", 1000.0, 0.96, 1.0, 0.5, 7.9, 4.9, 9.0),
        Figures(40, 4, "k = 20", 3400.0, 0.96, 1.0, 2.0, 8.1, 2.9, 9.0),
    ])  # fmt: skip
    assert "| k = 0: at least 0.97 of none | 40 steps/s | 0.960 | missed |" in text
    assert "| k = 0: p50 to the socket at most 5 ms | 40 steps/s | 4.90 ms | met |" in text
    assert "| k = 20: p50 to the socket at most 3 ms | 40 steps/s | 4.90 ms | missed |" in text
    assert "| k = 20: at most 8 us a token | 40 steps/s | 7.9 us | met |" in text
    assert "| k = 20: at most 8 us a token | 40 steps/s, 4 processes | 8.1 us | missed |" in text
    assert "| k = 20: 4 processes at least 3.5 times one | 40 steps/s | 3.40 | missed |" in text


@pytest.mark.xdist_group("gateway")
def test_quick_run_measures_a_running_system(capsys: pytest.CaptureFixture[str]) -> None:
    """A quick run starts everything, and prints a rate for each mode."""
    main(["--quick"])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| 20 | ")]
    assert [row.split(" | ")[2] for row in rows] == ["none", "k = 0"]
    assert all(float(row.split(" | ")[3].replace(",", "")) > 0 for row in rows)
