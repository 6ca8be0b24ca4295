"""The output elements that FastDeploy leaves undefined: one mask for each save op. Only these are not compared.

A mask is a list of (output, indices). In FastDeploy such an element has a value of an earlier message, or of memory
beside a tensor; in the drop-in it is -1, 0 or untouched.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.engines.fastdeploy.theirs import PACKS_FLAG

SLOTS, SPECULATIVE_SLOTS, TOKENS, COLUMNS = 512, 256, 6, 21
Array = np.ndarray[Any, np.dtype[Any]]
Given = Mapping[str, Any]
Mask = list[tuple[int, Array]]
_FIELDS = 2


def flat(array: Any) -> Array:  # noqa: ANN401 - an array, or a list
    found: Array = np.asarray(array).reshape(-1)
    return found


def undefined(form: str, op: str, given: Given, k: int = 20) -> Mask:
    """Return the mask of what a save op is given, in a form, where the get op is called with `k`."""
    match op:
        case "speculate_save_output_topk":
            return _speculated_topk(form, given, k)
        case "mtp_save_first_token_with_topk":
            return _first_topk(form, given, k)
        case "speculate_save_output":
            return _speculated(given)
        case "mtp_save_first_token":
            return _first(given)
        case _:  # save_output_topk and save_output define all that is got
            return []


def _speculated_topk(form: str, given: Given, k: int) -> Mask:
    """Forms before #7883 read lines of 21 columns: of narrower lines only the token's own id is where they look."""
    slots, at = entries(_sent_counts(given, flat(given["token_num_per_batch"])))
    return _narrow(form, given, k, slots * TOKENS + at)


def _first_topk(form: str, given: Given, k: int) -> Mask:
    """A draft behind a first token has an id alone, and a negative count is one more: -3 is -2, at which requests hang.

    The first token itself is as any other's.
    """
    counts = flat(given["token_num_per_batch"])
    sent = _sent_counts(given, counts)
    negative = np.flatnonzero((sent < 0) & ~_is_preempted(given, counts.size))
    slots, at = entries(np.where(sent > 0, sent + 1, 0))
    places = slots * TOKENS + at
    drafts = places[at > 0]
    wide = given["logprob_token_ids"].shape[1] if form in PACKS_FLAG else k + 1
    lines = drafts[:, None] * COLUMNS + np.arange(wide)
    return [
        *_narrow(form, given, k, places[at == 0]),
        (0, 3 + negative),
        (0, 3 + SLOTS + lines[:, 1:].reshape(-1)),
        (1, lines.reshape(-1)),
        (2, drafts),
    ]


def _speculated(given: Given) -> Mask:
    """All six places of a slot are copied, however many tokens it has."""
    numbers = flat(given["accept_num"])
    counts = np.full(SPECULATIVE_SLOTS, TOKENS)  # behind the last slot all is 0, and is compared
    counts[: numbers.size] = _sent_counts(given, numbers)
    return [(0, _tokens_beyond(counts))]


def _first(given: Given) -> Mask:
    """A slot beyond its first step, and those behind the last one, have what an earlier message had, also as count."""
    steps = flat(given["step_idx"])
    counts = np.full(SPECULATIVE_SLOTS, -1)
    counts[: steps.size] = np.where(steps == 1, 2, np.where(steps == 0, 0, -1))
    counts[: steps.size][_is_chunk(given, steps.size)] = 0
    return [(0, _FIELDS + np.flatnonzero(counts < 0)), (0, _tokens_beyond(counts))]


def _narrow(form: str, given: Given, k: int, places: Array) -> Mask:
    columns = given["logprob_token_ids"].shape[1]
    if form in PACKS_FLAG or columns >= COLUMNS:
        return []
    lines = places[:, None] * COLUMNS + np.arange(min(columns, k + 1))
    return [(0, 3 + SLOTS + lines[:, 1:].reshape(-1)), (1, lines.reshape(-1))]


def _tokens_beyond(counts: Array) -> Array:
    places = np.broadcast_to(np.arange(TOKENS), (SPECULATIVE_SLOTS, TOKENS))
    return _FIELDS + SPECULATIVE_SLOTS + np.flatnonzero(places >= counts[:, None])


def entries(counts: Array) -> tuple[Array, Array]:
    own = np.maximum(counts, 0)
    slots = np.repeat(np.arange(own.size), own)
    return slots, np.arange(slots.size) - np.repeat(np.cumsum(own) - own, own)


def _is_chunk(given: Given, slots: int) -> Array:
    if "seq_lens_decoder" not in given or not given.get("skip_chunk_prefill", True):
        return np.zeros(slots, np.bool_)
    found: Array = flat(given["seq_lens_decoder"])[:slots] < flat(given["prompt_lens"])[:slots]
    return found


def _is_preempted(given: Given, slots: int) -> Array:
    found: Array = flat(given.get("preempted_idx", np.zeros(slots)))[:slots] == 1
    return found


def _sent_counts(given: Given, counts: Array) -> Array:
    return np.where(_is_preempted(given, counts.size), -9, np.where(_is_chunk(given, counts.size), 0, counts))
