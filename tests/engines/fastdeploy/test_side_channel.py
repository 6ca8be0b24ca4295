"""FastDeploy's side channel beside the queue: a sampling mask with each target, received one at a time."""

from collections.abc import Iterator

import numpy as np
import pytest
import zmq

from tests.engines.fastdeploy.bus import Getter, save
from tests.engines.fastdeploy.engine import Steps
from tokenbus_contracts import ContractError

TARGET, DRAFT = 3, 4
SECONDS = 20


@pytest.fixture
def channel() -> Iterator[tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"]]:
    """Both ends of a channel like FastDeploy's: PUSH and PULL, apart from the queue."""
    with zmq.Context() as context, context.socket(zmq.PULL) as pull, context.socket(zmq.PUSH) as push:
        pull.bind("inproc://masks")
        push.connect("inproc://masks")
        pull.rcvtimeo = SECONDS * 1000
        yield push, pull


@pytest.mark.usefixtures("bus")
def test_each_target_has_its_own_mask(channel: tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"]) -> None:
    """One mask is sent with each target that is saved on rank 0, and one received with each that is got: they pair.

    Steps without tokens, preempted slots, drafts in any place, other ranks and refused steps change nothing in that.
    """
    (push, pull), steps, draw = channel, Steps(5), np.random.default_rng(5)
    sent = 0
    for number in range(120):
        flag = int(draw.choice([TARGET, DRAFT]))
        given = steps.speculated(4, 2, flag) | {"rank_id": int(draw.choice([0, 0, 1]))}
        given["logprob_scores"] = np.full_like(given["logprob_scores"], -number)
        given["prompt_lens"] = np.full((4, 1), 100 + number)
        if number % 7 == 0:
            with pytest.raises(ContractError):
                save("speculate_save_output_topk", given | {"rank_id": 0, "prompt_lens": np.zeros(1, np.int64)})
        given["seq_lens_decoder"] = np.full((4, 1), 9 if number % 5 == 0 else 200, np.int32)
        save("speculate_save_output_topk", given)
        if given["rank_id"] == 0 and flag == TARGET:
            push.send(str(number).encode())
            sent += 1
    getter, paired = Getter("speculate_get_output_topk"), 0
    while True:
        getter.get(wait=False)
        tokens, scores, _ = (array.reshape(-1) for array in getter.arrays())
        if tokens[0] == -2:
            break
        if tokens[1] & 0xFF == TARGET:
            number = int(pull.recv())
            counts = tokens[3:7]
            with_tokens = np.flatnonzero(counts > 0)
            assert (scores[with_tokens * 6 * 21] == -number).all()
            paired += 1
    assert paired == sent > 20
    assert not pull.poll(0)
