"""The drop-in beside the kernel's own queue: the same random calls to both, the same tensors out, bit for bit."""

import secrets
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engines.fastdeploy import campaign, kernel
from tests.engines.fastdeploy.bus import Beside, Getter, same_bytes, save, speaking, stained
from tests.engines.fastdeploy.engine import FIRST, PLAIN, TOPK, Steps, whole
from tests.engines.fastdeploy.theirs import FORMS, GETS
from tests.support.campaigns import IS_SOAK, many
from tokenbus.engines import fastdeploy

MOST = {op: 256 if get == "speculate_get_output" else 512 for op, get in GETS.items()}


@pytest.mark.parametrize("form", campaign.ALL_FORMS * many(50, 1))
def test_random_steps_come_as_the_kernels_queue_has_them(
    form: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is saved, by every op of every release, is got as from the kernel's queue.

    `make soak` does 100,000 such steps, most of them with more slots.
    """
    seed = secrets.randbits(31)
    steps, most_slots = (300, 512) if IS_SOAK else (30, 32)
    for name in ("INFERENCE_MSG_QUEUE_ID", "INFERENCE_MSG_ID"):
        monkeypatch.setenv(name, "1")  # the run changes both
    sys.stdout.write(f"to repeat it: campaign.run({form!r}, {steps}, {seed}, most_slots={most_slots})\n")
    with speaking(campaign.spoken(form), folder):
        campaign.run(form, steps, seed, most_slots=most_slots)


@pytest.mark.usefixtures("bus")
def test_every_op_at_every_size() -> None:
    """Given as arrays, or as tensors that lie elsewhere."""
    steps = Steps(7)
    with kernel.queue() as queue:
        for op in GETS:
            for tensors, sizes in ((True, [(1, 1), (3, 21)]), (False, [(64, 6), (MOST[op], 2), (2, 21), (0, 3)])):
                beside = Beside(queue, tensors=tensors)
                for slots, columns in sizes:
                    beside.save(op, steps.drawn(op, slots, columns))
                    beside.get()


@pytest.mark.parametrize("form", FORMS)
def test_fewer_columns_are_got_than_were_saved(form: str, folder: Path) -> None:
    """As many columns are filled in as the form's reader looks at: those asked for, or since #7860 those saved."""
    steps = Steps(13)
    with speaking(form, folder), kernel.queue(form) as queue:
        for real_k in (0, 1, 19):
            beside = Beside(queue, k=real_k)
            for op, columns in product(("speculate_save_output_topk", "save_output_topk"), (21, 1, 5)):
                beside.save(op, steps.drawn(op, 6, columns))
                beside.get()


def test_sampled_tokens_are_read_in_lines_or_flat(beside: Beside) -> None:
    """A column is lines of one token where there is one for each slot and none has more, else it is flat."""
    cases: list[tuple[list[Any], list[int], list[list[int]]]] = [
        ([[101, 0], [201, 202]], [1, 2], [[101], [201, 202]]),
        ([101, 201, 202], [1, 2], [[101], [201, 202]]),
        ([[101], [201], [202]], [1, 2], [[101], [201, 202]]),
        ([[5], [6], [7]], [1, 0, 1], [[5], [], [7]]),
        ([[5], [7]], [1, 0, 1], [[5], [], [7]]),
        ([[5], [6], [7], [8]], [0, 1, 1, 0], [[], [6], [7], []]),
    ]
    for sampled, numbers, expected in cases:
        beside.save(TOPK, whole(TOPK, *numbers) | {"sampled_token_ids": np.array(sampled)})
        ids = beside.get().arrays()[0].reshape(-1)[3 + 512 :].reshape(512, 6, 21)
        assert [ids[slot, :number, 0].tolist() for slot, number in enumerate(numbers)] == expected


CARRIED: list[tuple[str, dict[str, Any]]] = [
    (TOPK, {"token_num_per_batch": np.array([-1, 2], np.int32)}),
    (TOPK, {"token_num_per_batch": np.array([-3, -3], np.int32), "not_need_stop": np.array([False])}),
    (TOPK, {"message_flag": 7}),
    (TOPK, {"cu_batch_token_offset": np.array([2, 0], np.int32)}),
    (TOPK, {"cu_batch_token_offset": np.array([1, 1], np.int32)}),
    (TOPK, {"sampled_token_ids": np.array([5, -1, 6, 7])}),
    (TOPK, {"logprob_scores": np.full((4, 3), np.nan, np.float32)}),
    (TOPK, {"logprob_ranks": np.array([0, -1, 2**31, 3])}),
    (FIRST, {"message_flag": 4}),
    (FIRST, {"token_num_per_batch": np.array([2, -3], np.int32)}),
    (PLAIN, {"accept_tokens": np.array([[5, 6, 7, 8], [-1, -1, -1, -1]])}),
    (PLAIN, {"accept_num": np.array([2, 0], np.int32)}),
    (PLAIN, {"skip_chunk_prefill": np.True_, "seq_lens_decoder": np.array([1, 9], np.int32)}),
    ("save_output", {"sampled_token_ids": np.array([[5], [-2]])}),
    ("save_output", {"sampled_token_ids": np.ones((2, 2), np.int64)}),
    # Logprobs that were not asked for: whatever lies in memory.
    ("save_output_topk", {"logprobs": np.full((2, 3), 0xFFFFFFFF, np.uint32).view(np.float32)}),
    ("save_output_topk", {"ranks": np.full(2, 0x7F800000)}),
    # Newer runners have a count for each slot there is, and offsets of those in use alone.
    (TOPK, {"token_num_per_batch": np.array([2, 0], np.int32), "cu_batch_token_offset": np.zeros(1, np.int32)}),
]


def test_what_the_kernels_queue_carries_is_carried(beside: Beside) -> None:
    for op, changes in CARRIED:
        beside.save(op, whole(op, 2, 2) | changes)
        beside.get_all()


def test_older_forms_of_the_save_ops(beside: Beside) -> None:
    newer = ["preempted_idx"]
    cases = [(op, newer) for op in (TOPK, "save_output_topk", "save_output", PLAIN)]
    for op, missing in [*cases, (TOPK, [*newer, "seq_lens_decoder", "prompt_lens", "save_each_rank"])]:
        given = Steps(3).drawn(op, 5, 4)
        beside.save(op, {name: value for name, value in given.items() if name not in missing})
        beside.get_all()


@pytest.mark.usefixtures("bus")
def test_columns_are_cut_where_the_struct_has_no_place() -> None:
    """More columns than FastDeploy's struct has places for are cut to 21: it would write past its end."""
    for op, slots in (("save_output_topk", 512), ("speculate_save_output_topk", 3)):
        given, getter = Steps(3).drawn(op, slots, 26), Getter(GETS[op])
        name = "logprobs" if op == "save_output_topk" else "logprob_scores"
        cut = {key: np.ascontiguousarray(given[key][:, :21]) for key in ("logprob_token_ids", name)}
        save(op, given)
        getter.get()
        found = [array.copy() for array in getter.arrays()]
        field = int(found[0].reshape(-1)[1])
        assert field == (slots | 21 << 16 if op == "save_output_topk" else 3 | 21 << 8)
        save(op, given | cut)
        getter.get()
        for wide, narrow in zip(found, getter.arrays(), strict=True):
            np.testing.assert_array_equal(wide, narrow)


def test_every_rank_gets_where_it_is_told_to(beside: Beside) -> None:
    op = "speculate_get_output"
    beside.save("speculate_save_output", Steps(8).drawn(PLAIN, 3))
    beside.get_on_idle_rank(op, 1)
    (found,), (expected,) = stained(op), stained(op)
    fastdeploy.speculate_get_output(found, 1, True, True)  # noqa: FBT003 - by that engine's positions
    mask = beside.kernel.get([expected], rank=1, each_rank=True)
    same_bytes(op, 0, found, expected, mask)


def test_first_token_at_a_later_step_is_none(beside: Beside) -> None:
    """A slot beyond its first step has no first token: FastDeploy sends again what was there before."""
    op = "mtp_save_first_token"
    beside.save(op, whole(op, 1, 1, 1) | {"step_idx": np.array([[1], [2], [7]])})
    assert beside.get().arrays()[0][2:5].tolist() == [2, 0, 0]


def test_engine_goes_on_with_its_own_arrays(beside: Beside) -> None:
    arguments = Steps(9).drawn(TOPK, 6, 4)
    beside.kernel.save("speculate_save_output_topk", arguments)
    fastdeploy.speculate_save_output_topk(*arguments.values())
    for value in arguments.values():
        if isinstance(value, np.ndarray):
            value[...] = 1
    beside.get()


def test_token_id_0_is_a_token(beside: Beside) -> None:
    """Id 0 arrives as the token that it is, at the end of a slot's tokens and where it is alone (case 10)."""
    beside.save(PLAIN, whole(PLAIN, 2, 1) | {"accept_tokens": np.array([[7, 0, 9], [0, 8, 8]])})
    (found,) = beside.get().arrays()
    assert found[1:4].tolist() == [2, 2, 1]
    assert found[2 + 256 :][:12].tolist() == [7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
