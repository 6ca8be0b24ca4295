"""Which rows are the last of their request in a worker's stream."""

import numpy as np

from tokenbus_contracts import RowStatus

LEAVES = np.isin(
    np.arange(256),
    [
        int(status)
        for status in (
            *(RowStatus.FINISHED_STOP, RowStatus.FINISHED_LENGTH, RowStatus.ABORTED),
            *(RowStatus.UNRECOVERABLE, RowStatus.HANDED_OFF),
        )
    ],
)
"""By status, whether a row with it is its request's last in this stream."""
