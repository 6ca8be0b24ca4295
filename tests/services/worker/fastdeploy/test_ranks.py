"""Who sends, and what every rank clears, whatever happens in between."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.services.worker.fastdeploy import model
from tests.services.worker.fastdeploy.bus import Getter, save, settings_in
from tests.services.worker.fastdeploy.engine import Steps, Tensor
from tests.services.worker.fastdeploy.test_round_trip import OPS, drawn
from tokenbus_contracts import ContractError
from tokenbus_services.worker import RetentionFullError, fastdeploy
from tokenbus_services.worker.fastdeploy.process import PROCESS

WITH_PREEMPTED = [op for op in OPS if op != "mtp_save_first_token"]
WITH_EACH_RANK = [op for op in OPS if op != "save_output_topk"]


def call(op: str, arguments: dict[str, Any]) -> None:
    """Call a save op with the very arrays."""
    getattr(fastdeploy, op)(*arguments.values())


@pytest.mark.parametrize("tensors", [False, True], ids=["arrays", "tensors"])
@pytest.mark.parametrize("rank", [0, 1, 7])
@pytest.mark.parametrize("op", WITH_PREEMPTED)
@pytest.mark.usefixtures("bus")
def test_preempted_flags_are_cleared_on_every_rank(op: str, rank: int, tensors: bool) -> None:  # noqa: FBT001
    """A rank that does not send clears the flags as the one that does: the next step never sees them (case 7)."""
    arguments = drawn(op, Steps(1), 4, 3)
    flags: Any = np.array([[1], [0], [1], [0]], np.int32)
    arguments |= {"preempted_idx": Tensor(flags) if tensors else flags, "rank_id": rank}
    call(op, arguments)
    left = arguments["preempted_idx"]
    assert not (left.numpy() if tensors else left).any()
    assert len(PROCESS._senders) == (rank == 0)


@pytest.mark.parametrize("op", WITH_PREEMPTED)
@pytest.mark.usefixtures("bus")
def test_preempted_flags_are_cleared_when_a_step_is_refused(op: str) -> None:
    """What is wrong with a step is raised, and its flags are cleared all the same (case 7)."""
    arguments = drawn(op, Steps(1), 4, 3) | {"preempted_idx": np.ones((4, 1), np.int32)}
    arguments["not_need_stop"] = np.array([True, True])
    with pytest.raises(ContractError) as refused:
        call(op, arguments)
    assert str(refused.value) == "not_need_stop: one flag, got 2 elements"
    assert not arguments["preempted_idx"].any()


@pytest.mark.parametrize("op", WITH_EACH_RANK)
def test_only_rank_0_sends_unless_each_is_to(op: str, bus: Path) -> None:
    """Of the ranks that compute the same, one sends; where each has its own, each sends as itself (case 6)."""
    assert bus.exists()
    steps, getter = Steps(2), Getter(OPS[op])
    arguments = drawn(op, steps, 3, 4)
    for rank in (1, 2, 0):
        save(op, arguments | {"rank_id": rank})
    getter.check(getattr(model, op)(arguments))
    getter.get(wait=False)
    assert getter.arrays()[0].reshape(-1)[0] == -2
    own = drawn(op, steps, 3, 4)
    PROCESS.close()
    save(op, own | {"rank_id": 3, "save_each_rank": True})
    getter.check(getattr(model, op)(own))


@pytest.mark.parametrize("op", ["speculate_save_output_topk", "mtp_save_first_token_with_topk", "save_output"])
def test_full_retention_is_an_error_and_what_follows_arrives(op: str, folder: Path) -> None:
    """Where nobody takes messages and no more may wait, the engine is told, and then who gets (case 20, 21).

    A slot whose tokens were lost is told as not to be recovered, once, and what follows that is whole.
    """
    settings = settings_in(folder, worker__policy="fail", worker__retention_items=3)
    fastdeploy.configure(fastdeploy.Options(settings=settings))
    steps, getter = Steps(4), Getter(OPS[op])
    try:
        given = [plenty(drawn(op, steps, 4, 3)) for _ in range(5)]
        for arguments in given[:2]:
            save(op, arguments)
        flags = np.array([0, 0, 0, 1], np.int32)
        with pytest.raises(RetentionFullError, match="retention: no room \\(policy fail\\): 3 items"):
            call(op, given[2] | {"preempted_idx": flags})
        assert not flags.any()
        for arguments in given[:2]:
            getter.check(getattr(model, op)(arguments))
        _wait_until_empty()
        save(op, given[3])
        getter.get()
        meta = 3 if OPS[op] == "speculate_get_output_topk" else 2
        assert getter.arrays()[0].reshape(-1)[meta : meta + 4].tolist() == [-3] * 4
        save(op, given[4])
        later = Getter(OPS[op])
        later.check(getattr(model, op)(given[4]))
    finally:
        fastdeploy.close()
        fastdeploy.configure(fastdeploy.Options())


def plenty(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with a token for each of four slots, which are at their end and not preempted."""
    changes: dict[str, Any] = {
        "preempted_idx": np.zeros((4, 1), np.int32),
        "seq_lens_decoder": np.full((4, 1), 9, np.int32),
        "not_need_stop": np.array([True]),
    }
    if "token_num_per_batch" in arguments:
        scored = Steps(1).scored(4, 3)
        changes |= {"logprob_token_ids": scored["ids"], "logprob_scores": scored["logprobs"]}
        changes |= {"logprob_ranks": scored["ranks"], "token_num_per_batch": np.ones(4, np.int32)}
        changes |= {"cu_batch_token_offset": np.arange(4, dtype=np.int32)}
        changes |= {"sampled_token_ids": np.column_stack([scored["ids"][:, 0], [5, 6, 7, 8]])}
        if arguments["sampled_token_ids"].shape[1] == 1:
            changes["sampled_token_ids"] = scored["ids"][:, :1].copy()
    else:
        changes["sampled_token_ids"] = np.array([[5], [6], [0], [8]])
    return arguments | {name: value for name, value in changes.items() if name in arguments}


def _wait_until_empty() -> None:
    """Wait until all that was published is acknowledged: the next message then has room."""
    publisher = PROCESS.sender(0).publisher
    with publisher._room:
        assert publisher._room.wait_for(lambda: not publisher.retention, 20)
