"""What a processor is shown of the queue: targets and drafts paired by step, and scores that keep the contract."""

import asyncio
import signal
from collections.abc import Callable
from contextlib import closing
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from tests.engines.fastdeploy.bus import Getter, save, settings_in, speaking
from tests.engines.fastdeploy.engine import Steps as Drawn
from tests.engines.fastdeploy.engine import message, whole
from tests.engines.fastdeploy.saving_program import start, wait_until_done
from tests.engines.fastdeploy.theirs import GETS
from tests.engines.fastdeploy.undefined import Array, entries
from tests.support.waiting import soon, until
from tokenbus.client import Client
from tokenbus.delivery import RequestFailedError
from tokenbus.engines import fastdeploy
from tokenbus.engines.fastdeploy.environment import Options
from tokenbus.engines.fastdeploy.message import Kind, Message
from tokenbus.engines.fastdeploy.process import PROCESS
from tokenbus.engines.fastdeploy.published import Published, Steps
from tokenbus.engines.fastdeploy.step_arrays import LOWEST
from tokenbus.processor import Processor
from tokenbus.worker import StepArrays, StepAssembler
from tokenbus_contracts import BatchKind, Limits, LogprobBatch, Row, RowStatus, Scoring, SpeculativeMethod, encode
from tokenbus_contracts.generated.request_pb2 import ErrorCode

SECONDS = 20
TARGET, DRAFT = 3, 4


def scored(ids: list[list[int]], scores: list[list[float]], ranks: list[int], *counts: int) -> Message:
    return message(
        TARGET,
        *(counts or (1,) * len(ids)),
        tokens=np.array(ids, np.int32),
        scores=np.array(scores, np.float32),
        ranks=np.array(ranks, np.int32),
    )


class Shown:
    """The steps of messages, and the pairs in them."""

    def __init__(self) -> None:
        self.steps = Steps(Options())
        self.computed = 9

    def all(self, *messages: Message) -> list[str]:
        """Return what each message becomes: T or D with its step's number, and ! where a draft is announced."""
        return [" ".join(_name(arrays) for arrays in self.steps.of(each)) for each in messages]

    def round(self, order: str) -> list[str]:
        self.computed += 2
        return self.all(*(message({"T": TARGET, "D": DRAFT}[each], 2, 1, computed=self.computed) for each in order))


def _name(arrays: StepArrays) -> str:
    if arrays.kind is BatchKind.DRAFT:
        return f"D{arrays.step}"
    return f"T{arrays.step}{'!' if arrays.draft_follows else ''}"


@pytest.mark.parametrize(
    ("orders", "shown"),
    [
        (["TD"] * 3, [["T1!", "D1"], ["T2!", "D2"], ["T3!", "D3"]]),
        (["DT", "DT", "DT"], [["", "T1! D1"], ["", "T2! D2"], ["", "T3! D3"]]),
        (["DT", "T", "DT"], [["", "T1! D1"], ["T2"], ["", "T3! D3"]]),
        (["TTTTT"], [["T1!", "T2!", "T3!", "T4!", "T5"]]),  # drafts that stop coming are not announced
    ],
)
def test_drafts_and_targets_in_one_order(orders: list[str], shown: list[list[str]]) -> None:
    """A draft has the step of the target before it, or waits for the one behind it; no target waits for a draft."""
    told = Shown()
    assert [told.round(order) for order in orders] == shown


@pytest.mark.parametrize(
    ("saved", "shown"),
    [
        # Drafts are late: they come after the next step's target.
        ([(TARGET, 9, 2, 1), (TARGET, 11, 2, 1), (DRAFT, 9, 2, 1), (DRAFT, 11, 2, 1)], ["T1!", "T2!", "D1", "D2"]),
        # A draft did not come, and an idle target takes no later one.
        ([(TARGET, 20, 1, 1), (TARGET, 22, 2, 2), (DRAFT, 22, 2, 2)], ["T1!", "T2!", "D2"]),
        ([(TARGET, 9, 0, 0), (TARGET, 20, 1, 1), (DRAFT, 20, 1, 1)], ["T1", "T2!", "D2"]),
        # A target that was passed over takes no draft.
        ([(TARGET, 9, 2, 1), (TARGET, 11, 2, 1), (DRAFT, 11, 2, 1), (DRAFT, 9, 2, 1)], ["T1!", "T2!", "D2", ""]),
        ([(TARGET, 9, 2, 1), (TARGET, 11, 2, 1), (DRAFT, 13, 1, 2)], ["T1!", "T2!", "D2"]),
        # Nor does one of fewer slots.
        ([(TARGET, 9, 1), (DRAFT, 9, 1, 1), (TARGET, 9, 1, 1), (DRAFT, 9, 1)], ["T1!", "", "T2! D2", ""]),
    ],
)
def test_draft_pairs_with_its_own_target(saved: list[tuple[int, ...]], shown: list[str]) -> None:
    """A draft is known by what it and its target say of slots, wherever it comes, and if others do not (case 4, 12)."""
    messages = [message(flag, *counts, computed=computed, is_running=any(counts)) for flag, computed, *counts in saved]
    assert Shown().all(*messages) == shown


def test_stray_drafts_and_unknown_flags_are_counted() -> None:
    shown = Shown()
    assert shown.round("DDT") == ["", "", "T1! D1"]
    assert shown.all(message(DRAFT, 1, 1, 1), message(TARGET, 1, 1)) == ["", "T2"]
    assert shown.all(message(7, 1), message(TARGET, 1)) == ["", "T3"]
    counts = shown.steps.counts
    assert (counts.unpaired_drafts, counts.drafts, counts.dropped) == (2, 1, 1)


def test_method_without_a_proposer_announces_nothing() -> None:
    """Steps without logprobs have no message flag, and so no drafts (case 31); those of a prefill have none either."""
    shown = Shown()
    plain = message(TARGET, 2, 1, kind=Kind.SPECULATED)
    assert shown.all(plain, message(TARGET, 2, 2, is_first=True)) == ["T1", "T2"]


def test_slots_that_say_something_else() -> None:
    """Magic counts are statuses, other negative ones no tokens; what is no token's id ends its slot's (case 9)."""
    tokens = np.array([[5], [-1], [6], [-1], [8]], np.int32)
    (arrays,) = Shown().steps.of(message(TARGET, 3, -9, -3, -1, 2, tokens=tokens))
    names = [RowStatus(status).name for status in np.asarray(arrays.statuses)]
    assert names == ["ACTIVE", "PREEMPTED", "UNRECOVERABLE", "IDLE", "IDLE"]
    assert arrays.token_counts.tolist() == [1, 0, 0, 0, 0]
    assert arrays.token_ids.tolist() == [5]


def test_first_tokens_come_with_proposals() -> None:
    (arrays,) = Shown().steps.of(message(TARGET, 3, 0, 2, is_first=True))
    assert (arrays.token_ids.tolist(), arrays.token_counts.tolist()) == ([0, 3], [1, 0, 1])
    assert np.asarray(arrays.proposal_token_ids).tolist() == [1, 2, 4]
    assert np.asarray(arrays.proposal_counts).tolist() == [2, 0, 1]
    assert np.asarray(arrays.logprobs).size == 2


def published(given: Message) -> LogprobBatch:
    (arrays,) = Steps(Options()).of(given)
    (batch,) = StepAssembler(Limits.default()).assemble(arrays)
    encode(LogprobBatch.of_views(batch.header._replace(worker_id="w"), batch.columns))
    return batch


def test_certain_scores_are_mended() -> None:
    lowest = -np.inf
    ids = [[5, 5, 9, 2], [8, 3, 7, 1], [4, 6, 4, 1], [9, 5, 6, 9], [100, 6, 4, 3]]
    scores: list[list[float]] = [
        [2e-5, 2e-5, -2, -2],
        [lowest, -0.5, lowest, lowest],
        [-2.0000002, -1, -2, -3],
        [-1, -1, -2, -3],
    ]
    batch = published(scored(ids, [*scores, [-3.0, -1, -2, -3.000001]], [1, 4, 7, 1, 5]))
    assert batch.scorings.tolist() == [Scoring.FULL] * 5
    assert batch.logprobs.tolist() == np.array([0, LOWEST, -2, -3, -3.000001], np.float32).tolist()
    assert batch.ranks.tolist() == [1, 4, 2, 3, 5]
    assert batch.alternative_token_ids.reshape(5, 3)[:2].tolist() == [[5, 2, 9], [3, 1, 7]]
    assert batch.alternative_logprobs.reshape(5, 3)[:2].tolist() == [[0, -2, -2], [-0.5, LOWEST, LOWEST]]
    shown = Shown()
    shown.all(scored([[5, 5]], [[2e-5, -0.0]], [1]))
    assert shown.steps.counts.mended_values == 1


@pytest.mark.parametrize(
    ("ids", "scores", "rank"),
    [
        ([5, 6], [np.nan, -1], 1),
        ([5, 6], [-1, np.nan], 1),
        ([5, 6], [np.inf, -1], 1),
        ([5, 5], [0.5, 0.5], 1),  # both far above 0
        ([5, 6], [-1, -1], 0),
        ([5, 6], [-0.5, -1], 7),  # behind lower ones
        ([5, 6], [-1, -0.5], 1),  # another's
    ],
)
def test_row_whose_scores_mean_nothing_goes_without(ids: list[int], scores: list[float], rank: int) -> None:
    shown = Shown()
    given = scored([[1, 1], ids, ids, [2, 2]], [[-1, -1], [-1, -1], scores, [-2, -2]], [1, 1, rank, 1], 1, 2, 1)
    if rank in (0, 1, 7):
        given.tokens[1, 1] = given.tokens[1, 0]
    (arrays,) = shown.steps.of(given)
    batch = published(given)
    assert batch.token_ids.tolist() == [1, ids[0], ids[0], 2]
    assert batch.scorings.tolist() == [Scoring.FULL, Scoring.NONE, Scoring.FULL]
    assert batch.logprobs.tolist() == [-1, -2]
    assert np.asarray(arrays.scored).tolist() == [True, False, True]
    assert shown.steps.counts.unscored_rows == 1


def test_padded_alternatives_are_left_out() -> None:
    scores: list[list[float]] = [[-1, -1, -2, -3], [-1, -1, np.nan, -5], [-1, -1, -2, -3]]
    batch = published(scored([[1, 1, 2, 3], [1, 1, -1, 3], [4, 4, 5, 6]], scores, [1, 1, 1], 2, 1))
    assert batch.top_ks.tolist() == [1, 3]
    assert batch.alternative_token_ids.tolist() == [1, 1, 4, 5, 6]


@pytest.mark.parametrize("seed", range(2))
def test_whatever_is_saved_keeps_the_contract(seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of random steps with anything in them every one is published, none refused; the bus reads what a get fills in."""
    drawn, steps = Drawn(seed), Steps(Options())
    taken: list[Message] = []
    with speaking("develop", folder):
        monkeypatch.setattr(PROCESS.sender().published_of(0), "offer", taken.append)  # as they are saved
        for op in list(GETS) * 5:
            save(op, drawn.any(op, int(drawn._random.integers(0, 9)), int(drawn._random.integers(1, 6))))
            getter = Getter(GETS[op])
            getter.get()
            assert_read_alike(taken[-1], *(array.reshape(-1) for array in getter.arrays()))
    assembler = StepAssembler(Limits.schema())
    for given in taken:
        for arrays in steps.of(given):
            for batch in assembler.assemble(arrays):
                encode(LogprobBatch.of_views(batch.header._replace(worker_id="w"), batch.columns))
    assert len(taken) == 30


def assert_read_alike(given: Message, tokens: Array, *scored: Array) -> None:
    columns, of_slots, header, rows = given.tokens.shape[1], 0, 2, np.arange(given.slots)
    if not given.kind.is_single:
        header, of_slots = (3, 512) if given.kind.is_scored else (2, 256)
        assert tokens[header : header + given.slots].tolist() == given.counts.tolist()
        slots, places = entries(given.counts)
        rows = slots * 6 + places
    stride = 21 if given.kind is Kind.SPECULATED_SCORED else columns
    lines = rows[:, None] * stride + np.arange(columns)
    wanted = (given.tokens, given.scores, given.ranks)
    for found, at, mine in zip((tokens[header + of_slots :], *scored), (lines, lines, rows), wanted, strict=False):
        np.testing.assert_array_equal(found[at], mine)


@pytest.mark.process
async def test_processor_sees_paired_steps(folder: Path) -> None:
    """On each rank that saves, whichever tensor-parallel rank its settings say."""
    order = (TARGET, DRAFT, DRAFT, TARGET)
    with speaking("develop", folder, worker__drain_timeout_ms=5000, worker__publisher="process"):
        async with Processor(settings_in(folder)) as processor:
            steps = processor.steps()
            given = whole("speculate_save_output_topk", 2, 1, 3)
            fastdeploy.assign(1, 77)
            for flag in order:
                given |= {"seq_lens_decoder": given["seq_lens_decoder"] + (flag == TARGET), "message_flag": flag}
                await asyncio.to_thread(save, "speculate_save_output_topk", given)
            found = [await asyncio.wait_for(anext(steps), SECONDS) for _ in range(2)]
            await steps.aclose()
            await asyncio.to_thread(PROCESS.sender().close)
        for step in found:
            assert step.draft is not None
            assert step.target.request_ids[1] == 77
            assert step.target.token_ids.tolist() == step.draft.token_ids.tolist()
        getter = Getter("speculate_get_output_topk")
        for flag in order:
            getter.get()
            assert int(getter.arrays()[0][1, 0]) & 0xFF == flag


def test_draft_of_a_target_that_was_not_published_is_none() -> None:
    shown = Shown()
    (target,) = shown.steps.of(message(TARGET, 2, 1))
    shown.steps.end(target.request_ids.tolist())
    assert shown.all(message(DRAFT, 2, 1)) == [""]
    assert (shown.steps.counts.ended_requests, shown.steps.counts.dropped) == (2, 1)
    assert shown.round("TD") == ["T2!", "D2"]


async def test_requests_whose_rows_find_no_room_end(folder: Path) -> None:
    """Nothing is acknowledged for a while: a request ends with what is there, and its slot goes on with another one."""
    settings = settings_in(folder, worker__publisher="thread", worker__outbox=65_536, worker__retention_items=8)
    computed, rows = count(9), list[Row]()
    with closing(Published(settings, Options(method=SpeculativeMethod.NONE), 0)) as shown:
        shown.assign(0, 77)

        def after_step(condition: Callable[[], object]) -> Callable[[], object]:
            def is_met() -> object:
                shown.offer(message(TARGET, 1, computed=next(computed)))
                return condition()

            return is_met

        await until(after_step(lambda: shown.steps.counts.ended_requests))
        async with Processor(settings) as processor:
            steps = processor.steps()

            async def read() -> None:
                async for each in steps:
                    rows.extend(each.target.rows())

            reading = asyncio.create_task(read())
            await until(lambda: processor.registry.counts.failed)
            await until(after_step(lambda: any(row.request_id != 77 and row.position == 2 for row in rows)), every=0.05)
        await reading
    assert [row.position for row in rows if row.request_id == 77 and row.token_ids.size] == list(range(7))


@pytest.mark.process
async def test_killed_process_ends_its_requests_at_once(environment: dict[str, str], folder: Path) -> None:
    """Its publisher has a process of its own: a reader gets what was saved, and then hears why there is no more.

    No heartbeat's timeout says so, nor a process that was forked off, and lives on.
    """
    settings = settings_in(folder, bus__heartbeat_timeout_ms=3_600_000)
    address = {"TOKENBUS_BUS_WORKERS_ADDRESS": settings.bus.workers_address}
    async with Processor(settings), Client(settings) as client:
        with start(environment | address, 0, 5, "shows") as saving:
            tokens = client.resume(77, 0)
            read = [await soon(anext(tokens)) for _ in range(15)]
            await asyncio.to_thread(wait_until_done, saving)
            saving.send_signal(signal.SIGKILL)
            with pytest.raises(RequestFailedError, match="the engine's process died") as failed:
                await soon(anext(tokens))
            await asyncio.to_thread(saving.communicate)
    assert [token.position for token in read] == list(range(15))
    assert failed.value.code == ErrorCode.ERROR_CODE_ENGINE
    assert failed.value.emitted_tokens == 15


def test_bus_that_takes_nothing_holds_nothing_up(folder: Path) -> None:
    bounds = {"worker__outbox": 2, "worker__retention_items": 2, "worker__block_timeout_ms": 1}
    settings = settings_in(folder, worker__publisher="thread", **bounds)
    shown = Published(settings, Options(), 0)
    for computed in range(9, 40):
        given = message(TARGET, 1, 1, computed=computed)
        shown.offer(given)
        assert shown._waiting.qsize() <= 2
    shown.close()
    assert shown.settings.worker.policy == "fail"  # whatever the queue does when it is full
    assert shown.steps.counts.dropped > 0
