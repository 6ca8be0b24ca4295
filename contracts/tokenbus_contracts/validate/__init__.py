"""Whether a batch keeps the contract: every bound of the schema and every rule between columns.

Each check first asks one question of a whole column, and looks for the element to name only when the answer
is no. A valid batch of hundreds of rows is checked in some forty calls, whatever it holds.
"""

import numpy as np

from tokenbus_contracts.batch import LogprobBatch
from tokenbus_contracts.limits import Limits
from tokenbus_contracts.validate.alternatives import check_alternatives
from tokenbus_contracts.validate.header import check_header
from tokenbus_contracts.validate.rows import check_rows
from tokenbus_contracts.validate.tokens import check_tokens

__all__ = ["check_batch"]


def check_batch(batch: LogprobBatch, limits: Limits) -> None:
    """Raise the ContractError of the first rule that the batch breaks; return if it breaks none."""
    check_header(batch.header)
    with np.errstate(invalid="ignore"):  # some versions of numpy warn of a NaN that they compare
        shape = check_rows(batch, limits)
        check_tokens(batch, limits, shape)
        if shape.alternatives:
            check_alternatives(batch, limits, shape)
