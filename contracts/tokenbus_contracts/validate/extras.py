"""Checks of the extra columns: whether the row's scoring permits a value, lengths, bounds and order."""

import numpy as np
import numpy.typing as npt

from tokenbus_contracts.batch import LogprobBatch
from tokenbus_contracts.errors import ContractError, Rule
from tokenbus_contracts.extras import Extra
from tokenbus_contracts.generated.enums import Scoring
from tokenbus_contracts.limits import Limits
from tokenbus_contracts.schema import COLUMN
from tokenbus_contracts.validate.rows import check_length, check_range, check_zero
from tokenbus_contracts.validate.tokens import ceiling, highest_token_id, refuse_value

_ROW_COLUMNS = ("extras", "given_counts", "mask_bounds")
_LARGEST = float(np.finfo(np.float32).max)
_SIZES = COLUMN["mask_sizes"]


def check_extras(batch: LogprobBatch, limits: Limits) -> None:
    rows = batch.row_count
    for name in _ROW_COLUMNS:
        asked = getattr(batch, name)
        if asked.size:
            check_length(name, asked, rows, "one for each row, or none")
            check_range(name, asked, COLUMN[name].max)
            is_forbidden = batch.scorings == Scoring.NONE if name == "extras" else batch.scorings != Scoring.FULL
            check_zero(batch, name, is_forbidden)
    counts, nothing = batch.token_counts.astype(np.intp), np.zeros(rows, np.intp)
    extras, given, bounds = (
        getattr(batch, name).astype(np.intp) if getattr(batch, name).size else nothing for name in _ROW_COLUMNS
    )
    other, entropies = (counts[(extras & extra) > 0].sum() for extra in Extra)
    check_length("other_logprobs", batch.other_logprobs, int(other), "one for each token whose row has 1 in extras")
    check_length("entropies", batch.entropies, int(entropies), "one for each token whose row has 2 in extras")
    check_length("given_token_ids", batch.given_token_ids, int(given.sum()), "as given_counts says")
    wanted = int((counts * given).sum())
    check_length("given_logprobs", batch.given_logprobs, wanted, "one for each token and given token of its row")
    masked = int(counts[bounds > 0].sum())
    check_length("mask_sizes", batch.mask_sizes, masked, "one for each token whose row has a mask_bound")
    highest = highest_token_id(batch, limits)
    for name, least, most in (
        ("other_logprobs", -_LARGEST, ceiling(batch)),
        ("entropies", 0.0, _LARGEST),
        ("given_logprobs", -_LARGEST, ceiling(batch)),
    ):
        values = getattr(batch, name)
        # NaN fails both comparisons.
        if values.size and not (np.maximum.reduce(values) <= most and np.minimum.reduce(values) >= least):
            refuse_value(name, values, most, least)
    check_range("given_token_ids", batch.given_token_ids, highest)
    _check_masks(batch, np.repeat(bounds, counts * (bounds > 0)), highest)


def _check_masks(batch: LogprobBatch, bounds: npt.NDArray[np.intp], highest: int) -> None:
    """Check the sizes of masks and the listed ids. `bounds[i]` is the mask_bound of the row of mask i."""
    sizes, ids = batch.mask_sizes, batch.mask_token_ids
    check_range("mask_sizes", sizes, batch.header.vocabulary_size or _SIZES.max, _SIZES.min)
    told = np.where(sizes <= bounds, sizes, 0).astype(np.intp)
    check_length("mask_token_ids", ids, int(told.sum()), "those of the masks up to their row's mask_bound")
    check_range("mask_token_ids", ids, highest)
    rises = ids[1:] > ids[:-1]
    ends = np.add.accumulate(told)
    rises[ends[(ends > 0) & (ends < ids.size)] - 1] = True  # the next mask may begin with a lower id
    if not rises.all():
        element = int(rises.argmin()) + 1
        limit = f"above {int(ids[element - 1])}, the one before it"
        raise ContractError(f"mask_token_ids[{element}]", limit, int(ids[element]), rule=Rule.ORDER)
