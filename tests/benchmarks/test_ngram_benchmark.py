"""The ngram engine's benchmark: it measures what it says."""

import pytest

from benchmarks.ngram.__main__ import main
from benchmarks.ngram.measure import QUICK, Case, measure
from benchmarks.ngram.tables import render


def test_quick_run_prints_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    """A quick run prints a line for each case with figures in it."""
    main(["--quick", "--steps", "3"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(lines) == 1 + len(QUICK)
    assert all(line.count("|") == 12 for line in lines)


def test_figures_add_up() -> None:
    """Every row gets a token and what was accepted; without drafts it is one, and there is no rate (case 25)."""
    found = measure(Case(8, 3, 0), 20)
    assert found.accepted is not None
    assert found.tokens_per_row == pytest.approx(1 + 3 * found.accepted)
    assert 0.3 < found.accepted < 1
    alone = measure(Case(2, 0, None), 5)
    assert (alone.tokens_per_row, alone.accepted) == (1, None)
    assert "| 2 | 0 | none | 1 | 1 |" in render([(Case(2, 0, None), alone)])


def test_wrong_steps_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A number of steps that no engine has is refused with the limit and the value."""
    with pytest.raises(SystemExit):
        main(["--steps", "-1"])
    assert "--steps: 1 to 2000, got -1" in capsys.readouterr().err
