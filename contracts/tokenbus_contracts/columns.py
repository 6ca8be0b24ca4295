"""Ragged columns: which elements of a column belong to which rows."""

import numpy as np
import numpy.typing as npt

Index = npt.NDArray[np.intp]


def starts_of(counts: npt.NDArray[np.unsignedinteger | np.signedinteger]) -> Index:
    """Return where each row's elements begin, and after the last row where all of them end."""
    starts = np.zeros(counts.size + 1, np.intp)
    np.add.accumulate(counts, dtype=np.intp, out=starts[1:])
    return starts


def elements_of(rows: Index, counts: Index, starts: Index) -> Index:
    """Return the indices of all elements of some rows, in the order in which the rows are named."""
    lengths = counts[rows]
    # Each row's run is a range of its own: shift one long range by where each row begins in both.
    shift = starts[:-1][rows] - starts_of(lengths)[:-1]
    return np.arange(lengths.sum(), dtype=np.intp) + np.repeat(shift, lengths)
