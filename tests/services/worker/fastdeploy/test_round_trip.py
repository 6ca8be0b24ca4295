"""What is saved is got again, element by element as that engine's own queue would have given it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.services.worker.fastdeploy import model
from tests.services.worker.fastdeploy.bus import Getter, save
from tests.services.worker.fastdeploy.engine import Steps
from tokenbus_services.worker import fastdeploy
from tokenbus_services.worker.fastdeploy.process import PROCESS

OPS = {
    "speculate_save_output_topk": "speculate_get_output_topk",
    "mtp_save_first_token_with_topk": "speculate_get_output_topk",
    "save_output_topk": "get_output_topk",
    "speculate_save_output": "speculate_get_output",
    "mtp_save_first_token": "speculate_get_output",
    "save_output": "get_output",
}
MOST_SLOTS = 9
MOST = {op: 256 if get == "speculate_get_output" else 512 for op, get in OPS.items()}


def drawn(op: str, steps: Steps, slots: int, columns: int) -> dict[str, Any]:
    """Return the arguments of a save op."""
    match op:
        case "speculate_save_output_topk":
            return steps.speculated(slots, columns)
        case "mtp_save_first_token_with_topk":
            return steps.first_tokens(slots, columns)
        case "save_output_topk":
            return steps.sampled(slots, columns)
        case "speculate_save_output":
            return steps.accepted(slots)
        case "mtp_save_first_token":
            return steps.plain_first_tokens(slots)
        case _:
            return steps.plain(slots)


def sent_by(op: str, arguments: dict[str, Any]) -> model.Sent:
    """Return what that engine's own op sends."""
    found: model.Sent = getattr(model, op)(arguments)
    return found


@pytest.mark.parametrize("tensors", [False, True], ids=["arrays", "tensors"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.usefixtures("bus")
def test_steps_come_as_they_were_saved(op: str, tensors: bool) -> None:  # noqa: FBT001 - a parameter
    """Every field of every message, of few slots and of as many as there may be, is what that engine's own is."""
    steps, getter = Steps(7), Getter(OPS[op], tensors=tensors)
    for slots, columns in ((1, 1), (3, 21), (64, 6), (MOST[op], 2), (2, 21), (0, 3)):
        arguments = drawn(op, steps, slots, columns)
        save(op, arguments, tensors=tensors)
        getter.check(sent_by(op, arguments))


@pytest.mark.parametrize("op", OPS)
def test_slots_are_used_again_in_any_order(op: str, bus: Path) -> None:
    """Whatever becomes of slots from step to step all of it arrives, and no request but a slot's last is left open."""
    steps, getter = Steps(11), Getter(OPS[op])

    @settings(max_examples=15)
    @given(st.lists(st.integers(1, MOST_SLOTS), min_size=1, max_size=8), st.integers(1, 21))
    def _check(slots: list[int], columns: int) -> None:
        sent = []
        for count in slots:
            arguments = drawn(op, steps, count, columns)
            save(op, arguments)
            sent.append(sent_by(op, arguments))
        for message in sent:
            getter.check(message)

    assert bus.exists()
    _check()
    book = PROCESS.receiver().processor.book
    assert len(book.table) <= MOST_SLOTS
    assert book.table.peak <= 3 * MOST_SLOTS
    assert (book.counts.failed, book.router.counts.late, book.router.counts.repeated) == ({}, 0, 0)


@pytest.mark.parametrize("count", [12, 9])
@pytest.mark.usefixtures("bus")
def test_older_forms_of_the_save_op(count: int) -> None:
    """Without preempted_idx, and without the lengths too, the op takes what it is given by how much there is."""
    steps, getter = Steps(3), Getter("speculate_get_output_topk")
    for _ in range(4):
        arguments = steps.speculated(5, 4)
        missing = ["preempted_idx", *(["seq_lens_decoder", "prompt_lens", "save_each_rank"] if count == 9 else [])]
        older = {name: value for name, value in arguments.items() if name not in missing}
        assert len(older) == count
        save("speculate_save_output_topk", older)
        getter.check(model.speculate_save_output_topk(older))


@pytest.mark.parametrize("op", ["save_output_topk", "save_output", "speculate_save_output"])
@pytest.mark.usefixtures("bus")
def test_older_forms_without_preempted_slots(op: str) -> None:
    """An op whose earlier form has no preempted_idx is the same without it."""
    steps, getter = Steps(5), Getter(OPS[op])
    for _ in range(4):
        arguments = drawn(op, steps, 5, 3)
        del arguments["preempted_idx"]
        save(op, arguments)
        getter.check(sent_by(op, arguments))


@pytest.mark.parametrize("real_k", [0, 1, 19])
@pytest.mark.usefixtures("bus")
def test_fewer_columns_are_got_than_were_saved(real_k: int) -> None:
    """As many alternatives are filled in as were asked for, and counted so, however many were saved."""
    steps, getter = Steps(13), Getter("speculate_get_output_topk", k=real_k)
    for columns in (21, 1, 5):
        arguments = steps.speculated(6, columns)
        save("speculate_save_output_topk", arguments)
        getter.check(model.speculate_save_output_topk(arguments))


@pytest.mark.usefixtures("bus")
def test_token_id_0_is_a_token() -> None:
    """Id 0 arrives as the token that it is, at the end of a slot's tokens and where it is alone (case 10)."""
    getter = Getter("speculate_get_output")
    lengths = np.array([5, 5], np.int32), np.array([4, 4])
    tokens = np.array([[7, 0, 9], [0, 8, 8]])
    numbers, flags = np.array([2, 1], np.int32), np.zeros(2, np.int32)
    save("speculate_save_output", dict(enumerate([tokens, numbers, np.array([True]), *lengths, flags, 0, False, True])))
    getter.get()
    (found,) = getter.arrays()
    assert found[:4].tolist() == [1, 2, 2, 1]
    assert found[2 + 256 :][:12].tolist() == [7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.usefixtures("bus")
def test_alternatives_that_tie_and_lowest_logprobs() -> None:
    """Alternatives of one value come by the lower id, and minus infinity as the lowest that is told (case 33)."""
    getter = Getter("get_output_topk")
    lowest = -np.inf
    ids = np.array([[5, 5, 9, 2], [8, 3, 7, 1]])
    logprobs = np.array([[-1, -1, -2, -2], [lowest, -0.5, lowest, lowest]], np.float32)
    ranks = np.array([1, 4])
    save("save_output_topk", dict(enumerate([ids[:, :1], ids, logprobs, ranks, np.array([True]), 0])))
    getter.get()
    tokens, scores, _ = getter.arrays()
    assert tokens[2:, 0].reshape(-1, 21)[:2, :4].tolist() == [[5, 5, 2, 9], [8, 3, 1, 7]]
    assert scores[:, 0].reshape(-1, 21)[:2, :4].tolist() == [[-1, -1, -2, -2], [-9999, -0.5, -9999, -9999]]


@pytest.mark.usefixtures("bus")
def test_token_that_took_the_place_of_the_scored_one() -> None:
    """An end token that was put in at a request's longest output comes with its own logprob, where that is known."""
    getter = Getter("get_output_topk")
    ids = np.array([[5, 5, 9], [6, 6, 4]])
    logprobs = np.array([[-1, -1, -2], [-1, -1, -2]], np.float32)
    sampled = np.array([[9], [100]])
    save("save_output_topk", dict(enumerate([sampled, ids, logprobs, np.array([1, 1]), np.array([True]), 0])))
    getter.get()
    tokens, scores, ranks = getter.arrays()
    assert tokens[2:, 0].reshape(-1, 21)[:2, :3].tolist() == [[9, 5, 9], [100, 6, 4]]
    assert scores[:, 0].reshape(-1, 21)[:2, 0].tolist() == [-2, -1]
    assert ranks[:2].tolist() == [2, 1]


@pytest.mark.usefixtures("bus")
def test_get_side_comes_again() -> None:
    """After the get side was started anew the messages go on, at the latest where it stood (case 21)."""
    steps, getter = Steps(5), Getter("speculate_get_output_topk")
    sent = []
    for _ in range(4):
        arguments = steps.speculated(6, 4)
        save("speculate_save_output_topk", arguments)
        sent.append(model.speculate_save_output_topk(arguments))
    for message in sent[:2]:
        getter.check(message)
    PROCESS.receiver().close()
    PROCESS._receiver = None
    later = Getter("speculate_get_output_topk")
    later.get()
    counts = later.arrays()[0][3:9, 0].tolist()
    first = [message.counts for message in sent].index(counts)
    assert first <= 2  # what was got and not acknowledged yet may come twice, and nothing is left out
    later.assume(sent[first])
    for message in sent[first + 1 :]:
        later.check(message)


@pytest.mark.usefixtures("bus")
def test_engine_goes_on_with_its_own_arrays() -> None:
    """What the engine writes into its arrays after a save changes nothing in what was saved."""
    steps, getter = Steps(9), Getter("speculate_get_output_topk")
    arguments = steps.speculated(6, 4)
    expected = model.speculate_save_output_topk(arguments)
    fastdeploy.speculate_save_output_topk(*arguments.values())
    for value in arguments.values():
        if isinstance(value, np.ndarray):
            value[...] = 1
    getter.check(expected)
