"""From vLLM's arrays to a step's: ties, minus infinity, rejected drafts, and rows that want different numbers."""

from collections import namedtuple
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tokenbus.engines.vllm.columns import UNSCORED, Rows, in_order, method_of, step_arrays
from tokenbus.worker import StepArrays, StepAssembler
from tokenbus_contracts import Limits, LogprobBatch, RowStatus, SpeculativeMethod, StepPhase, ValueKind, encode

VOCABULARY = 64
Lists = namedtuple("Lists", "logprob_token_ids logprobs sampled_token_ranks cu_num_generated_tokens")  # noqa: PYI024
"""As vLLM's LogprobsLists."""

# Two lines of a batch whose neighbour wanted five, as vLLM 0.32 gave them in bfloat16: the sampled token, then the most
# probable ones, whose ties are in any order.
IDS = np.array([[103, 16, 195, 103, 7, 9], [250, 229, 250, 391, 16, 12]])
VALUES = np.array([[-1.5, -0.5, -1.5, -1.5, -1.5, -4], [-2.0, -0.5, -2.0, -2.0, -2.0, -3]], np.float32)
RANKS = np.array([4, 4])


@dataclass
class Row:
    """What a step made of one request."""

    key: int
    position: int
    token_ids: Sequence[int] = ()
    top_k: int | None = None
    index: int = 0
    status: RowStatus = RowStatus.ACTIVE
    drafts: int = 0
    stop: int = 0


def columns(rows: Sequence[Row]) -> Rows:
    return Rows(
        request_keys=np.array([row.key for row in rows], np.uint64),
        positions=np.array([row.position for row in rows], np.uint32),
        statuses=np.array([row.status for row in rows], np.uint8),
        token_counts=np.array([len(row.token_ids) for row in rows], np.uint8),
        token_ids=np.array([token for row in rows for token in row.token_ids], np.uint32),
        draft_token_counts=np.array([row.drafts for row in rows], np.uint8),
        stops=np.array([row.stop for row in rows], np.uint8),
        top_ks=np.array([UNSCORED if row.top_k is None else row.top_k for row in rows], np.int16),
        indices=np.array([row.index for row in rows], np.intp),
    )


def made(rows: list[Row], logprobs: Any) -> StepArrays:  # noqa: ANN401 - as vLLM's
    return step_arrays(columns(rows), logprobs, method=SpeculativeMethod.NGRAM, value_kind=ValueKind.RAW_LOGPROBS)


def batch_of(rows: list[Row], logprobs: Any, vocabulary: int = VOCABULARY) -> LogprobBatch:  # noqa: ANN401 - as above
    return batch_of_arrays(made(rows, logprobs), vocabulary)


def batch_of_arrays(arrays: StepArrays, vocabulary: int = VOCABULARY) -> LogprobBatch:
    """Return a step as its publisher sends it, checked."""
    (batch,) = StepAssembler(Limits.schema(), vocabulary).assemble(arrays)
    header = batch.header._replace(worker_id="w")
    encode(LogprobBatch.of_views(header, batch.columns), Limits.schema())
    return batch


def lists(width: int, tokens: int, starts: list[int] | None = None, seed: int = 1) -> Lists:
    """Return arrays as vLLM has them: a line for each token, its values descending, coarse as bfloat16 makes them."""
    chance = np.random.default_rng(seed)
    ids, values, ranks = [], [], []
    for _ in range(tokens):
        every = -np.round(chance.exponential(size=VOCABULARY) * 4 + 0.5) / 4
        order = np.lexsort((chance.permutation(VOCABULARY), -every))
        sampled = int(chance.integers(VOCABULARY))
        ids.append([sampled, *order[:width]])
        values.append([every[sampled], *every[order[:width]]])
        ranks.append(int((every >= every[sampled]).sum()))
    return Lists(np.array(ids), np.array(values, np.float32), np.array(ranks), starts)


def test_ties_are_in_the_order_of_their_ids() -> None:
    rows = [Row(7, 0, [103], 5), Row(9, 4, [250], 5, 1)]
    batch = batch_of(rows, Lists(IDS, VALUES, RANKS, None), vocabulary=512)
    assert batch.alternative_token_ids.tolist() == [16, 7, 103, 195, 9, 229, 16, 250, 391, 12]
    assert batch.alternative_logprobs.tolist() == [-0.5, -1.5, -1.5, -1.5, -4, -0.5, -2, -2, -2, -3]
    assert batch.logprobs.tolist() == [-1.5, -2.0]
    assert batch.ranks.tolist() == [4, 4]


def test_minus_infinity_sorts_last_and_is_floored() -> None:
    nothing = -np.inf
    values = np.array([[0.0, 0.0, nothing, nothing, nothing]], np.float32)
    batch = batch_of([Row(1, 0, [5], 4)], Lists(np.array([[5, 5, 40, 12, 3]]), values, np.array([1]), None))
    assert batch.alternative_token_ids.tolist() == [5, 3, 12, 40]
    assert batch.alternative_logprobs.tolist() == [0, -9999, -9999, -9999]


@pytest.mark.parametrize(
    ("ids", "values", "ordered"),
    [
        ([[9, 4]], [[0.0, -0.0]], [[4, 9]]),  # zeros of either sign are ties
        ([[8, 2, 7], [1, 2, 3]], [[-2, -1, -2], [-1, -2, -3]], [[2, 7, 8], [1, 2, 3]]),
        ([[8, 2, 7, 1, 0]], [[2.5, 2.5, -1.0, -1.0, -3.0]], [[2, 8, 1, 7, 0]]),  # logits, above zero too
    ],
)
def test_values_in_any_order_are_sorted(ids: list[list[int]], values: list[list[float]], ordered: object) -> None:
    found, sorted_values = in_order(np.array(ids), np.array(values, np.float32), np.full(len(ids), len(ids[0])))
    assert found.tolist() == ordered
    assert sorted_values.tolist() == (-np.sort(-np.array(values, np.float32))).tolist()


def test_rows_without_tokens_say_why() -> None:
    rows = [
        Row(1, 0, top_k=3, status=RowStatus.PREFILLING),
        Row(2, 8, status=RowStatus.PREEMPTED),
        Row(3, 2, top_k=0, status=RowStatus.ABORTED),
    ]
    batch = batch_of(rows, None)
    assert batch.statuses.tolist() == [RowStatus.PREFILLING, RowStatus.PREEMPTED, RowStatus.ABORTED]
    assert batch.positions.tolist() == [0, 8, 2]
    assert batch.header.phase is StepPhase.MIXED
    assert batch.header.method is SpeculativeMethod.NGRAM


def test_wrong_arrays_are_refused() -> None:
    row = Row(1, 0, [9], 1)
    with pytest.raises(ValueError, match="of other tokens than it sampled"):
        made([row], Lists(IDS, VALUES, RANKS, None))
    with pytest.raises(ValueError, match="no logprobs for 1 requests that want them"):
        made([row], None)
    row.token_ids, row.top_k = [103], 6
    with pytest.raises(ValueError, match="5 alternatives to a request that wants 6"):
        made([row], Lists(IDS, VALUES, RANKS, None))


def test_methods_have_the_contracts_names() -> None:
    names = (None, "ngram", "ngram_gpu", "suffix", "eagle3", "deepseek_mtp", "medusa")
    methods = ["NONE", "NGRAM", "NGRAM", "SUFFIX", "EAGLE", "MTP", "DRAFT_MODEL"]
    assert [method_of(name).name for name in names] == methods
