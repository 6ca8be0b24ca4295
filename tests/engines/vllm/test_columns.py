"""From vLLM's arrays, or `token_logprobs`' columns, to a step's: ties, and rows that want different numbers."""

import pickle
from collections import namedtuple
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tokenbus.engines.vllm.columns import UNSCORED, Rows, add_masks, in_order, method_of, step_arrays
from tokenbus.engines.vllm.configuration import check_token_scores
from tokenbus.engines.vllm.token_scores import token_scores
from tokenbus.worker import StepArrays, StepAssembler
from tokenbus_contracts import Limits, LogprobBatch, RowStatus, SpeculativeMethod, StepPhase, ValueKind, encode
from tokenbus_gpu_ops import token_logprobs

VOCABULARY = 64
Lists = namedtuple("Lists", "logprob_token_ids logprobs sampled_token_ranks cu_num_generated_tokens")  # noqa: PYI024
"""As vLLM's LogprobsLists."""
MaskLists = namedtuple("MaskLists", "token_ids offsets cu_num_generated_tokens")  # noqa: PYI024
"""As vLLM's SamplingMaskLists."""

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
        request_ids=np.array([row.key for row in rows], np.uint64),
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


def mask_lists(masks: list[list[int]], starts: list[int] | None = None) -> MaskLists:
    """Return masks as vLLM has them: the ids of each in order, one after the other."""
    ids = np.array([token_id for mask in masks for token_id in mask], np.int32)
    return MaskLists(ids, np.cumsum([0, *map(len, masks)]), starts)


def with_masks(rows: list[Row], logprobs: Any, masks: MaskLists) -> list[tuple[list[int], list[list[int] | None]]]:  # noqa: ANN401
    """Return the sizes of each row's masks and the masks, as a reader of the messages has them."""
    step = made(rows, logprobs)
    add_masks(step, columns(rows), masks)
    found = []
    for batch in StepAssembler(Limits.default(), 2**20).assemble(step):
        encode(LogprobBatch.of_views(batch.header._replace(worker_id="w"), batch.columns), Limits.default())
        for row in batch.rows():
            sizes = [] if row.extras is None else row.extras.mask_sizes.tolist()
            masks_of_row = [] if row.extras is None else row.extras.masks()
            found.append((sizes, [None if mask is None else mask.tolist() for mask in masks_of_row]))
    return found


def test_masks_belong_to_their_tokens() -> None:
    """Each request has a line in vLLM, even without a token; a mask above the bound has its size alone."""
    scores = lists(2, 4)
    tokens = scores.logprob_token_ids[:, 0].tolist()
    rows = [
        Row(1, 0, tokens[2:3], 0, 2),
        Row(2, 0, (), 0, 1, RowStatus.PREFILLING),
        Row(3, 5, tokens[:1], 2, 0),
        Row(4, 0, tokens[3:], 0, 3),
    ]
    masks = mask_lists([[1, 5, 9], [], [7], list(range(1025))])
    assert with_masks(rows, scores, masks) == [([1], [[7]]), ([], []), ([3], [[1, 5, 9]]), ([1025], [None])]


def test_masks_of_verified_drafts() -> None:
    """Of rejected drafts vLLM has logprobs but no masks; a stop string may keep fewer tokens than there are masks."""
    scores = lists(2, 6, starts=[0, 3])
    tokens = scores.logprob_token_ids[:, 0].tolist()
    rows = [Row(1, 0, tokens[3:4], 0, 1), Row(2, 0, tokens[:2], 0, 0)]
    masks = mask_lists([[1], [2, 3], [4, 5], [6]], starts=[0, 2, 4])
    assert with_masks(rows, scores, masks) == [([2], [[4, 5]]), ([1, 2], [[1], [2, 3]])]


def test_too_few_masks_are_refused() -> None:
    scores = lists(2, 2)
    rows = [Row(1, 0, scores.logprob_token_ids[1:, 0].tolist(), 0, 1)]
    with pytest.raises(ValueError, match=r"^vLLM gave 1 sampling masks, but token 1 wants one$"):
        with_masks(rows, scores, mask_lists([[1]]))


def test_step_without_tokens_has_no_masks() -> None:
    rows = [Row(2, 0, (), 0, 1, RowStatus.PREFILLING)]
    assert with_masks(rows, None, mask_lists([])) == [([], [])]


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
    with pytest.raises(ValueError, match="do not belong to the sampled tokens"):
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


@pytest.mark.parametrize("seed", range(5))
def test_rows_have_what_they_asked_for(seed: int) -> None:
    """Rows of any number of tokens that ask for anything: what a call for each row alone says of its tokens."""
    chance = np.random.default_rng(seed)
    requests, each, top_k = 9, 3, 4
    own, other = chance.normal(size=(2, requests * each, VOCABULARY)).astype(np.float32)
    other[chance.random(other.shape) < 0.8] = -np.inf
    other[:, 0] = 1.0
    tokens = chance.integers(0, VOCABULARY, requests * each)
    bounds = chance.choice([0, 0, 10, 40], requests)
    given = [chance.permutation(VOCABULARY)[:size].tolist() for size in chance.choice([0, 0, 1, 5], requests)]
    asked: dict[str, Any] = {
        "other_logprobs": chance.random(requests) < 0.5,
        "entropies": chance.random(requests) < 0.5,
        "mask_bounds": bounds,
    }
    found = token_logprobs(
        own,
        tokens,
        top_k,
        token_counts=np.full(requests, each),
        other_logits=other,
        given_token_ids=np.array([token_id for ids in given for token_id in ids], np.int64),
        given_counts=[len(ids) for ids in given],
        **asked,
    )
    counts = chance.integers(0, each + 1, requests)
    top_ks = [None if k > top_k else int(k) for k in chance.integers(0, top_k + 3, requests)]
    kept = (np.arange(each) < counts[:, None]).reshape(-1)
    starts = (np.cumsum(counts) - counts).tolist()
    scores = pickle.loads(pickle.dumps(token_scores(found, kept, starts)))  # noqa: S301 - as between vLLM's processes
    rows = []
    for place, count in enumerate(counts.tolist()):
        status = RowStatus.ACTIVE if count else RowStatus.IDLE
        rows.append(Row(place + 1, 2, tokens[place * each :][:count].tolist(), top_ks[place], place, status))
    for place, row in enumerate(batch_of(rows, scores).rows()):
        lines = slice(place * each, place * each + int(counts[place]))
        is_asked = bool(asked["other_logprobs"][place] or asked["entropies"][place] or bounds[place] or given[place])
        if top_ks[place] is None or not counts[place]:
            assert (row.logprobs.size, row.extras) == (0, None)
            continue
        alone = token_logprobs(
            own[lines],
            tokens[lines],
            top_ks[place] or 0,
            token_counts=[counts[place]],
            other_logits=other[lines],
            given_token_ids=np.array(given[place], np.int64),
            **{name: values[place : place + 1] for name, values in asked.items()},
        )
        assert row.logprobs.tolist() == alone.logprobs.tolist()
        assert row.ranks.tolist() == alone.ranks.tolist()
        assert row.alternative_token_ids.reshape(-1).tolist() == alone.alternative_token_ids.tolist()
        assert (row.extras is not None) == is_asked
        if row.extras is None:
            continue
        assert row.extras.mask_bound == bounds[place]
        for name in ("entropies", "given_token_ids", "mask_sizes", "mask_token_ids"):
            assert getattr(row.extras, name).tolist() == getattr(alone, name).tolist(), name
        assert row.extras.other_logprobs.tolist() == np.maximum(alone.other_logprobs, -9999).tolist()
        assert row.extras.given_logprobs.reshape(-1).tolist() == alone.given_logprobs.tolist()


def test_rows_that_ask_for_nothing_have_no_columns() -> None:
    logits, tokens = np.zeros((2, VOCABULARY), np.float32), np.array([3, 5])
    scores = token_scores(token_logprobs(logits, tokens, 1))
    assert scores.extras is None
    assert made([Row(1, 0, [3], 1), Row(2, 0, [5], 1, 1)], scores).extras is None


@pytest.mark.parametrize(
    ("mode", "runner", "line"),
    [
        ("raw_logits", "V1", "--logprobs-mode raw_logprobs or processed_logprobs, got raw_logits"),
        ("raw_logprobs", "V2", "vLLM's V1 model runner, got V2, because of VLLM_USE_V2_MODEL_RUNNER or the model"),
    ],
)
def test_samplers_that_cannot_be_ours_are_refused(mode: str, runner: str, line: str) -> None:
    config = SimpleNamespace(model_config=SimpleNamespace(logprobs_mode=mode), use_v2_model_runner=runner == "V2")
    with pytest.raises(ValueError, match=f"^--token-scores: {line}$"):
        check_token_scores(config)
