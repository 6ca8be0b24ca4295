"""From vLLM's arrays to a step's: ties, minus infinity, rejected drafts, and rows that want different numbers."""

from collections import namedtuple
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tokenbus.engines.vllm.columns import UNSCORED, Rows, in_order, method_of, step_arrays
from tokenbus.worker import StepArrays, StepAssembler
from tokenbus_contracts import Limits, LogprobBatch, RowStatus, Scoring, SpeculativeMethod, StepPhase, ValueKind, encode

VOCABULARY = 64
Lists = namedtuple("Lists", "logprob_token_ids logprobs sampled_token_ranks cu_num_generated_tokens")  # noqa: PYI024
"""As vLLM's LogprobsLists."""

# Two lines of a batch whose neighbour wanted five, as vLLM 0.32 gave them in bfloat16: the sampled token, then the most
# probable ones, whose ties are in any order.
IDS = np.array([[103, 16, 195, 103, 7, 9], [250, 229, 250, 391, 16, 12]])
VALUES = np.array([[-1.5, -0.5, -1.5, -1.5, -1.5, -4], [-2.0, -0.5, -2.0, -2.0, -2.0, -3]], np.float32)
RANKS = np.array([4, 4])


@dataclass(kw_only=True)
class Row:
    """What a step made of one request."""

    key: int
    position: int
    status: RowStatus
    token_ids: Sequence[int] = ()
    top_k: int | None = None
    drafts: int = 0
    index: int = 0
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
    rows = [
        Row(key=7, position=0, status=RowStatus.ACTIVE, token_ids=[103], top_k=5, index=0),
        Row(key=9, position=4, status=RowStatus.ACTIVE, token_ids=[250], top_k=5, index=1),
    ]
    batch = batch_of(rows, Lists(IDS, VALUES, RANKS, None), vocabulary=512)
    assert batch.alternative_token_ids.tolist() == [16, 7, 103, 195, 9, 229, 16, 250, 391, 12]
    assert batch.alternative_logprobs.tolist() == [-0.5, -1.5, -1.5, -1.5, -4, -0.5, -2, -2, -2, -3]
    assert batch.logprobs.tolist() == [-1.5, -2.0]
    assert batch.ranks.tolist() == [4, 4]


def test_order_is_within_each_rows_own_number() -> None:
    """A neighbour who wants five changes nothing of a row that wants two: no alternative comes up from behind them."""
    rows = [
        Row(key=7, position=0, status=RowStatus.ACTIVE, token_ids=[103], top_k=2, index=0),
        Row(key=9, position=4, status=RowStatus.ACTIVE, token_ids=[250], top_k=5, index=1),
        Row(key=3, position=4, status=RowStatus.ACTIVE, token_ids=[5], index=2),
    ]
    batch = batch_of(rows, Lists(IDS, VALUES, RANKS, None), vocabulary=512)
    assert batch.alternative_token_ids.tolist() == [16, 195, 229, 16, 250, 391, 12]
    assert batch.top_ks.tolist() == [2, 5, 0]
    assert batch.scorings.tolist() == [Scoring.FULL, Scoring.FULL, Scoring.NONE]
    assert batch.token_ids.tolist() == [103, 250, 5]


@pytest.mark.parametrize("seed", range(20))
def test_any_lines_keep_the_contract(seed: int) -> None:
    """Rows of any number of tokens and alternatives are what a plain reading of vLLM's arrays gives, and are valid."""
    chance = np.random.default_rng(seed)
    counts, drafted = chance.integers(0, 4, 9), chance.integers(0, 3, 9)
    top_ks = [None if k > 6 else int(k) for k in chance.integers(0, 9, 9)]
    starts = np.cumsum(counts + drafted) - (counts + drafted)
    given = lists(6, int((counts + drafted).sum()), starts.tolist(), seed)
    rows = []
    for place, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        tokens = given.logprob_token_ids[start : start + count, 0].tolist()
        status = RowStatus.ACTIVE if tokens else RowStatus.IDLE
        rows.append(Row(key=place + 1, position=3, status=status, token_ids=tokens, top_k=top_ks[place], index=place))
    batch = batch_of(rows, given)
    scored = [row for row in rows if row.top_k is not None and row.token_ids]
    lines = [starts[row.index] + place for row in scored for place in range(len(row.token_ids))]
    assert batch.logprobs.tolist() == given.logprobs[lines, 0].tolist()
    assert batch.ranks.tolist() == given.sampled_token_ranks[lines].tolist()
    wanted: list[tuple[float, int]] = []
    for row in scored:
        for place in range(len(row.token_ids)):
            line = starts[row.index] + place
            mine = zip(given.logprobs[line, 1:], given.logprob_token_ids[line, 1:], strict=True)
            wanted += sorted((-float(value), int(token)) for value, token in list(mine)[: row.top_k])
    assert [(-value, token) for value, token in wanted] == list(
        zip(batch.alternative_logprobs.tolist(), batch.alternative_token_ids.tolist(), strict=True)
    )


def test_minus_infinity_sorts_last_and_is_floored() -> None:
    nothing = -np.inf
    given = Lists(
        np.array([[5, 5, 40, 12, 3]]),
        np.array([[0.0, 0.0, nothing, nothing, nothing]], np.float32),
        np.array([1]),
        None,
    )
    batch = batch_of([Row(key=1, position=0, status=RowStatus.ACTIVE, token_ids=[5], top_k=4)], given)
    assert batch.alternative_token_ids.tolist() == [5, 3, 12, 40]
    assert batch.alternative_logprobs.tolist() == [0, -9999, -9999, -9999]


def test_zeros_of_either_sign_are_ties() -> None:
    ids, values = in_order(np.array([[9, 4]]), np.array([[0.0, -0.0]], np.float32), np.array([2]))
    assert ids.tolist() == [[4, 9]]
    assert values.tolist() == [[0, 0]]


def test_values_in_any_order_are_sorted() -> None:
    ids, values = in_order(
        np.array([[8, 2, 7], [1, 2, 3]]), np.array([[-2, -1, -2], [-1, -2, -3]], np.float32), np.array([3, 3])
    )
    assert ids.tolist() == [[2, 7, 8], [1, 2, 3]]
    assert values.tolist() == [[-1, -2, -2], [-1, -2, -3]]


def test_logits_above_zero_are_sorted_too() -> None:
    given = np.array([[2.5, 2.5, -1.0, -1.0, -3.0]], np.float32)
    ids, values = in_order(np.array([[8, 2, 7, 1, 0]]), given, np.array([5]))
    assert ids.tolist() == [[2, 8, 1, 7, 0]]
    assert values.tolist() == given.tolist()


@pytest.mark.parametrize("starts", [[0, 4], None])
def test_rejected_drafts_are_left_out(starts: list[int] | None) -> None:
    given = lists(2, 8, starts)
    second = 4 if starts else 1
    first = given.logprob_token_ids[:2, 0].tolist() if starts else given.logprob_token_ids[:1, 0].tolist()
    rows = [
        Row(key=1, position=0, status=RowStatus.ACTIVE, token_ids=first, top_k=2, drafts=3, index=0),
        Row(
            key=2,
            position=6,
            status=RowStatus.FINISHED_STOP,
            token_ids=[int(given.logprob_token_ids[second, 0])],
            top_k=1,
            drafts=3,
            index=1,
        ),
    ]
    batch = batch_of(rows, given)
    lines = [*range(len(first)), second]
    assert batch.logprobs.tolist() == given.logprobs[lines, 0].tolist()
    assert batch.token_counts.tolist() == [len(first), 1]
    assert batch.draft_token_counts.tolist() == [3, 3]
    assert batch.positions.tolist() == [0, 6]


def test_rows_without_tokens_say_why() -> None:
    rows = [
        Row(key=1, position=0, status=RowStatus.PREFILLING, top_k=3),
        Row(key=2, position=8, status=RowStatus.PREEMPTED),
        Row(key=3, position=2, status=RowStatus.ABORTED, top_k=0),
    ]
    batch = batch_of(rows, None)
    assert batch.statuses.tolist() == [RowStatus.PREFILLING, RowStatus.PREEMPTED, RowStatus.ABORTED]
    assert batch.positions.tolist() == [0, 8, 2]
    assert batch.header.phase is StepPhase.MIXED
    assert batch.header.method is SpeculativeMethod.NGRAM


def test_row_says_which_stop_ended_it() -> None:
    goes_on = Row(key=1, position=0, status=RowStatus.ACTIVE, token_ids=[7])
    ended = Row(key=2, position=4, status=RowStatus.FINISHED_STOP, token_ids=[9], stop=3)
    assert [row.stop for row in batch_of([goes_on, ended], None).rows()] == [0, 3]
    assert batch_of([goes_on], None).stops.size == 0


def test_wrong_arrays_are_refused() -> None:
    row = Row(key=1, position=0, status=RowStatus.ACTIVE, token_ids=[9], top_k=1)
    with pytest.raises(ValueError, match="of other tokens than it sampled"):
        made([row], Lists(IDS, VALUES, RANKS, None))
    with pytest.raises(ValueError, match="no logprobs for 1 requests that want them"):
        made([row], None)
    row.token_ids, row.top_k = [103], 6
    with pytest.raises(ValueError, match="5 alternatives to a request that wants 6"):
        made([row], Lists(IDS, VALUES, RANKS, None))


@pytest.mark.parametrize(
    ("name", "method"),
    [
        (None, SpeculativeMethod.NONE),
        ("ngram", SpeculativeMethod.NGRAM),
        ("ngram_gpu", SpeculativeMethod.NGRAM),
        ("suffix", SpeculativeMethod.SUFFIX),
        ("eagle3", SpeculativeMethod.EAGLE),
        ("deepseek_mtp", SpeculativeMethod.MTP),
        ("medusa", SpeculativeMethod.DRAFT_MODEL),
    ],
)
def test_methods_have_the_contracts_names(name: str | None, method: SpeculativeMethod) -> None:
    assert method_of(name) is method
