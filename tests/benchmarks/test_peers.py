"""What is timed is right: every peer, of the codec and of the bus, delivers what the engine emitted, or is refused."""

import gc
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from benchmarks.bus.pair import Order, Pair, Received, Sent
from benchmarks.bus.peers import receive_raw, send_raw
from benchmarks.bus.turns import LANES, OURS, STRUCT, percentiles, rate_of, taken, turn
from benchmarks.codec.__main__ import main as measure_codec
from benchmarks.codec.measure import PEERS, lineup, measure
from benchmarks.codec.ours import Views, message_of
from benchmarks.codec.peer import Queues
from benchmarks.errors import WrongDeliveryError
from benchmarks.http_clients import Answer, ask_round
from benchmarks.processes import Child, TaskFailedError
from benchmarks.vllm.measure import ratio, sample
from benchmarks.workload import Case, Step, cases, make_steps, truth
from tests.services.cli.local import is_running
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
MAY_BE_ABSENT = {"FastDeploy SysV struct", "vLLM", "vLLM + LogprobsProcessor"}
SIZES = [*cases(quick=True), Case(1, 1, 0), Case(16, 1, None), Case(99, 3, 20), Case(512, 3, 5)]


@pytest.mark.parametrize("case", SIZES, ids=str)
def test_every_codec_delivers_what_the_engine_emitted(case: Case) -> None:
    """Each request gets the engine's own tokens, logprobs, ranks and alternatives, whichever peer carries them."""
    steps = make_steps(case, 2, seed=7)
    with lineup() as (peers, absent):
        assert {peer.label for peer in peers} | absent.keys() == {kind.label for kind in PEERS}
        assert absent.keys() <= MAY_BE_ABSENT
        for peer in peers:
            peer.prepare(steps)
            for step in steps:
                if peer.delivers:
                    assert peer.deliver(step) == truth(step), peer.label
                else:
                    assert peer.carry(step, {}) == len(message_of(step))


class Shifted(Views):
    def carry(self, step: Step, queues: Queues) -> int:
        size = super().carry(step, queues)
        first, second = step.keys[:2]
        queues[first], queues[second] = queues[second], queues[first]
        return size


def test_wrong_delivery_ends_the_run() -> None:
    with pytest.raises(WrongDeliveryError, match=r"Tokenbus, .* row 0"):
        measure(Case(16, 3, 5), [Shifted()], turns=1, seed=7)


def test_codec_leaves_the_process_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    """A run prints every peer; afterwards cores, IPC namespace and garbage collection are those of before."""

    def state() -> list[object]:
        return [os.sched_getaffinity(0), Path("/proc/self/ns/ipc").readlink(), gc.isenabled()]

    before = state()
    measure_codec(["--quick", "--turns", "1"])
    assert state() == before
    shown = capsys.readouterr().out
    assert all(peer.label in shown for peer in PEERS)


@pytest.mark.parametrize("top_k", [5, None])
def test_every_lane_delivers_what_the_engine_emitted(top_k: int | None) -> None:
    with Pair() as pair:
        for lane in LANES:
            if lane is not STRUCT:  # its queue needs rights that not every machine gives
                sent, received = turn(pair, lane, lane.transports[-1], Order(case=Case(16, 3, top_k), steps=20))
                assert sent.at.size == received.at.size == 20
                assert len(received.first) == (16 if lane.delivers else 0)


@pytest.mark.parametrize(("came", "why"), [(1, "not what the engine emitted"), (0, "1 steps went, 0 came")])
def test_wrong_and_lost_steps_end_the_run(came: int, why: str) -> None:
    found = Sent(np.zeros(1, np.int64), 0), Received(np.zeros(came, np.int64), 0, [])
    lane = OURS._replace(turn=lambda _pair, _order: found)
    with Pair() as pair, pytest.raises(WrongDeliveryError, match=why):
        turn(pair, lane, "ipc", Order(case=Case(2, 1, 0), steps=1))


def test_process_that_fails_says_why() -> None:
    with Pair() as pair, pytest.raises(TaskFailedError, match="ZMQError"):
        pair.turn(send_raw, receive_raw, Order(case=Case(1, 1, 0), address="nowhere://at-all", steps=1))


ENDLESS = """
import sys
from benchmarks.bus.pair import Order, Pair
from benchmarks.bus.tokenbus import receive
from benchmarks.workload import Case
if __name__ == "__main__":
    pair = Pair()
    order = Order(case=Case(1, 1, 0), address=pair.address("ipc", "w"), clients_address=pair.address("ipc", "c"))
    pair.receiver.begin(receive, order)
    pair.receiver.answer()
    print(pair.sender.pid, pair.receiver.pid, flush=True)
    sys.stdin.read()
"""


def test_processes_end_with_the_one_that_started_them() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", ENDLESS], cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as parent:
        assert parent.stdout is not None
        children = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(children) == 2
        parent.kill()
    wait_until(lambda: not any(map(is_running, children)))


def test_figures_are_of_warm_steps_and_of_the_middle() -> None:
    """The first tenth of the steps does not count, a step is taken with its slowest row, and a rate has no edges."""
    sent = Sent(np.arange(100, dtype=np.int64) * 1000, 0)
    late = np.full(100, 5000)
    late[:10] = 10**9
    done = sent, Received(sent.at + late, 0, [], sent.at + np.array([[7000], [9000]]))
    assert percentiles([done])[99] == 5.0
    assert (taken([done]) or {})[50] == 9.0
    assert taken([(sent, done[1]._replace(taken_at=None))]) is None
    slow = np.arange(0, 10**9, 10**8)
    middle = slow[-1] + np.arange(1, 3 * 10**9 // 10**6) * 10**6
    assert rate_of(np.concatenate([slow, middle, middle[-1] + slow + 10**8]).astype(np.int64)) == pytest.approx(1000)


WHOLE = b'data: {"usage": {"completion_tokens": 3}}\n\ndata: [DONE]\n\n'
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (CHUNKED + b'data: {"text": "a"}\n\n' + WHOLE + b"0\r\n\r\n", ""),
        (b"HTTP/1.1 400 Bad Request\r\n\r\nno such model", "400 Bad Request no such model"),
        (CHUNKED + b"data: [DONE]\n\n0\r\n\r\n", "a stream without its end"),
        (CHUNKED + WHOLE, "the server closed the connection"),
    ],
)
def test_client_counts_whole_streams_alone(answer: bytes, why: str) -> None:
    """An answer is counted by its events and its usage; one that is refused, or has no end, ends the round."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with server.accept()[0] as connection:
                connection.recv(65536)
                connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        with Child() as clients:
            clients.begin(ask_round, [f"127.0.0.1:{server.getsockname()[1]}"], "/v1/completions", [[{"prompt": "a"}]])
            if why:
                with pytest.raises(TaskFailedError, match=why):
                    clients.answer()
                return
            ((found,), seconds) = clients.answer()
    assert (found.tokens, found.events, found.bytes) == (3, 2, len(answer))
    assert found.written <= found.first <= found.ended
    assert seconds > 0


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
