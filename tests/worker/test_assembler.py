"""StepAssembler: every kind of step becomes batches in the same way, and a row's outcome is its own."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.in_process.builders import arrays_of, values_by_key
from tokenbus.testing import RowShape, batch, row_shapes
from tokenbus.worker import StepArrays, StepAssembler
from tokenbus_contracts import (
    BatchKind,
    ContractError,
    Limits,
    LogprobBatch,
    RowStatus,
    Scoring,
    SpeculativeMethod,
    StepPhase,
    ValueKind,
    decode,
    encode,
)

SMALL = StepArrays(request_ids=[7, 8], positions=[0, 4], token_counts=[2, 1], token_ids=[0, 5, 6])
SCORED = replace(
    SMALL,
    logprobs=[-0.5, -1.0, -2.0],
    ranks=[1, 2, 3],
    alternative_token_ids=[[0, 9], [4, 5], [1, 2]],
    alternative_logprobs=[[-0.5, -3.0], [-0.75, -1.0], [-0.25, -0.5]],
)


def assembled(arrays: StepArrays) -> LogprobBatch:
    (made,) = StepAssembler(Limits.default(), 100_000).assemble(arrays)
    return sent(made)


def sent(made: LogprobBatch) -> LogprobBatch:
    return decode(encode(LogprobBatch.of_views(made.header._replace(worker_id="w"), made.columns)))


def lined(flat: Any, counts: list[int], width: int) -> np.ndarray:  # noqa: ANN401 - anything that numpy takes
    values = np.asarray(flat)
    lines = np.full((len(counts), width, *values.shape[1:]), -7, values.dtype)
    begin = 0
    for row, count in enumerate(counts):
        lines[row, :count] = values[begin : begin + count]
        begin += count
    return lines


def test_ids_alone_are_enough() -> None:
    """A step without speculation and logprobs needs keys, positions, counts and ids; id 0 is a token (case 10)."""
    made = assembled(SMALL)
    assert made.token_ids.tolist() == [0, 5, 6]
    assert made.statuses.tolist() == [RowStatus.ACTIVE, RowStatus.ACTIVE]
    assert made.scorings.tolist() == [Scoring.NONE, Scoring.NONE]
    assert made.batch_indices.tolist() == [0, 1]
    assert (made.header.kind, made.header.method, made.header.step) == (BatchKind.TARGET, SpeculativeMethod.NONE, 1)


@pytest.mark.parametrize("method", list(SpeculativeMethod)[1:])
def test_every_method_takes_the_same_path(method: SpeculativeMethod) -> None:
    """Whatever drafts, or nothing at all: rows, columns and order come out the same (cases 2 and 31)."""
    order: dict[str, Any] = {"index_to_batch_id": [1, 0], "draft_token_counts": [1, 0], "phase": StepPhase.DECODE}
    made = assembled(replace(SCORED, method=method, **order))
    assert made.header.method is method
    assert made.header.phase is StepPhase.DECODE
    assert made.in_batch_order().request_ids.tolist() == [8, 7]
    assert made.in_batch_order().ranks.tolist() == [3, 1, 2]
    assert made.in_batch_order().alternative_token_ids.tolist() == [1, 2, 0, 9, 4, 5]
    assert made.draft_token_counts.tolist() == [1, 0]


def test_lines_and_flat_arrays_say_the_same() -> None:
    lines: dict[str, Any] = {
        name: lined(getattr(SCORED, name), [2, 1], 4)
        for name in ("token_ids", "logprobs", "ranks", "alternative_token_ids", "alternative_logprobs")
    }
    assert assembled(replace(SCORED, **lines)) == assembled(SCORED)


def test_rows_have_as_many_alternatives_as_they_want() -> None:
    """A row's top-k is its own: other rows' lines may be longer, and a row without scoring has none (case 15)."""
    made = assembled(replace(SCORED, scored=[True, False], top_ks=[1, 2]))
    assert made.top_ks.tolist() == [1, 0]
    assert made.scorings.tolist() == [Scoring.FULL, Scoring.NONE]
    assert made.alternative_token_ids.tolist() == [0, 4]
    assert made.logprobs.tolist() == [-0.5, -1.0]


def test_logprobs_may_be_of_scored_rows_alone() -> None:
    some = replace(
        SCORED, scored=[False, True], logprobs=[-2.0], ranks=[3], top_ks=[0, 2], alternative_token_ids=[1, 2],
        alternative_logprobs=[-0.25, -0.5],
    )  # fmt: skip
    whole = replace(SCORED, scored=[False, True])
    assert assembled(some) == assembled(whole)
    lines: dict[str, Any] = {"alternative_token_ids": [[1, 2]], "alternative_logprobs": [[-0.25, -0.5]]}
    assert assembled(replace(some, **lines)) == assembled(whole)


@pytest.mark.parametrize("lines", [False, True])
def test_stop_inside_an_accepted_block_trims_everything(lines: bool) -> None:  # noqa: FBT001 - a case
    """Ids, logprobs, ranks and alternatives behind a stop are left out together (case 13)."""
    flat = replace(SCORED, statuses=[RowStatus.FINISHED_STOP, RowStatus.ACTIVE], kept_counts=[1, 1])
    names = ("token_ids", "logprobs", "ranks", "alternative_token_ids", "alternative_logprobs")
    wanted: dict[str, Any] = {name: lined(getattr(SCORED, name), [2, 1], 3) for name in names} if lines else {}
    made = assembled(replace(flat, **wanted))
    assert made.token_counts.tolist() == [1, 1]
    assert made.token_ids.tolist() == [0, 6]
    assert made.logprobs.tolist() == [-0.5, -2.0]
    assert made.ranks.tolist() == [1, 3]
    assert made.alternative_token_ids.tolist() == [0, 9, 1, 2]


def test_stops_are_those_of_the_rows_that_ended_by_one() -> None:
    ended = replace(SMALL, statuses=[RowStatus.ACTIVE, RowStatus.FINISHED_STOP], stops=[9, 1])
    made = assembled(ended)
    assert (made.stops.tolist(), [row.stop for row in made.rows()]) == ([1], [0, 1])
    for silent in (replace(ended, stops=[9, 0]), replace(ended, statuses=None), replace(ended, stops=None)):
        assert assembled(silent).stops.size == 0
    with pytest.raises(ContractError, match="stops: 2 elements, one for each row, got 1"):
        assembled(replace(ended, stops=[1]))


def test_trimmed_alternatives_in_one_line() -> None:
    """Alternatives that an engine gave ragged lose those of tokens behind a stop too (case 13)."""
    ragged = replace(
        SCORED,
        kept_counts=[1, 1],
        top_ks=[2, 1],
        alternative_token_ids=[0, 9, 4, 5, 1],
        alternative_logprobs=[-0.5, -3.0, -0.75, -1.0, -0.25],
    )
    made = assembled(ragged)
    assert made.alternative_token_ids.tolist() == [0, 9, 1]
    assert made.alternative_logprobs.tolist() == [-0.5, -3.0, -0.25]


def test_all_tokens_of_a_row_may_go() -> None:
    made = assembled(replace(SCORED, kept_counts=[0, 1], statuses=[RowStatus.FINISHED_STOP, RowStatus.ACTIVE]))
    assert made.token_counts.tolist() == [0, 1]
    assert made.alternative_token_ids.tolist() == [1, 2]


def test_prefill_hands_off_its_first_token_with_proposals() -> None:
    """The first token has its logprobs, and proposals come beside it: they are no tokens (cases 27 and 30)."""
    made = assembled(
        replace(
            SCORED,
            phase=StepPhase.PREFILL,
            statuses=[RowStatus.HANDED_OFF] * 2,
            proposal_token_ids=[[3, 4], [5, -1]],
            proposal_counts=[2, 1],
        )
    )
    assert [row.proposal_token_ids.tolist() for row in made.rows()] == [[3, 4], [5]]
    assert [row.token_ids.tolist() for row in made.rows()] == [[0, 5], [6]]


def test_chunk_of_a_prompt_has_no_tokens() -> None:
    """A row whose prompt is not done says so, and has nothing (case 9)."""
    made = assembled(replace(SMALL, statuses=[RowStatus.ACTIVE, RowStatus.PREFILLING], kept_counts=[2, 0]))
    assert made.row(1).status is RowStatus.PREFILLING
    assert made.row(1).token_ids.size == 0


def test_minus_infinity_is_told_as_the_lowest() -> None:
    """Minus infinity is written as -9999, in logprobs and in alternatives; NaN is not, and is refused (case 24)."""
    lowest = replace(SCORED, logprobs=[-0.5, -np.inf, -2.0], alternative_token_ids=None, alternative_logprobs=None)
    assert assembled(lowest).logprobs.tolist() == [-0.5, -9999.0, -2.0]
    masked = replace(
        SCORED,
        value_kind=ValueKind.PROCESSED_LOGITS,
        logprobs=[-0.5, -1.0, -30_000.0],
        alternative_logprobs=[[-0.5, -np.inf], [-0.75, -1.0], [-0.25, -20_000.0]],
    )
    assert assembled(masked).alternative_logprobs.tolist() == [-0.5, -9999.0, -0.75, -1.0, -0.25, -20_000.0]
    with pytest.raises(ContractError, match=r"logprobs\[0\]: a finite number"):
        assembled(replace(lowest, logprobs=[np.nan, -1.0, -2.0]))


def test_arrays_are_the_messages_own() -> None:
    logprobs = np.array([-0.5, -1.0, -2.0], np.float32)
    (made,) = StepAssembler(Limits.default()).assemble(
        replace(SCORED, logprobs=logprobs, alternative_token_ids=None, alternative_logprobs=None)
    )
    logprobs[:] = 0
    assert made.logprobs.tolist() == [-0.5, -1.0, -2.0]


def test_steps_are_counted_and_drafts_belong_to_the_last() -> None:
    """Without numbers of the engine's own a target is the next step, and a draft that of the last target (case 4)."""
    assembler = StepAssembler(Limits.default())
    kinds = [BatchKind.TARGET, BatchKind.DRAFT, BatchKind.TARGET, BatchKind.DRAFT]
    made = [assembler.assemble(replace(SMALL, kind=kind))[0].header for kind in kinds]
    assert [(header.kind, header.step) for header in made] == list(zip(kinds, [1, 1, 2, 2], strict=True))


def test_drafts_that_finish_late_still_say_their_step() -> None:
    """With overlapping steps a draft may come after the next target: its number says which step it is of (case 12)."""
    assembler = StepAssembler(Limits.default())
    order = [(BatchKind.TARGET, 0), (BatchKind.TARGET, 0), (BatchKind.DRAFT, 1), (BatchKind.DRAFT, 2)]
    made = [assembler.assemble(replace(SMALL, kind=kind, step=step))[0].header.step for kind, step in order]
    assert made == [1, 2, 1, 2]
    assert assembler.assemble(SMALL)[0].header.step == 3


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"positions": [0]}, "positions: 2 elements, one for each row, got 1"),
        ({"statuses": [1]}, "statuses: 2 elements, one for each row, got 1"),
        ({"token_ids": [1, 2]}, "token_ids: 3 elements, one for each token, got 2"),
        ({"token_ids": [[1], [2]]}, "token_ids: 2 tokens a line, got 1"),
        ({"token_ids": [[[1]]]}, r"token_ids: 1 dimensions, or 2 with a line for each of 2 rows, got shape"),
        ({"logprobs": [-1.0, -1.0]}, "logprobs: 3 elements, one for each token, got 2"),
        ({"ranks": None}, "ranks: one for each logprob, got none"),
        ({"logprobs": None, "scored": [True, False]}, "logprobs: one for each token of the scored rows, got none"),
        ({"alternative_logprobs": None}, "alternative_logprobs: one for each alternative, got none"),
        ({"alternative_logprobs": [[-1.0]]}, r"alternative_logprobs: shape \(3, 2\), as alternative_token_ids"),
        ({"alternative_token_ids": None, "top_ks": [1, 0]}, "alternative_token_ids: as many as top_ks says, got none"),
        ({"top_ks": [3, 0]}, r"top_ks\[0\]: at most 2, as many as were given, got 3"),
        ({"alternative_token_ids": [1], "alternative_logprobs": [-1.0]}, "top_ks: one for each row of alternatives in one line, got none"),  # noqa: E501
        ({"alternative_token_ids": [1], "alternative_logprobs": [-1.0], "top_ks": [1, 1]}, "alternative_token_ids: 3 elements, as top_ks and token_counts say, got 1"),  # noqa: E501
        ({"kept_counts": [3, 0]}, r"kept_counts\[0\]: at most 2, got 3"),
        ({"kept_counts": [-1, 0]}, r"kept_counts\[0\]: at most 2, got -1"),
        ({"index_to_batch_id": [1, 1]}, "index_to_batch_id: each place from 0 to 1 once, got 1 places"),
        ({"index_to_batch_id": [0, 2]}, "index_to_batch_id: each place from 0 to 1 once, got 2 places"),
        ({"index_to_batch_id": [0]}, "index_to_batch_id: 2 elements, one for each row, got 1"),
        ({"proposal_token_ids": [1]}, "proposal_counts: one for each row of proposals, got none"),
        ({"proposal_token_ids": [1], "proposal_counts": [1, 1]}, "proposal_token_ids: 2 elements, one for each token"),
    ],
)  # fmt: skip
def test_step_that_contradicts_itself_is_refused(changed: dict[str, Any], line: str) -> None:
    """Arrays that do not fit each other are refused as a whole, with what was found (cases 1, 5, 11 and 28)."""
    with pytest.raises(ContractError, match=line):
        StepAssembler(Limits.default()).assemble(replace(SCORED, **changed))


def test_step_larger_than_a_message_goes_in_parts() -> None:
    """More rows than a message may have go in several (case 26)."""
    whole = batch(row_shapes(range(1, 11), tokens=2))
    assembler = StepAssembler(replace(Limits.default(), max_rows=4), 50_000)
    parts = [sent(made) for made in assembler.assemble(arrays_of(whole))]
    assert [made.header.part_index for made in parts] == [0, 1, 2]
    assert values_by_key(LogprobBatch.joined(parts)) == values_by_key(whole)


class OnDevice:
    """An array as a GPU framework has it: it becomes numpy's only after it was brought to the host."""

    def __init__(self, values: Any, *, is_here: bool = False) -> None:  # noqa: ANN401 - anything that numpy takes
        self.values = np.asarray(values)
        self.is_here = is_here

    def detach(self) -> "OnDevice":
        return self

    def cpu(self) -> "OnDevice":
        return OnDevice(self.values, is_here=True)

    def numpy(self) -> np.ndarray:
        if not self.is_here:
            raise TypeError("on a device")
        return self.values


class Cupy:
    """An array as cupy has it: only `get` brings it to the host."""

    device = "cuda"

    def __init__(self, values: Any) -> None:  # noqa: ANN401 - anything that numpy takes
        self.values = np.asarray(values)

    def get(self) -> np.ndarray:
        return self.values


@pytest.mark.parametrize("kind", [OnDevice, Cupy, list, tuple])
def test_arrays_of_any_framework_are_taken(kind: Any) -> None:  # noqa: ANN401 - a class
    names = ("request_ids", "positions", "token_counts", "token_ids", "logprobs", "ranks", "alternative_token_ids")
    other: dict[str, Any] = {name: kind(getattr(SCORED, name)) for name in (*names, "alternative_logprobs")}
    assert assembled(replace(SCORED, **other)) == assembled(SCORED)


def test_what_is_no_array_is_refused() -> None:
    with pytest.raises(ContractError, match="token_ids: an array"):
        StepAssembler(Limits.default()).assemble(replace(SMALL, token_ids=[[1, 2], [3]]))


_ROWS = st.lists(
    st.builds(
        RowShape,
        st.integers(1, 2**64 - 1),
        position=st.integers(0, 1000),
        tokens=st.integers(1, 6),
        status=st.just(RowStatus.ACTIVE),
        scoring=st.sampled_from([Scoring.FULL, Scoring.NONE]),
        top_k=st.integers(0, 20),
        drafted=st.none(),
        proposals=st.none(),
    ).map(lambda row: row if row.scoring is Scoring.FULL else row._replace(top_k=0)),
    min_size=1,
    max_size=8,
    unique_by=lambda row: row.request_id,
)


@settings(max_examples=25)
@given(wanted=_ROWS, data=st.data())
def test_row_does_not_depend_on_its_neighbours(wanted: list[RowShape], data: st.DataObject) -> None:
    """A row has the same values in whatever order, company and form it is computed (cases 3 and 15)."""
    whole = batch(wanted)
    alone = {row.request_id: values_by_key(assembled(arrays_of(batch([row]))))[row.request_id][2:] for row in wanted}
    order = data.draw(st.permutations(range(len(wanted))))
    mixed = whole.select(order)
    together = assembled(arrays_of(mixed))
    assert {key: values[2:] for key, values in values_by_key(together).items()} == alone
    assert together.in_batch_order().request_ids.tolist() == [row.request_id for row in wanted]


@pytest.mark.parametrize("kind", [np.int64, np.uint64, object, list, tuple])
def test_keys_of_any_whole_numbers_are_taken(kind: Any) -> None:  # noqa: ANN401 - a type
    """Also those of a sequence on both sides of 2**63, of which numpy makes rounded floats."""
    keys = [2**63 - 1, 2**64 - 5]
    array = np.array(keys, np.uint64)
    given = array.view(np.int64) if kind is np.int64 else kind(keys) if kind in (list, tuple) else array.astype(kind)
    assert assembled(replace(SMALL, request_ids=given)).request_ids.tolist() == keys


@pytest.mark.parametrize("keys", [[7.0, 8.0], [7, 2.5], ["a", "b"], np.array([None, 7], object)])
def test_keys_that_are_no_whole_numbers_are_refused(keys: Any) -> None:  # noqa: ANN401 - anything
    with pytest.raises(ContractError, match="request_ids: whole numbers"):
        StepAssembler(Limits.default()).assemble(replace(SMALL, request_ids=keys))


@pytest.mark.parametrize(
    "changed", [{"token_ids": [0, 5, -1]}, {"token_ids": [0, 5, 2**40]}, {"positions": [0, -1]}, {"ranks": [1, 2, -3]}]
)
def test_number_that_its_column_cannot_hold_is_its_rows_fault_alone(changed: dict[str, Any]) -> None:
    """A number out of every range is found in its row, and the other row is whole (case 15)."""
    (made,) = StepAssembler(Limits.default()).assemble(replace(SCORED, **changed))
    sent(made.select([0]))
    with pytest.raises(ContractError):
        sent(made.select([1]))


def test_parts_are_cut_by_their_size() -> None:
    wanted = [RowShape(key, 0, 6, RowStatus.ACTIVE, top_k=20 if key > 20 else 0) for key in range(1, 31)]
    whole = batch(wanted)
    assembler = StepAssembler(replace(Limits.default(), max_message_bytes=3000), 50_000)
    parts = [sent(made) for made in assembler.assemble(arrays_of(whole))]
    assert all(len(encode(part)) <= 3000 for part in parts)
    assert values_by_key(LogprobBatch.joined(parts)) == values_by_key(whole)


@pytest.mark.parametrize("most", [700, 1000, 2000, 3000])
def test_parts_are_cut_by_their_proposals_too(most: int) -> None:
    """What a draft proposes for rows may be most of a step: it counts like tokens, and each message fits."""
    counts, places = np.full(60, 8), np.arange(60)
    given = StepArrays(
        request_ids=places + 1, positions=places, token_counts=np.ones(60, int), token_ids=places,
        proposal_counts=counts, proposal_token_ids=np.arange(480),
    )  # fmt: skip
    parts = [sent(made) for made in StepAssembler(replace(Limits.default(), max_message_bytes=most), 0).assemble(given)]
    assert all(len(encode(part)) <= most for part in parts)
    assert LogprobBatch.joined(parts).proposal_token_ids.tolist() == list(range(480))
