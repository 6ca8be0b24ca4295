"""Whether counts come from a distribution: Pearson's test, as a number of standard deviations."""

import numpy as np
import numpy.typing as npt

_LEAST_EXPECTED = 5.0


def misfit(tokens: npt.ArrayLike, chances: npt.NDArray[np.float64]) -> float:
    """Return how far tokens are from having been drawn with these chances, in standard deviations of a normal one.

    Cells in which little is expected are put together, and a token that has no chance is infinitely far.
    Wilson and Hilferty: the cube root of a chi-square over its degrees of freedom is nearly normal.
    """
    counts = np.bincount(np.asarray(tokens), minlength=chances.size).astype(np.float64)
    if counts[chances == 0].any():
        return float("inf")
    expected = chances * counts.sum()
    small = expected < _LEAST_EXPECTED
    counts = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = counts.size - 1
    if freedom == 0:
        return 0.0
    statistic = float(((counts - expected) ** 2 / expected).sum())
    spread = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - spread)) / np.sqrt(spread))
