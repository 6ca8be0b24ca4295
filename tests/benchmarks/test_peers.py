"""What is timed is right: every peer, of the codec and of the bus, delivers what the engine emitted, or is refused."""

import numpy as np
import pytest

from benchmarks.bus.pair import Order, Pair, Received, Sent
from benchmarks.bus.turns import OURS, turn
from benchmarks.codec.measure import PEERS, lineup, measure
from benchmarks.codec.ours import Views
from benchmarks.codec.peer import Queues
from benchmarks.errors import WrongDeliveryError
from benchmarks.http_clients import Answer
from benchmarks.vllm.measure import ratio, sample
from benchmarks.workload import Case, Step, make_steps, truth

MAY_BE_ABSENT = {"FastDeploy SysV struct", "vLLM"}
SIZES = [Case(1, 1, 0), Case(16, 1, None), Case(99, 3, 20), Case(256, 3, None)]


@pytest.mark.parametrize("case", SIZES, ids=str)
def test_every_codec_delivers_what_the_engine_emitted(case: Case) -> None:
    steps = make_steps(case, 2, seed=7)
    with lineup() as (peers, absent):
        assert {peer.label for peer in peers} | absent.keys() == {kind.label for kind in PEERS}
        assert absent.keys() <= MAY_BE_ABSENT
        for peer in peers:
            peer.prepare(steps)
            for step in steps:
                assert peer.deliver(step) == truth(step), peer.label


class Shifted(Views):
    def carry(self, step: Step, queues: Queues) -> int:
        size = super().carry(step, queues)
        first, second = step.keys[:2]
        queues[first], queues[second] = queues[second], queues[first]
        return size


def test_wrong_delivery_ends_the_run() -> None:
    with pytest.raises(WrongDeliveryError, match=r"Tokenbus, .* row 0"):
        measure(Case(16, 3, 5), [Shifted()], turns=1, seed=7)


@pytest.mark.parametrize(("came", "why"), [(1, "not what the engine emitted"), (0, "1 steps went, 0 came")])
def test_wrong_and_lost_steps_end_the_run(came: int, why: str) -> None:
    found = Sent(np.zeros(1, np.int64), 0), Received(np.zeros(came, np.int64), 0, [])
    lane = OURS._replace(turn=lambda _pair, _order: found)
    with Pair() as pair, pytest.raises(WrongDeliveryError, match=why):
        turn(pair, lane, "ipc", Order(case=Case(2, 1, 0), steps=1))


def test_samples_are_per_token_and_ratios_are_of_rounds_side_by_side() -> None:
    """Figures are by tokens, an answer of another length is refused, and a ratio is the median of the rounds."""
    answers = [Answer(0.0, 0.5, 2.5, 3, 2, 300), Answer(0.0, 0.1, 2.1, 3, 3, 300)]
    found = sample(answers, {"model": 1.2, "engine": 0.3, "front end": 0.6}, [0.06, 0.5], 3)
    assert found.tokens_per_second == pytest.approx(2.4)
    assert (found.first_ms, found.first_p99_ms, found.between_ms) == pytest.approx((300, 500, 1000))
    assert (found.bytes_per_token, found.engine_us, found.outside_us) == pytest.approx((100, 2.5e5, 1e5))
    assert found.client_busy == pytest.approx(0.2)
    with pytest.raises(WrongDeliveryError, match="3 tokens, of 4"):
        sample(answers, {}, [0.06], 4)
    slower = [found._replace(tokens_per_second=rate) for rate in (1.2, 0.6, 2.4)]
    assert ratio([found] * 3, slower) == pytest.approx(2.0)
