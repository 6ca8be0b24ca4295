"""Which rows are the last of their request in a worker's stream."""

import numpy as np

from tokenbus_contracts import RowStatus
from tokenbus_services.delivery.tokens import FINISHED

LEAVES = np.isin(np.arange(256), [int(status) for status in (*FINISHED, RowStatus.HANDED_OFF)])
"""By status, whether a row with it is its request's last in this stream."""
