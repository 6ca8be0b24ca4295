"""The drop-in beside the kernel's own queue: the same random calls to both, the same tensors out, bit for bit."""

import secrets
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.engines.fastdeploy import campaign, kernel
from tests.engines.fastdeploy.bus import Beside, Getter, is_empty, same_bytes, save, speaking, stained
from tests.engines.fastdeploy.engine import Steps
from tests.engines.fastdeploy.theirs import FORMS, GETS, PACKS_SLOTS
from tests.engines.fastdeploy.undefined import Array
from tokenbus_engines import fastdeploy

MOST = {op: 256 if get == "speculate_get_output" else 512 for op, get in GETS.items()}


@pytest.mark.parametrize("seed", [7, secrets.randbits(31)], ids=["a seed that stays", "a seed of its own"])
@pytest.mark.parametrize("form", campaign.ALL_FORMS)
def test_random_steps_come_as_the_kernels_queue_has_them(
    form: str, seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is saved, by every op of every release, is got as from the kernel's queue.

    `make soak` does 100,000 such steps.
    """
    for name in ("INFERENCE_MSG_QUEUE_ID", "INFERENCE_MSG_ID"):
        monkeypatch.setenv(name, "1")  # the run changes both
    sys.stdout.write(f"--form {form} --steps 1000 --seed {seed}\n")
    with speaking(campaign.spoken(form), folder):
        campaign.run(form, 60, seed, most_slots=64)


@pytest.mark.parametrize("tensors", [False, True], ids=["arrays", "tensors"])
@pytest.mark.parametrize("op", GETS)
@pytest.mark.usefixtures("bus")
def test_every_op_at_every_size(op: str, tensors: bool) -> None:  # noqa: FBT001 - a parameter
    steps = Steps(7)
    with kernel.queue() as queue:
        beside = Beside(queue, tensors=tensors)
        for slots, columns in ((1, 1), (3, 21), (64, 6), (MOST[op], 2), (2, 21), (0, 3)):
            beside.save(op, steps.drawn(op, slots, columns))
            beside.get()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("real_k", [0, 1, 19])
@pytest.mark.parametrize("op", ["speculate_save_output_topk", "save_output_topk"])
def test_fewer_columns_are_got_than_were_saved(op: str, real_k: int, form: str, folder: Path) -> None:
    """As many columns are filled in as the form's reader looks at: those asked for, or since #7860 those saved."""
    steps = Steps(13)
    with speaking(form, folder), kernel.queue(form) as queue:
        beside = Beside(queue, k=real_k)
        for columns in (21, 1, 5):
            beside.save(op, steps.drawn(op, 6, columns))
            beside.get()


def test_lines_of_sampled_tokens_are_read_by_slot(beside: Beside) -> None:
    """[101] and [201, 202], a line for each slot, are those two, and not what lies behind one another."""
    lines = np.array([[101, 0], [201, 202]])
    flat = np.array([101, 201, 202])
    for sampled in (lines, flat, flat.reshape(-1, 1)):
        assert _saved_and_got(beside, sampled, [1, 2]) == [[101], [201, 202]]


@pytest.mark.parametrize(
    ("sampled", "numbers", "expected"),
    [
        ([[5], [6], [7]], [1, 0, 1], [[5], [], [7]]),
        ([[5], [7]], [1, 0, 1], [[5], [], [7]]),
        ([[5], [6], [7]], [1, 2], [[5], [6, 7]]),
        ([[5], [6], [7], [8]], [0, 1, 1, 0], [[], [6], [7], []]),
    ],
)
def test_column_of_sampled_tokens_is_read_as_the_counts_allow(
    sampled: list[list[int]], numbers: list[int], expected: list[list[int]], beside: Beside
) -> None:
    """A column is lines of one token where there is one for each slot and none has more, else it stands upright."""
    assert _saved_and_got(beside, np.array(sampled), numbers) == expected


def _saved_and_got(beside: Beside, sampled: Array, numbers: list[int]) -> list[list[int]]:
    """Save tokens, and return those of each slot."""
    slots, tokens = len(numbers), sum(numbers)
    scored, counts = Steps(5).scored(tokens, 2), np.array(numbers, np.int32)
    given = Steps(5).speculated(slots, 2) | {
        "sampled_token_ids": sampled,
        "logprob_token_ids": scored["ids"],
        "logprob_scores": scored["logprobs"],
        "logprob_ranks": scored["ranks"],
        "token_num_per_batch": counts,
        "cu_batch_token_offset": (np.cumsum(counts) - counts).astype(np.int32),
        "seq_lens_decoder": np.full(slots, 9, np.int32),
        "prompt_lens": np.full(slots, 4),
        "preempted_idx": np.zeros(slots, np.int32),
    }
    beside.save("speculate_save_output_topk", given)
    getter = beside.get()
    ids = getter.arrays()[0].reshape(-1)[3 + 512 :].reshape(512, 6, 21)
    return [ids[slot, :number, 0].tolist() for slot, number in enumerate(numbers)]


def test_offsets_of_the_slots_in_use_are_enough(beside: Beside) -> None:
    """Newer runners have a count for each slot there is, and offsets of those that are in use alone."""
    given = Steps(5).drawn("speculate_save_output_topk", 4, 2)
    given["token_num_per_batch"] = np.append(given["token_num_per_batch"], [0, 0]).astype(np.int32)
    for name in ("seq_lens_decoder", "prompt_lens", "preempted_idx"):
        given[name] = np.append(given[name].reshape(-1), [0, 0]).astype(given[name].dtype)
    given["sampled_token_ids"] = given["sampled_token_ids"].reshape(-1)
    beside.save("speculate_save_output_topk", given)
    beside.get_all()


@pytest.mark.parametrize("form", FORMS)
def test_more_columns_than_the_struct_has(form: str, folder: Path) -> None:
    """Two slots of 26 columns pass where the form packs their number, and are cut to 21 where its struct ends there."""
    with speaking(form, folder), kernel.queue(form) as queue:
        beside = Beside(queue)
        beside.save("save_output_topk", Steps(3).sampled(2, 26))
        field = int(beside.get().arrays()[0].reshape(-1)[1])
    assert field == (2 | 26 << 16 if form in PACKS_SLOTS else 2)


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


@pytest.mark.parametrize("form", ["2.5", "develop"])
def test_preempted_slot_is_so_in_all_columns(form: str, folder: Path) -> None:
    with speaking(form, folder), kernel.queue(form) as queue:
        beside = Beside(queue)
        for columns in (1, 4, 21):
            beside.save(
                "save_output_topk", Steps(3).sampled(3, columns) | {"preempted_idx": np.array([0, 1, 0], np.int32)}
            )
            beside.get()


@pytest.mark.usefixtures("bus")
def test_two_queues_of_one_id() -> None:
    """The speculative ops without scores have a queue of their own: FastDeploy makes its key from another path."""
    steps = Steps(4)
    order = ("speculate_save_output", "save_output", "mtp_save_first_token", "save_output_topk")
    for op in order:
        save(op, steps.drawn(op, 2, 3))
    for get in ("get_output", "get_output_topk", "speculate_get_output", "speculate_get_output"):
        Getter(get).get()
    assert is_empty()


@pytest.mark.parametrize("op", ["get_output", "get_output_topk", "speculate_get_output_topk"])
@pytest.mark.parametrize("saved", ["save_output", "save_output_topk", "speculate_save_output_topk"])
def test_get_of_another_kind_is_an_error_and_the_next_one_is_got(saved: str, op: str, beside: Beside) -> None:
    """A get op drops a message of another kind with an error; FastDeploy misreads it, or finds it again for ever."""
    steps = Steps(8)
    for _ in range(2):
        beside.save(saved, steps.drawn(saved, 3, 2))
    if GETS[saved] != op:
        beside.get_another_kind(beside.kernel.heads[0], op)
    beside.get_all()


def test_every_rank_gets_where_it_is_told_to(beside: Beside) -> None:
    op = "speculate_get_output"
    beside.save("speculate_save_output", Steps(8).accepted(3))
    beside.get_on_idle_rank(op, 1)
    (found,), (expected,) = stained(op), stained(op)
    fastdeploy.speculate_get_output(found, 1, True, True)  # noqa: FBT003 - by that engine's positions
    mask = beside.kernel.get([expected], rank=1, each_rank=True)
    same_bytes(op, 0, found, expected, mask)


@pytest.mark.parametrize("op", sorted(set(GETS.values())))
def test_empty_get_leaves_what_that_engines_leaves(op: str, beside: Beside) -> None:
    beside.get_nothing(op)


def test_first_token_at_a_later_step_is_none(beside: Beside) -> None:
    """A slot beyond its first step has no first token: FastDeploy sends again what was there before."""
    given = Steps(4).plain_first_tokens(3) | {
        "step_idx": np.array([[1], [2], [7]]),
        "seq_lens_decoder": np.full((3, 1), 9, np.int32),
        "prompt_lens": np.full((3, 1), 4),
    }
    beside.save("mtp_save_first_token", given)
    assert beside.get().arrays()[0][2:5].tolist() == [2, 0, 0]


def test_targets_and_drafts_in_any_order(beside: Beside) -> None:
    """Drafts before their targets, behind them, missing, doubled and alone come out as they went in (case 4, 12)."""
    steps = Steps(3)
    for flag in (4, 3, 3, 4, 4, 4, 3, 3, 3, 4):
        beside.save("speculate_save_output_topk", steps.speculated(5, 4, flag))
    beside.get_all()


@pytest.mark.parametrize("op", ["speculate_save_output", "speculate_save_output_topk"])
def test_slot_that_accepted_nothing_has_no_token(op: str, beside: Beside) -> None:
    counts = np.array([2, 0, 1], np.int32)
    given = Steps(4).drawn(op, 3, 2) | {
        "seq_lens_decoder": np.full(3, 9, np.int32),
        "prompt_lens": np.full(3, 4),
        "preempted_idx": np.zeros(3, np.int32),
    }
    given["accept_num" if op == "speculate_save_output" else "token_num_per_batch"] = counts
    if op != "speculate_save_output":
        scored = Steps(4).scored(3, 2)
        given |= {"sampled_token_ids": scored["ids"][:, 0].copy(), "logprob_token_ids": scored["ids"]}
        given |= {"logprob_scores": scored["logprobs"], "logprob_ranks": scored["ranks"]}
        given["cu_batch_token_offset"] = np.array([0, 2, 2], np.int32)
    beside.save(op, given)
    found = beside.get().arrays()[0].reshape(-1)
    meta = 2 if op == "speculate_save_output" else 3
    assert found[meta : meta + 3].tolist() == [2, 0, 1]


def test_idle_and_unrecoverable_steps(beside: Beside) -> None:
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


def test_ranks_that_share_a_queue_keep_their_order(folder: Path) -> None:
    """Where each rank saves its own, all come out in the one order in which they went in (case 6)."""
    steps = Steps(2)
    with speaking("2.5", folder), kernel.queue("2.5") as queue:
        beside = Beside(queue)
        for rank in (3, 0, 1, 1, 0, 7, 3):
            beside.save("speculate_save_output", steps.accepted(3) | {"rank_id": rank, "save_each_rank": True})
        assert len(queue) == 7
        beside.get_all()


@pytest.mark.parametrize("count", [12, 9])
def test_older_forms_of_the_save_op(count: int, beside: Beside) -> None:
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
    steps = Steps(5)
    for _ in range(4):
        arguments = steps.drawn(op, 5, 3)
        del arguments["preempted_idx"]
        beside.save(op, arguments)
        beside.get()


def test_uninitialised_scores_are_sent_as_they_are(beside: Beside) -> None:
    steps = Steps(9)
    for bits in (0xFFFFFFFF, 0x7F800000, 0):
        given = steps.sampled(4, 3)
        garbage = np.full((4, 3), bits, np.uint32).view(np.float32)
        beside.save("save_output_topk", given | {"logprobs": garbage, "ranks": np.full(4, bits, np.int64)})
    beside.get_all()


@pytest.mark.usefixtures("bus")
def test_queues_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(6)
    with kernel.queue() as one, kernel.queue() as two:
        queues = {"3": Beside(one), "4": Beside(two)}
        for name, beside in queues.items():
            monkeypatch.setenv("INFERENCE_MSG_QUEUE_ID", name)
            beside.save("save_output", steps.plain(3))
        for name, beside in reversed(queues.items()):
            monkeypatch.setenv("INFERENCE_MSG_QUEUE_ID", name)
            beside.get_all()


def test_engine_goes_on_with_its_own_arrays(beside: Beside) -> None:
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
    (found,) = beside.get().arrays()
    assert found[1:4].tolist() == [2, 2, 1]
    assert found[2 + 256 :][:12].tolist() == [7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
