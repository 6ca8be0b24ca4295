"""The benchmark of attacks: it measures what it says."""

import pytest

from benchmarks.attacks.__main__ import main, page
from benchmarks.attacks.measure import Figures, Stretch


def test_figures_that_miss_their_goals_are_bold() -> None:
    """Each is compared with the stretch before the attack."""
    before, under, after = Stretch(0.5, 1000, 0, 60, 1.0), Stretch(1.4, 790, 1, 400, 2.0), Stretch(0.5, 960, 0, 60, 1.0)
    text = page([Figures("x", before, under, after)], 1, {})
    assert text.endswith("| x | **0.79** | 0.96 | 0.50 s | 1.40 s | **1** | **340 MiB** | 1.0 s | 2.0 s |\n")


@pytest.mark.xdist_group("attacks")
def test_quick_run_measures_each_system(capsys: pytest.CaptureFixture[str]) -> None:
    """A quick run starts everything, and prints a share under and after an attack on each system."""
    main(["--quick"])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    shares = [[float(each.strip("*")) for each in row[1:3]] for row in rows[-4:]]
    assert all(share > 0 for pair in shares for share in pair)
