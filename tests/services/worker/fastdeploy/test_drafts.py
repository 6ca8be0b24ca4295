"""What a draft model proposed comes behind the target that it is about, whenever it was saved."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.services.worker.fastdeploy import model
from tests.services.worker.fastdeploy.bus import Getter, save
from tests.services.worker.fastdeploy.engine import Steps
from tokenbus_contracts import ContractError
from tokenbus_services.worker import fastdeploy
from tokenbus_services.worker.fastdeploy.process import PROCESS

OP = "speculate_save_output_topk"


class Engine:
    """An engine under speculation, each of whose steps has a target and a draft."""

    def __init__(self, slots: int = 5) -> None:
        """Begin; nothing stops."""
        self._steps = Steps(17)
        self._slots = slots
        self._computed = np.full((slots, 1), 4, np.int32)
        self.getter = Getter("speculate_get_output_topk")

    def step(self, *, is_running: bool = True) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a target's arguments and its draft's, which has as many tokens for each slot."""
        target, draft = self._steps.speculated(self._slots, 4), self._steps.speculated(self._slots, 4)
        counts = 1 + self._steps._random.integers(0, 6, self._slots).astype(np.int32)
        self._computed = self._computed + counts[:, None]
        for given, flag in ((target, 3), (draft, 4)):
            scored = self._steps.scored(int(counts.sum()), 4)
            given |= {
                "sampled_token_ids": scored["ids"][:, :1].copy(),
                "logprob_token_ids": scored["ids"],
                "logprob_scores": scored["logprobs"],
                "logprob_ranks": scored["ranks"],
                "token_num_per_batch": counts,
                "cu_batch_token_offset": (np.cumsum(counts) - counts).astype(np.int32),
                "not_need_stop": np.array([is_running]),
                "seq_lens_decoder": self._computed,
                "prompt_lens": np.full((self._slots, 1), 4),
                "preempted_idx": np.zeros((self._slots, 1), np.int32),
                "message_flag": flag,
            }
        return target, draft

    def check(self, *messages: dict[str, Any]) -> None:
        """Get as many messages, and assert that they are these."""
        for given in messages:
            self.getter.check(model.speculate_save_output_topk(given))


@pytest.mark.usefixtures("bus")
def test_draft_comes_behind_its_target() -> None:
    """The first draft is not waited for, as nobody knows that there are any; those after it belong to their step."""
    engine = Engine()
    for _ in range(4):
        target, draft = engine.step()
        save(OP, target)
        save(OP, draft)
        engine.check(target, draft)
    assert PROCESS.sender(0)._step == 5  # one more for the first draft alone


@pytest.mark.usefixtures("bus")
def test_first_draft_may_come_after_its_target_was_got() -> None:
    """A target whose draft nobody expected is got at once, and its draft when it comes."""
    engine = Engine()
    target, draft = engine.step()
    save(OP, target)
    engine.check(target)
    save(OP, draft)
    engine.check(draft)


@pytest.mark.usefixtures("bus")
def test_draft_that_is_late_pairs_with_its_own_target() -> None:
    """Drafts that are saved after the next step's target are told from that one's, and come behind their own."""
    engine = Engine()
    first, drafted_first = engine.step()
    save(OP, first)
    save(OP, drafted_first)
    engine.check(first, drafted_first)
    one, drafted_one = engine.step()
    two, drafted_two = engine.step()
    for given in (one, two, drafted_one, drafted_two):
        save(OP, given)
    engine.check(one, drafted_one, two, drafted_two)


@pytest.mark.usefixtures("bus")
def test_draft_of_another_step_is_not_truncated_by_this_one() -> None:
    """Where a draft did not come, the next one pairs with its own target, by what both say of slots (case 4, 12)."""
    engine = Engine()
    first, drafted_first = engine.step()
    save(OP, first)
    save(OP, drafted_first)
    engine.check(first, drafted_first)
    one, _ = engine.step()
    two, drafted_two = engine.step()
    three, drafted_three = engine.step()
    for given in (one, two, drafted_two, three, drafted_three):
        save(OP, given)
    engine.check(one, two, drafted_two, three, drafted_three)


@pytest.mark.usefixtures("bus")
def test_step_whose_requests_all_finished_has_no_draft() -> None:
    """Where there is nothing left to do no draft is waited for: the target is got at once."""
    engine = Engine()
    first, drafted_first = engine.step()
    save(OP, first)
    save(OP, drafted_first)
    last, _ = engine.step(is_running=False)
    save(OP, last)
    engine.check(first, drafted_first, last)
    again, drafted_again = engine.step()
    save(OP, again)
    save(OP, drafted_again)
    engine.check(again, drafted_again)


@pytest.mark.usefixtures("bus")
def test_drafts_that_stop_coming_are_not_waited_for() -> None:
    """After some targets without a draft none is announced, so that no step waits for what does not come."""
    engine = Engine()
    first, drafted_first = engine.step()
    save(OP, first)
    save(OP, drafted_first)
    targets = [engine.step()[0] for _ in range(6)]
    for target in targets:
        save(OP, target)
    engine.check(first, drafted_first, *targets)
    assert not PROCESS.sender(0)._targets.expects_draft(PROCESS.sender(0)._targets._waiting[-1].message)


@pytest.mark.usefixtures("bus")
def test_draft_without_a_target_is_refused() -> None:
    """A draft that no target came before is one clear error, and so is a second one for the same target."""
    engine = Engine()
    target, draft = engine.step()
    with pytest.raises(ContractError) as refused:
        save(OP, draft)
    assert str(refused.value) == "message_flag: a target (3) before its draft, got 4"
    save(OP, target)
    save(OP, draft)
    with pytest.raises(ContractError, match="a target"):
        save(OP, draft)
    engine.check(target, draft)


@pytest.mark.usefixtures("bus")
def test_draft_of_more_slots_than_its_target_is_refused() -> None:
    """A draft about slots that its target does not have is an error: they are paired by slot, not cut to fit."""
    engine, wider = Engine(2), Engine(3)
    target, _ = engine.step()
    _, draft = wider.step()
    save(OP, target)
    with pytest.raises(ContractError) as refused:
        save(OP, draft)
    assert str(refused.value) == "token_num_per_batch: at most 2 elements, got 3"


@pytest.mark.usefixtures("bus")
def test_method_without_a_proposer_takes_the_same_way() -> None:
    """Targets without any draft, as naive, ngram and suffix speculation have them, need nothing else (case 31)."""
    engine = Engine()
    targets = [engine.step()[0] for _ in range(3)]
    for target in targets:
        save(OP, target)
        engine.check(target)


def test_flag_and_columns_are_fields_of_their_own(bus: Path) -> None:
    """On the bus the flag is the batch's kind; in that engine's tensor it keeps its low bits to itself (case 29)."""
    assert bus.exists()
    engine = Engine()
    target, draft = engine.step()
    save(OP, target)
    save(OP, draft)
    for flag in (3, 4):
        engine.getter.get()
        field = int(engine.getter.arrays()[0][1, 0])
        assert (field & 0xFF, field >> 8) == (flag, 4)
    for wrong in (0, 5, 3 + 256, 4 | 1 << 8):
        with pytest.raises(ContractError) as refused:
            save(OP, target | {"message_flag": wrong})
        assert str(refused.value) == f"message_flag: 3 (target) or 4 (draft), got {wrong}"


def test_flag_alone_for_older_releases(bus: Path) -> None:
    """Where the reader knows of no columns in the field, the flag stands there alone."""
    settings = PROCESS.options.settings
    fastdeploy.configure(fastdeploy.Options(settings=settings, columns_in_flag=False))
    assert bus.exists()
    engine = Engine()
    for given in engine.step():
        save(OP, given)
        engine.getter.get()
        assert int(engine.getter.arrays()[0][1, 0]) == given["message_flag"]
