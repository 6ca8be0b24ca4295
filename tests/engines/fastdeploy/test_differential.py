"""The drop-in beside the kernel's own queue: the same random calls to both, the same tensors out, bit for bit."""

import os
import secrets
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.engines.fastdeploy import campaign, kernel
from tests.engines.fastdeploy.bus import Beside
from tests.engines.fastdeploy.engine import Steps
from tests.engines.fastdeploy.kernel import GETS

MOST = {op: 256 if get == "speculate_get_output" else 512 for op, get in GETS.items()}


@pytest.mark.parametrize("seed", [7, secrets.randbits(31)], ids=["a seed that stays", "a seed of its own"])
def test_random_steps_come_as_the_kernels_queue_has_them(
    seed: int, bus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever is saved, by every op, in every form and order, to several queues, is got as from the kernel's queue.

    `make soak` does 100,000 such steps.
    """
    assert bus.exists()
    monkeypatch.setenv("INFERENCE_MSG_QUEUE_ID", "1")
    sys.stdout.write(f"seed {seed}\n")
    with kernel.queue() as one, kernel.queue() as two:
        beside = {1: Beside(one), 2: Beside(two)}
        assert campaign.run(beside, 120, seed, most_slots=64) == 120
        sys.stdout.write(one.why_not)
    assert f"seed {seed}" in capsys.readouterr().out


@pytest.mark.parametrize("tensors", [False, True], ids=["arrays", "tensors"])
@pytest.mark.parametrize("op", GETS)
@pytest.mark.usefixtures("bus")
def test_every_op_at_every_size(op: str, tensors: bool) -> None:  # noqa: FBT001 - a parameter
    """Every field of every message, of few slots and of as many as there may be, is what that engine's own is."""
    steps = Steps(7)
    with kernel.queue() as queue:
        beside = Beside(queue, tensors=tensors)
        for slots, columns in ((1, 1), (3, 21), (64, 6), (MOST[op], 2), (2, 21), (0, 3)):
            beside.save(op, steps.drawn(op, slots, columns))
            beside.get()


@pytest.mark.parametrize("real_k", [0, 1, 19])
@pytest.mark.parametrize("op", ["speculate_save_output_topk", "save_output_topk"])
@pytest.mark.usefixtures("bus")
def test_fewer_columns_are_got_than_were_saved(op: str, real_k: int) -> None:
    """As many alternatives are filled in as were asked for, and counted so, however many were saved."""
    steps = Steps(13)
    with kernel.queue() as queue:
        beside = Beside(queue, k=real_k)
        for columns in (21, 1, 5):
            beside.save(op, steps.drawn(op, 6, columns))
            beside.get()


def test_targets_and_drafts_in_any_order(beside: Beside) -> None:
    """Drafts before their targets, behind them, missing, doubled and alone come out as they went in (case 4, 12)."""
    steps = Steps(3)
    for flag in (4, 3, 3, 4, 4, 4, 3, 3, 3, 4):
        beside.save("speculate_save_output_topk", steps.speculated(5, 4, flag))
    beside.get_all()


def test_idle_and_unrecoverable_steps(beside: Beside) -> None:
    """A step with nothing left to do has its flag, and one whose slots all ended has no token."""
    steps = Steps(4)
    for op in GETS:
        given = steps.drawn(op, 3, 2)
        for name in ("token_num_per_batch", "accept_num"):
            if name in given:
                given[name][:] = -3
        if op.startswith("save"):
            given["sampled_token_ids"][:] = -3
        beside.save(op, given | {"not_need_stop": np.array([False])})
    beside.get_all()


def test_ranks_that_share_a_queue_keep_their_order(beside: Beside) -> None:
    """Where each rank saves its own, all come out in the one order in which they went in (case 6)."""
    steps = Steps(2)
    for rank in (3, 0, 1, 1, 0, 7, 3):
        beside.save("speculate_save_output", steps.accepted(3) | {"rank_id": rank, "save_each_rank": True})
    beside.get_all()


@pytest.mark.parametrize("count", [12, 9])
def test_older_forms_of_the_save_op(count: int, beside: Beside) -> None:
    """Without preempted_idx, and without the lengths too, the op takes what it is given by how much there is."""
    steps = Steps(3)
    missing = ["preempted_idx", *(["seq_lens_decoder", "prompt_lens", "save_each_rank"] if count == 9 else [])]
    for flag in (3, 4, 3):
        arguments = steps.speculated(5, 4, flag)
        older = {name: value for name, value in arguments.items() if name not in missing}
        assert len(older) == count
        beside.save("speculate_save_output_topk", older)
        beside.get()


@pytest.mark.parametrize("op", ["save_output_topk", "save_output", "speculate_save_output"])
def test_older_forms_without_preempted_slots(op: str, beside: Beside) -> None:
    """An op whose earlier form has no preempted_idx is the same without it."""
    steps = Steps(5)
    for _ in range(4):
        arguments = steps.drawn(op, 5, 3)
        del arguments["preempted_idx"]
        beside.save(op, arguments)
        beside.get()


def test_uninitialised_scores_are_sent_as_they_are(beside: Beside) -> None:
    """Logprobs and ranks that are whatever lay in memory refuse no step, and are sent as they are."""
    steps = Steps(9)
    for bits in (0xFFFFFFFF, 0x7F800000, 0):
        given = steps.sampled(4, 3)
        garbage = np.full((4, 3), bits, np.uint32).view(np.float32)
        beside.save("save_output_topk", given | {"logprobs": garbage, "ranks": np.full(4, bits, np.int64)})
    beside.get_all()


def test_queues_are_apart(bus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is saved to one queue is never got from another: each data-parallel rank has its own."""
    assert bus.exists()
    steps = Steps(6)
    with kernel.queue() as one, kernel.queue() as two:
        queues = {"3": Beside(one), "4": Beside(two)}
        for name, beside in queues.items():
            monkeypatch.setenv("INFERENCE_MSG_QUEUE_ID", name)
            beside.save("save_output", steps.plain(3))
        for name, beside in reversed(queues.items()):
            monkeypatch.setenv("INFERENCE_MSG_QUEUE_ID", name)
            beside.get_all()
    assert os.environ["INFERENCE_MSG_QUEUE_ID"] == "3"


def test_engine_goes_on_with_its_own_arrays(beside: Beside) -> None:
    """What the engine writes into its arrays after a save changes nothing in what was saved."""
    from tokenbus_engines import fastdeploy  # noqa: PLC0415 - by its own arrays, not copies

    arguments = Steps(9).speculated(6, 4)
    beside.kernel.save("speculate_save_output_topk", arguments)
    fastdeploy.speculate_save_output_topk(*arguments.values())
    for value in arguments.values():
        if isinstance(value, np.ndarray):
            value[...] = 1
    beside.get()


def test_token_id_0_is_a_token(beside: Beside) -> None:
    """Id 0 arrives as the token that it is, at the end of a slot's tokens and where it is alone (case 10)."""
    steps = Steps(1)
    given = steps.accepted(2) | {
        "accept_tokens": np.array([[7, 0, 9], [0, 8, 8]]),
        "accept_num": np.array([2, 1], np.int32),
        "preempted_idx": np.zeros(2, np.int32),
        "skip_chunk_prefill": False,
    }
    beside.save("speculate_save_output", given)
    beside.get()
    (found,) = beside._getters["speculate_get_output"].arrays()
    assert found[1:4].tolist() == [2, 2, 1]
    assert found[2 + 256 :][:12].tolist() == [7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
