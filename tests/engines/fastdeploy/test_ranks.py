"""Which rank sends, what every rank clears, whatever happens in between, and what a full queue means."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engines.fastdeploy import kernel
from tests.engines.fastdeploy.bus import MOST_SECONDS, Beside, Getter, save, speaking
from tests.engines.fastdeploy.engine import TOPK, Steps, Tensor, whole
from tests.engines.fastdeploy.theirs import FORMS, GETS
from tokenbus.engines import fastdeploy
from tokenbus.engines.fastdeploy.message import Kind
from tokenbus.engines.fastdeploy.process import PROCESS
from tokenbus.worker import RetentionFullError
from tokenbus_contracts import ContractError

WITH_PREEMPTED = [op for op in GETS if op != "mtp_save_first_token"]


def call(op: str, arguments: dict[str, Any]) -> None:
    getattr(fastdeploy, op)(*arguments.values())


@pytest.mark.parametrize("op", WITH_PREEMPTED)
@pytest.mark.usefixtures("bus")
def test_preempted_flags_are_cleared_on_every_rank(op: str) -> None:
    """A rank that does not send clears the flags as the one that does: the next step never sees them (case 7)."""
    for rank in (7, 0):
        flags: Any = np.array([[1], [0], [1], [0]], np.int32)
        for given in (flags, Tensor(flags)):
            call(op, Steps(1).drawn(op, 4, 3) | {"preempted_idx": given, "rank_id": rank})
            assert not (given.numpy() if isinstance(given, Tensor) else given).any()
        assert fastdeploy.counts().get("saved", 0) == (0 if rank else 2)


@pytest.mark.usefixtures("bus")
def test_preempted_flags_are_cleared_when_a_step_is_refused() -> None:
    """What is wrong with a step is raised, and its flags are cleared all the same (case 7)."""
    for op in WITH_PREEMPTED:
        arguments = Steps(1).drawn(op, 4, 3) | {"preempted_idx": np.ones((4, 1), np.int32)}
        arguments["not_need_stop"] = np.zeros(0, np.bool_)
        with pytest.raises(ContractError) as refused:
            call(op, arguments)
        assert str(refused.value) == f"{op}.not_need_stop: one flag, got none"
        assert not arguments["preempted_idx"].any()


@pytest.mark.parametrize("form", FORMS)
def test_only_the_ranks_send_that_do_in_a_release(form: str, folder: Path) -> None:
    """Of the ranks that compute the same, one sends; where each has its own, each sends as itself (case 6).

    Since #7172 `save_each_rank` is heeded by the first-token ops alone: else each step is got twice.
    """
    steps = Steps(2)
    with speaking(form, folder), kernel.queue(form) as queue:
        beside = Beside(queue)
        for op in GETS:
            for rank in (1, 2, 0):
                beside.save(op, steps.drawn(op, 3, 21) | {"rank_id": rank})
            assert len(queue) == 1
            beside.get_all()
            if "save_each_rank" in steps.drawn(op, 1, 1):
                beside.save(op, steps.drawn(op, 3, 21) | {"rank_id": 3, "save_each_rank": True})
                heeds = "first_token" in op or (op.startswith("speculate") and form in {"2.4", "2.5"})
                assert len(queue) == heeds
                beside.get_all()


@pytest.mark.parametrize("op", GETS)
def test_full_queue_is_an_error_and_what_follows_arrives(op: str, folder: Path) -> None:
    """Where no process gets and no more may wait, the engine gets an error, and the get side a -3 (case 20, 21).

    A slot whose tokens were lost is said to be not recoverable, once, and what follows that is whole.
    """
    getter, given = Getter(GETS[op]), whole(op, 1, 1, 1, 1)
    with speaking(None, folder, worker__policy="fail", worker__retention_items=2), kernel.queue() as queue:
        beside = Beside(queue)
        for _ in range(2):
            beside.save(op, given)
        flags = np.array([0, 0, 0, 1], np.int32)
        changes = {"preempted_idx": flags} if "preempted_idx" in given else {}
        with pytest.raises(RetentionFullError) as full:
            call(op, given | changes)
        text = rf"{op}: queue w.queue-1\S*: no room \(at most 2 messages and \d+ bytes, policy fail\): 2 messages"
        assert re.match(text, str(full.value))
        assert not flags.any() or not changes
        beside.get_all()
        save(op, given)
        getter.get()
        meta = 3 if GETS[op] == "speculate_get_output_topk" else 2
        found = getter.arrays()[0].reshape(-1)[meta:]
        stride = 3 if op == "save_output_topk" else 1
        assert found[: 4 * stride : stride].tolist() == [-3] * 4
        beside.save(op, given)
        beside.get_all()
        counts = fastdeploy.counts()
        assert [counts[name] for name in ("saved", "refused", "got", "waiting_items")] == [4, 1, 4, 0]


def test_draft_after_a_full_queue_is_whole_and_the_next_target_names_the_loss(folder: Path) -> None:
    given, getter = whole(TOPK, 2, 1), Getter(GETS[TOPK])
    with speaking("develop", folder, is_got=False, worker__policy="fail", worker__retention_items=2):
        for _ in range(2):
            save(TOPK, given)
        with pytest.raises(RetentionFullError):
            save(TOPK, given)
        for _ in range(2):
            getter.get()
        for flag, counts in ((4, [2, 1]), (3, [-3, -3]), (3, [2, 1])):
            save(TOPK, given | {"message_flag": flag})
            getter.get()
            assert getter.arrays()[0].reshape(-1)[3:5].tolist() == counts


def test_queue_that_no_process_has_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERENCE_MSG_QUEUE_ID", "77")
    with speaking(None, folder, is_got=False, worker__policy="fail", worker__retention_items=2):
        for _ in range(2):
            save("save_output", whole("save_output", 1))
        text = r"save_output: queue w.queue-77: no room \(at most 2 messages .*; no process gets from it\): 2 messages"
        with pytest.raises(RetentionFullError, match=text):
            save("save_output", whole("save_output", 1))


def test_engine_waits_for_room_as_the_policy_says(folder: Path) -> None:
    given = whole("save_output", 1)
    with speaking(None, folder, worker__retention_items=2, worker__block_timeout_ms=50):
        for _ in range(2):
            save("save_output", given)
        with pytest.raises(RetentionFullError, match="waited 50 ms"):
            save("save_output", given)
        assert PROCESS.receiver(Kind.SINGLE).get(MOST_SECONDS, lambda found: found.kind) is Kind.SINGLE
        save("save_output", given)
        assert fastdeploy.counts()["blocked"] == 1
        assert fastdeploy.counts()["waiting_items"] == 2
