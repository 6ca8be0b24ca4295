"""The benchmark of attacks: it measures what it says."""

import pytest

from benchmarks.attacks.__main__ import main
from benchmarks.attacks.measure import Figures, Stretch
from benchmarks.attacks.tables import render


def test_goals_are_compared_with_what_was_found() -> None:
    """Each goal's line says what was found above the control, and whether that is little enough."""
    text = render([Figures("x", Stretch(0.5, 1000, 0, 60, 1.0), Stretch(1.4, 900, 1, 400, 2.0))])
    assert "| at most 1 s longer | x | 0.90 s | met |" in text
    assert "| at most 256 MiB more | x | 340 MiB | missed |" in text
    assert "| no request fails | x | 1 | missed |" in text


@pytest.mark.xdist_group("attacks")
def test_quick_run_measures_a_running_system(capsys: pytest.CaptureFixture[str]) -> None:
    """A quick run starts everything, and prints a rate with and without each attack."""
    main(["--quick"])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if " tokens/s" not in line]
    rates = [
        [float(each.replace(",", "")) for each in row[3:5]] for row in rows if len(row) == 10 and "---" not in row[0]
    ]
    assert len(rates) == 2
    assert all(rate > 0 for pair in rates for rate in pair)
