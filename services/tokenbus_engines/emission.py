"""Emission that engines share: what a step's batches say of the step as a whole."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from tokenbus_contracts import StepPhase
from tokenbus_services.worker import EngineStepError


def phase_of(decoding: int, prefilling: int) -> StepPhase:
    """Return the phase of a step that computes so many rows of each kind."""
    if decoding and prefilling:
        return StepPhase.MIXED
    return StepPhase.PREFILL if prefilling else StepPhase.DECODE


def batch_order(serials: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
    """Return each row's place in the order of admission, or None where the rows are in that order."""
    if (serials[1:] > serials[:-1]).all():
        return None
    places = np.empty(serials.size, np.int64)
    places[np.argsort(serials)] = np.arange(serials.size)
    return places


def raise_failed(failed: Mapping[int, Exception]) -> None:
    """Raise an EngineStepError that names the requests that failed, by their keys, if any did."""
    if failed:
        error = next(iter(failed.values()))
        raise EngineStepError(f"{type(error).__name__}: {error}", failed) from error
