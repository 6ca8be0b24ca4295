"""What that engine's ops passed over in silence is one clear error here, and nothing of the step is sent."""

import signal
import threading
from typing import Any

import numpy as np
import pytest

from tests.engines.fastdeploy.bus import MOST_SECONDS, Beside, save
from tests.engines.fastdeploy.engine import FIRST, PLAIN, TOPK, outputs, whole
from tokenbus.engines import fastdeploy
from tokenbus_contracts import ContractError

DO_NOT_WAIT, WAIT = False, True
WRITABLE = "a tensor of paddle or an array of numpy to write to"


def ints(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.int32)


def zeros(shape: int | tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.zeros(shape, np.int64)


WRONG: list[tuple[str, str, Any, str]] = [
    (TOPK, "token_num_per_batch", ints(2, 7), "[1]: at most 6, got 7"),
    (TOPK, "token_num_per_batch", np.zeros(513, np.int32), ": at most 512 slots, got 513"),
    (TOPK, "logprob_token_ids", zeros(12), ": 2 dimensions, got shape (12,)"),
    (TOPK, "cu_batch_token_offset", ints(0, 3), "[1]: a start that leaves 2 of 4 tokens, got 3"),
    (TOPK, "cu_batch_token_offset", ints(-1, 2), "[0]: a start that leaves 2 of 4 tokens, got -1"),
    (TOPK, "cu_batch_token_offset", ints(0), ": 2 elements, one for each slot, got 1"),
    (TOPK, "seq_lens_decoder", ints(9), ": 2 elements, one for each slot, got 1"),
    (TOPK, "prompt_lens", np.array([4]), ": 2 elements, one for each slot, got 1"),
    (TOPK, "preempted_idx", np.zeros(1, np.int32), ": 2 elements, one for each slot, got 1"),
    (TOPK, "logprob_ranks", np.array([1, 2, 3]), ": 4 lines of 1, one for each token, got 3"),
    (TOPK, "logprob_token_ids", zeros((3, 3)), ": 4 lines of 3, one for each token, got 3"),
    (TOPK, "logprob_scores", np.zeros((4, 2), np.float32), ": 4 lines of 3, one for each token, got 2"),
    (TOPK, "logprob_scores", zeros((4, 3)), ": float32, got int64"),
    (TOPK, "logprob_token_ids", np.zeros((4, 3), np.float32), ": int64, got float32"),
    (TOPK, "not_need_stop", np.zeros(0, np.bool_), ": one flag, got none"),
    (TOPK, "token_num_per_batch", np.array(2, np.int32), ": 1 dimension, got shape ()"),
    (TOPK, "token_num_per_batch", np.array(2, ">i4"), ": 1 dimension, got shape ()"),
    (TOPK, "sampled_token_ids", zeros((2, 0)), "[0]: a line of at least 2 tokens, got 0"),
    (TOPK, "message_flag", None, ": a whole number, got NoneType"),
    (TOPK, "message_flag", 2**70, f": a whole number of 64 bits, got {2**70}"),
    (TOPK, "rank_id", "0", ": a whole number, got str"),
    (TOPK, "preempted_idx", [0, 0], ": a tensor of paddle or an array of numpy to write to, got list"),
    (FIRST, "token_num_per_batch", ints(2, 6), "[1]: at most 5, got 6"),
    (FIRST, "sampled_token_ids", np.array([[5, 6, 7]]), ": 2 lines, one for each slot, got 1"),
    (FIRST, "cu_batch_token_offset", ints(0, 4), "[1]: a start that leaves 1 of 4 tokens, got 4"),
    (PLAIN, "accept_num", ints(2, 7), "[1]: at most 6, got 7"),
    (PLAIN, "accept_num", np.array([2, 2**40]), f": a number of int32, got {2**40}"),
    (TOPK, "sampled_token_ids", zeros((2, 1, 1)), ": 1 or 2 dimensions, got shape (2, 1, 1)"),
    (TOPK, "logprob_token_ids", zeros((4, 0)), ": at least 1 column, got 0"),
    (PLAIN, "accept_tokens", zeros((257, 6)), ": at most 256 slots, got 257"),
    (PLAIN, "accept_tokens", np.array([5, 6]), ": 2 dimensions, got shape (2,)"),
    (PLAIN, "accept_tokens", np.array([[5], [6]]), "[0]: a line of at least 2 tokens, got 1"),
    (PLAIN, "accept_tokens", zeros((2, 0)), "[0]: a line of at least 2 tokens, got 0"),
    ("mtp_save_first_token", "base_model_draft_tokens", np.array([[5], [6]]), "[0]: a line of at least 2 tokens, got 1"),  # noqa: E501
    ("mtp_save_first_token", "base_model_draft_tokens", zeros((2, 0)), "[0]: a line of at least 2 tokens, got 0"),
    ("save_output", "sampled_token_ids", zeros((513, 1)), ": at most 512 slots, got 513"),
    ("save_output_topk", "logprobs", np.zeros((1, 3), np.float32), ": 2 lines of 3, one for each token, got 1"),
]  # fmt: skip
"""The op, an argument and what is wrong with it: the error behind the argument's name."""


def test_step_that_does_not_fit_is_refused_whole(beside: Beside) -> None:
    """One line names the field, the limit and the value, and the next step is got as if that one had never been.

    More than its arrays hold is found before anything is written (case 5, 26, 28, 30).
    """
    for op, name, value, message in WRONG:
        right = whole(op, 2, 2)
        with pytest.raises(ContractError) as refused:
            save(op, right | {name: value})
        assert str(refused.value) == f"{op}.{name}{message}"
        beside.save(op, right)
        beside.get_all()


def test_flag_keeps_to_its_bits(beside: Beside) -> None:
    """A message flag above 255 does not fall into the count of columns, which has the bits above (case 29)."""
    for flag in (3, 4, 3 + 256, 4 | 1 << 8):
        beside.save(TOPK, whole(TOPK, 2, 2) | {"message_flag": flag})
        field = int(beside.get().arrays()[0][1, 0])
        assert (field & 0xFF, field >> 8) == (flag & 0xFF, 3)


def test_form_of_an_op_that_is_not_known() -> None:
    known = {TOPK: "13, 12 or 9", FIRST: "13", PLAIN: "9 or 8", "mtp_save_first_token": "8"}
    for op, counts in (known | {"save_output_topk": "7 or 6", "save_output": "5 or 4"}).items():
        with pytest.raises(TypeError, match=f"^{op}: {counts} arguments, got 10$"):
            getattr(fastdeploy, op)(*range(10))


@pytest.mark.usefixtures("bus")
def test_tensors_to_get_into_are_checked_first() -> None:
    get: Any = fastdeploy.speculate_get_output_topk
    tokens, scores, ranks = outputs("speculate_get_output_topk")
    frozen = tokens.copy()
    frozen.flags.writeable = False
    wrong: list[tuple[list[Any], str]] = [
        ([tokens[:100], scores, ranks], "tokens: at least 65027 elements, got 100"),
        ([tokens, scores.astype(np.float64), ranks], "scores: float32, got float64"),
        ([tokens, scores, ranks[::-1]], "ranks: an array that is contiguous, got one that is not"),
        ([frozen, scores, ranks], f"tokens: {WRITABLE}, got one that is read-only"),
        ([tokens, scores.tolist(), ranks], f"scores: {WRITABLE}, got list"),
        ([tokens.astype(">i8"), scores, ranks], "tokens: int64, got >i8"),
    ]
    save(TOPK, whole(TOPK, 2, 2))
    for given, message in wrong:
        with pytest.raises(ContractError) as refused:
            get(*given, 20, 0, DO_NOT_WAIT)
        assert str(refused.value) == f"speculate_get_output_topk.output_{message}"
    for k, got in ((21, "0 to 20, got 21"), (None, "a whole number, got NoneType")):
        with pytest.raises(ContractError) as refused:
            get(tokens, scores, ranks, k, 0, DO_NOT_WAIT)
        assert str(refused.value) == f"speculate_get_output_topk.real_k: {got}"
    get(tokens, scores, ranks, 20, 0, WAIT)  # what was saved is still there
    assert tokens[1:3, 0].tolist() == [3 | 3 << 8, 2]


@pytest.mark.usefixtures("bus")
def test_threads_that_get_share_what_was_saved() -> None:
    messages, threads = 300, 3
    found: list[list[int]] = [[] for _ in range(threads)]

    def get(into: list[int]) -> None:
        (tokens,) = outputs("get_output")
        while not into or into[-1] >= 0:
            fastdeploy.get_output(tokens, 0, WAIT)
            into.append(int(tokens[2, 0]))

    getting = [threading.Thread(target=get, args=(into,)) for into in found]
    for thread in getting:
        thread.start()
    for number in (*range(messages), *[-7] * threads):
        fastdeploy.save_output(np.array([[number]]), np.array([True]), np.zeros(1, np.int32), 0, False)  # noqa: FBT003
    for thread in getting:
        thread.join(MOST_SECONDS)
    assert all(into == [*sorted(into[:-1]), -7] for into in found)
    assert sorted(number for into in found for number in into[:-1]) == list(range(messages))


@pytest.mark.usefixtures("bus")
def test_get_that_a_signal_interrupts_leaves_the_next_one_as_it_was() -> None:
    interrupts = 0

    def handler(*_: object) -> None:
        raise InterruptedError

    (tokens,) = outputs("get_output")
    before = signal.signal(signal.SIGALRM, handler)
    try:
        for microseconds in range(400):
            try:
                signal.setitimer(signal.ITIMER_REAL, (1 + microseconds % 40) / 1e6)
                while True:
                    fastdeploy.get_output(tokens, 0, DO_NOT_WAIT)
            except InterruptedError:
                interrupts += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupts > 0
    fastdeploy.save_output(np.array([[5]]), np.array([True]), np.zeros(1, np.int32), 0, False)  # noqa: FBT003
    fastdeploy.get_output(tokens, 0, WAIT)
    assert tokens[1:3, 0].tolist() == [1, 5]


@pytest.mark.usefixtures("bus")
def test_get_that_does_not_wait_returns_while_another_thread_waits() -> None:
    (waiting,), (tokens,) = outputs("get_output"), outputs("get_output")
    begun = threading.Event()

    def wait() -> None:
        begun.set()
        fastdeploy.get_output(waiting, 0, WAIT)

    thread = threading.Thread(target=wait)
    thread.start()
    assert begun.wait(MOST_SECONDS)
    for _ in range(200):
        fastdeploy.get_output(tokens, 0, DO_NOT_WAIT)
        assert tokens[0, 0] == -2
    fastdeploy.save_output(np.array([[5]]), np.array([True]), np.zeros(1, np.int32), 0, False)  # noqa: FBT003
    thread.join(MOST_SECONDS)
    assert waiting[1:3, 0].tolist() == [1, 5]


@pytest.mark.usefixtures("bus")
def test_keys_slots_and_choices_are_checked() -> None:
    with pytest.raises(ContractError, match="slot: 0 to 511, got 512"):
        fastdeploy.assign(512, 1)
    with pytest.raises(ContractError, match="request_id: 1 to 18446744073709551615, got 0"):
        fastdeploy.assign(0, 0)
    save(TOPK, whole(TOPK, 2, 2))
    with pytest.raises(RuntimeError, match="before the first save or get"):
        fastdeploy.configure(fastdeploy.Options())
