"""Extra columns: values other than logprobs, for the requests that asked for such values."""

from typing import Any

import numpy as np

from tokenbus.worker.ragged import Host, Ragged, of_rows, on_host
from tokenbus.worker.step import StepArrays
from tokenbus_contracts import ContractError, Rule
from tokenbus_contracts.extras import Extra


def extra_columns(arrays: StepArrays, ragged: Ragged, scored: Host | None) -> dict[str, Host]:
    """Return each extra column that a scored row asked for, with values only for kept tokens."""
    if scored is None or (arrays.extras is arrays.given_counts is arrays.mask_bounds is None):
        return {}
    return _of_kinds(arrays, ragged, scored) | _of_given(arrays, ragged, scored) | _of_masks(arrays, ragged, scored)


def _of_kinds(arrays: StepArrays, ragged: Ragged, scored: Host) -> dict[str, Host]:
    kinds = _wanted("extras", arrays.extras, scored)
    if kinds is None:
        return {}
    columns = {"extras": kinds}
    for kind, name, values in (
        (Extra.OTHER_LOGPROB, "other_logprobs", arrays.other_logprobs),
        (Extra.ENTROPY, "entropies", arrays.entropies),
    ):
        wanted = ((kinds & kind) > 0) & (ragged.given > 0)
        if wanted.any():
            columns[name] = ragged.of(wanted).scored(name, _required(name, values))
    return columns


def _of_given(arrays: StepArrays, ragged: Ragged, scored: Host) -> dict[str, Host]:
    given = _wanted("given_counts", arrays.given_counts, scored)
    if given is None:
        return {}
    counts = given.astype(np.intp)
    per_token = np.repeat(counts, ragged.given)
    values = _flat("given_logprobs", arrays.given_logprobs, int(per_token.sum()))
    if ragged.kept is not None:
        values = values[np.repeat(ragged.kept, per_token)]
    ids = _flat("given_token_ids", arrays.given_token_ids, int(counts.sum()))
    return {"given_counts": given, "given_token_ids": ids, "given_logprobs": values}


def _of_masks(arrays: StepArrays, ragged: Ragged, scored: Host) -> dict[str, Host]:
    bounds = _wanted("mask_bounds", arrays.mask_bounds, scored)
    if bounds is None:
        return {}
    wanted = (bounds > 0) & (ragged.given > 0)
    if not wanted.any():
        return {"mask_bounds": bounds}
    sizes = Ragged(ragged.given, None, wanted).scored("mask_sizes", _required("mask_sizes", arrays.mask_sizes))
    listed = np.where(sizes <= np.repeat(bounds[wanted], ragged.given[wanted]), sizes, 0).astype(np.intp)
    ids = _flat("mask_token_ids", arrays.mask_token_ids, int(listed.sum()))
    if ragged.kept is not None:
        kept = ragged.kept[np.repeat(wanted, ragged.given)]
        sizes, ids = sizes[kept], ids[np.repeat(kept, listed)]
    return {"mask_bounds": bounds, "mask_sizes": sizes, "mask_token_ids": ids}


def _wanted(name: str, array: Any, scored: Host) -> Host | None:  # noqa: ANN401 - any framework's
    if array is None:
        return None
    wanted: Host = np.where(scored, of_rows(name, array, scored.size), 0)
    return wanted if wanted.any() else None


def _flat(name: str, array: Any, length: int) -> Host:  # noqa: ANN401 - any framework's
    host = np.zeros(0) if array is None and not length else on_host(name, _required(name, array)).reshape(-1)
    if host.size != length:
        raise ContractError(name, f"{length} elements, as the counts say", host.size, rule=Rule.LENGTH)
    return host


def _required(name: str, array: Any) -> Any:  # noqa: ANN401 - any framework's
    if array is None:
        raise ContractError(name, "an array, as some row asked for it", "none", rule=Rule.LENGTH)
    return array
