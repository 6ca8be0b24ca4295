"""The bus's benchmark: every peer delivers the same across two processes, and the record, tables and page agree."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.bus import figures, goals, memory, plan, record, trace
from benchmarks.bus.__main__ import main
from benchmarks.bus.lanes import LANES, OURS, SYSV, TAKEN
from benchmarks.bus.orders import BUFFERS, BY_STEP, Order, Received, Sent, steps_of
from benchmarks.bus.pair import Pair, TurnFailedError
from benchmarks.bus.peers import Tell, receive_raw, send_raw
from benchmarks.bus.plot import plot
from benchmarks.bus.tables import render
from benchmarks.bus.tokenbus import _TAKERS, Taker, receive, send, worker_left
from benchmarks.errors import WrongDeliveryError
from benchmarks.paint import Paint
from benchmarks.workload import Case
from tests.services.cli.local import is_running
from tests.support.waiting import soon, turns, wait_until
from tokenbus_services.delivery import Step
from tokenbus_services.settings import BusSettings

pytestmark = pytest.mark.xdist_group("bus_benchmark")  # what its tests share is made once
ROOT = Path(__file__).resolve().parents[2]
TINY = replace(
    plan.quick(),
    seconds=0.1,
    latency_steps=20,
    scaling_steps=20,
    rows=(1, 16),
    tokens=(3,),
    widths=(5,),
    open_requests=(256, 512),
    memory_steps=200,
)


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny run: its JSON file, and its page with the figures."""
    folder = tmp_path_factory.mktemp("bus")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.bus.__main__.quick", lambda: TINY)
        main(["--quick", "--json", str(folder / "tiny.json"), "--write-docs", str(folder)])
    return folder


@pytest.fixture(scope="module")
def measured(tiny_run: Path) -> dict[str, Any]:
    """The record of a tiny run."""
    loaded: dict[str, Any] = json.loads((tiny_run / "tiny.json").read_text())
    return loaded


@pytest.mark.parametrize("top_k", [5, None])
def test_every_peer_delivers_what_the_engine_emitted(top_k: int | None) -> None:
    """Each peer's requests get the engine's own values in the other process, whatever the rows ask for."""
    bench_plan = replace(TINY, top_ks=(0,))
    with Pair() as pair:
        bench = record.Bench(bench_plan, pair, queue=0, progress=lambda _text: None)
        for lane in LANES:
            if lane.transports != (SYSV,):  # its queue needs rights that not every machine gives
                sent, received = bench.turn(lane, lane.transports[-1], Case(16, 3, top_k), steps=20)
                assert sent.at.size == received.at.size == 20
                assert len(received.first) == (16 if lane.delivers else 0)


def test_wrong_delivery_ends_the_run() -> None:
    """A peer whose first step is another than the engine's is refused."""
    order = Order(case=Case(2, 1, 0), address="", clients_address="")
    shifted = LANES[0]._replace(
        turn=lambda _pair, _order: (Sent(np.zeros(1, np.int64), 0), Received(np.zeros(1, np.int64), 0, []))
    )
    with Pair() as pair, pytest.raises(WrongDeliveryError, match="not what the engine emitted"):
        record.Bench(TINY, pair, queue=0, progress=lambda _text: None).turn(shifted, "ipc", order.case, steps=1)


def test_lost_steps_end_the_run() -> None:
    """A peer of which fewer steps came than went is refused."""
    lossy = LANES[0]._replace(
        turn=lambda _pair, _order: (Sent(np.zeros(2, np.int64), 0), Received(np.zeros(1, np.int64), 0, []))
    )
    with Pair() as pair, pytest.raises(WrongDeliveryError, match="2 steps went, 1 came"):
        record.Bench(TINY, pair, queue=0, progress=lambda _text: None).turn(lossy, "ipc", Case(2, 1, 0), steps=2)


def test_a_process_that_fails_says_why() -> None:
    """What goes wrong in another process is an error here, with that process's own trace."""
    with Pair() as pair:
        order = Order(case=Case(1, 1, 0), address="nowhere://at-all", clients_address="", steps=1)
        with pytest.raises(TurnFailedError, match="ZMQError"):
            pair.turn(send_raw, receive_raw, order)


def receive_and_tell(order: Order, tell: Tell) -> Received:
    """Run a processor as a turn does, and tell when its first step is there."""

    class Telling(Taker):
        """Tells of the first step."""

        def _take(self, step: Step) -> None:
            super()._take(step)
            if self._watch.count == 1:
                tell("first step")

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(_TAKERS, BUFFERS, Telling)
        return receive(order, tell)


def test_turn_outlasts_a_process_that_stands_still() -> None:
    """No step is lost where a process stands still for longer than a heartbeat's timeout, as on a busy machine."""
    with Pair() as pair:
        order = Order(case=Case(4, 1, 0), address=pair.address("ipc", "w"), clients_address=pair.address("ipc", "c"))
        order = replace(order, steps=100, rate=100)
        address = pair.receiver.announced(receive_and_tell, order)
        pair.sender.begin(send, replace(order, address=address))
        assert pair.receiver.answer() == "first step"
        os.kill(pair.sender.pid, signal.SIGSTOP)
        time.sleep(1.5 * BusSettings().heartbeat_timeout_ms / 1000)  # in which nothing happens that could be waited for
        os.kill(pair.sender.pid, signal.SIGCONT)
        assert pair.sender.answer().at.size == pair.receiver.answer().at.size == 100


ENDLESS = """
import sys, time
from benchmarks.bus.orders import Order
from benchmarks.bus.pair import Pair
from benchmarks.bus.tokenbus import receive
from benchmarks.workload import Case
with Pair() as pair:
    order = Order(case=Case(1, 1, 0), address=pair.address("ipc", "w"), clients_address=pair.address("ipc", "c"))
    pair.receiver.announced(receive, order)
    print(pair.sender.pid, pair.receiver.pid, flush=True)
    sys.stdin.read()
"""


def test_processes_end_with_the_one_that_started_them() -> None:
    """A process that waits for steps without a limit ends, as an idle one does, when its parent is killed."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", ENDLESS], cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as parent:
        assert parent.stdout is not None
        children = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(children) == 2
        parent.kill()
    wait_until(lambda: not any(map(is_running, children)))


async def test_the_wait_for_the_last_acknowledgement_has_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is not done is waited for, although the clock says that hours have passed."""
    loop, workers = asyncio.get_running_loop(), {"worker-0": object()}
    waiting = asyncio.create_task(worker_left(SimpleNamespace(workers=SimpleNamespace(by_id=workers))))  # type: ignore[arg-type]
    await turns()
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + 7200)
    await turns()
    assert not waiting.done()
    workers.clear()
    await soon(waiting)


def test_all_steps_of_a_turn_are_of_the_same_requests() -> None:
    """An engine has the same requests step after step, in an order of rows that is not the batch's."""
    steps = steps_of(Order(case=Case(16, 3, 5), address="", clients_address=""))
    assert len({tuple(step.keys) for step in steps}) == 1
    assert all(step.columns["request_keys"].tolist() == step.keys for step in steps)
    indices = steps[0].columns["batch_indices"].tolist()
    assert sorted(indices) == list(range(16)) != indices


def test_latency_is_of_warm_steps_and_taken_rows() -> None:
    """The first tenth of the steps does not count, and a step is taken when its slowest request has its row."""
    sent = Sent(np.arange(100, dtype=np.int64) * 1000, 0)
    late = np.full(100, 5000)
    late[:10] = 10**9
    taken = sent.at + np.array([[7000], [9000]])
    got = figures.latency([(sent, Received(sent.at + late, 0, [], taken))])
    assert (got["50"], got["100"]) == (5.0, 5.0)
    assert (got["taken"]["1"], got["taken"]["100"]) == (7.0, 9.0)
    assert got["last_taken"]["1"] == 9.0


def test_throughput_is_of_the_middle() -> None:
    """A turn's slow beginning and end are no part of its rate."""
    slow = np.arange(0, 10**9, 10**8)
    middle = slow[-1] + np.arange(1, 3 * 10**9 // 10**6) * 10**6
    at = np.concatenate([slow, middle, middle[-1] + slow + 10**8]).astype(np.int64)
    assert figures.rate_of(at) == pytest.approx(1000)


def test_the_trace_splits_each_step_into_its_hops(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Every step has every hop, none takes less than no time, and together they are what the step took."""
    bench_plan = replace(TINY, latency_steps=40)
    with Pair() as pair:
        for taking, hops in ((BUFFERS, len(trace.HOPS)), (BY_STEP, len(trace.HOPS) + 1)):
            address, clients_address = (pair.address("ipc", name) for name in ("workers", "clients"))
            order = Order(case=Case(16, 3, 0), address=address, clients_address=clients_address, taking=taking)
            order = replace(order, steps=40, rate=bench_plan.rate)
            worker, processor = pair.turn(trace.send, trace.receive, order)
            traced = trace.traced(worker, processor, has_reader=taking == BY_STEP)
            assert traced.hops.shape == (hops, 36)  # the first tenth is of steps that are not warm
            assert (traced.hops >= 0).all()
            late = (processor.answer.at - worker.answer.at)[4:] / 1e3
            # The trace notes the delivery just before the benchmark itself does.
            assert (traced.hops[: len(trace.HOPS)].sum(axis=0) <= late).all()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.bus.__main__.Plan", lambda: replace(bench_plan, rounds=1))
        main(["--trace", "--json", str(tmp_path / "trace.json")])
    printed = capsys.readouterr().out
    assert all(hop.what in printed for hop in (*trace.HOPS, trace.READER))
    assert json.loads((tmp_path / "trace.json").read_text())["ways"].keys() == {BUFFERS, BY_STEP}


def test_a_slow_hop_and_what_it_met_are_told() -> None:
    """The hop in which slow steps lose their time shows it, and a pause in all of them is distinguished from chance."""
    hops = np.full((len(trace.HOPS), 1000), 10.0)
    hops[4, :10] = 500.0
    met = np.zeros(1000, np.bool_)
    met[:10] = True
    found = trace.figures(trace.Traced(hops, hops / 2, {"worker gc": met}), has_reader=False)
    assert [hop["more_when_slow"] for hop in found["hops"]] == [0, 0, 0, 0, 490, 0, 0, 0]
    assert found["pauses"] == {"worker gc": {"all": 0.01, "slow": 1.0, "by_chance": 0.0671}}
    assert (found["p50"], found["hops"][1]["work"], found["hops"][0]["work"]) == (80, 5, None)


def test_a_slope_that_is_there_is_found_and_noise_is_not() -> None:
    """Memory that grows by a byte a step is seen as that; memory that only wavers has a slope within its error."""
    random = np.random.default_rng(1)
    steps = np.arange(1, 201) * 5000
    grown = memory.fit([(int(step), 50 * 2**20 + int(step)) for step in steps])
    assert grown.slope_mib == pytest.approx(1e6 / 2**20, rel=1e-3)
    noise = random.normal(0, 4096, 200)
    flat = memory.fit([(int(step), 50 * 2**20 + int(value)) for step, value in zip(steps, noise, strict=True)])
    assert abs(flat.slope_mib) < 3 * flat.error_mib


def test_the_record_has_every_peer(measured: dict[str, Any]) -> None:
    """The JSON file has each peer that ran, with percentiles in order, rates that agree, and the rest of the run."""
    absent = {peer["name"] for peer in measured["peers"] if peer["not_run"]}
    assert [peer["name"] for peer in measured["peers"]] == [lane.name for lane in LANES]
    assert absent <= {"fastdeploy_sysv"}
    assert {result["peer"] for result in measured["results"]} == {lane.name for lane in LANES} - absent
    for result in measured["results"]:
        late = [result["latency_us"][str(each)] for each in figures.QUANTILES]
        assert late[0] > 0
        assert late == sorted(late)
        assert ("taken" in result["latency_us"]) == (result["peer"] == TAKEN)
        flat = result["throughput"]
        assert flat["steps_s"] > 0
        assert flat["tokens_s"] == pytest.approx(flat["steps_s"] * 768, rel=0.01)
        assert flat["mb_s"] == pytest.approx(flat["steps_s"] * flat["message_bytes"] / 1e6, abs=0.1)
        if result["peer"] == OURS:
            assert (result["ours_times_its_steps_s"], result["its_times_our_p50"]) == (1, 1)
    assert {each["peer"] for each in measured["sections"]} == {OURS, TAKEN}
    assert all(sum(each["us"].values()) > 0 for each in measured["sections"])
    assert [each["axis"] for each in measured["scaling"]].count("open requests") == 2
    assert all(each["receiver_cpu_us_a_row"] > 0 for each in measured["scaling"])
    assert measured["memory"]["processes"].keys() == {"worker", "processor", "client"}
    assert all(len(each["samples"]) >= 200 for each in measured["memory"]["processes"].values())


def test_goals_are_told_apart(measured: dict[str, Any]) -> None:
    """A goal is met or missed by the record's own figures; memory is judged over a million steps only."""
    changed = json.loads(json.dumps(measured))
    for result in changed["results"]:
        if result["peer"] == OURS:
            result["latency_us"].update({"50": 1000.0, "99": 3000.1})
            result["throughput"]["steps_s"] = 2999.9
    for process in changed["memory"]["processes"].values():
        process["fit"].update(slope_mib=1.3, error_mib=0.1)
    met = [goal["met"] for goal in goals.goals_of(changed) if goal["goal"].endswith("k = 0")]
    assert met == [True, False, False]
    assert [goal["met"] for goal in goals.goals_of(changed) if goal["goal"].startswith("memory")] == [None] * 3
    changed["memory"]["steps"] = 1_000_000
    assert [goal["met"] for goal in goals.goals_of(changed) if goal["goal"].startswith("memory")] == [False] * 3


def test_the_page_shows_the_record(tiny_run: Path, measured: dict[str, Any], tmp_path: Path) -> None:
    """The page holds the report word for word, and the plots depend on the record alone."""
    page = (tiny_run / "bus.md").read_text()
    assert render(measured, Paint(colour=False)) in page
    assert measured["machine"]["cpu"] in page
    assert "python -m benchmarks.bus --quick" in page
    assert json.loads((tiny_run / "bus.json").read_text()) == measured
    assert (tiny_run / "bus.png").read_bytes().startswith(b"\x89PNG")
    plot(measured, tmp_path)
    assert (tmp_path / "bus.svg").read_text() == (tiny_run / "bus.svg").read_text()


def test_the_documents_are_of_one_run(tmp_path: Path) -> None:
    """What lies in docs/benchmarks is what today's code makes of the record there."""
    folder = ROOT / "docs" / "benchmarks"
    kept = json.loads((folder / "bus.json").read_text())
    assert render(kept, Paint(colour=False)) in (folder / "bus.md").read_text()
    plot(kept, tmp_path)
    assert (tmp_path / "bus.svg").read_text() == (folder / "bus.svg").read_text()


def test_the_tables_say_what_did_not_run(measured: dict[str, Any]) -> None:
    """A peer that is absent has its reason in its line."""
    changed = json.loads(json.dumps(measured))
    reason = "not run: kernel.msgmax is 8192"
    next(peer for peer in changed["peers"] if peer["name"] == "fastdeploy_sysv")["not_run"] = reason
    changed["results"] = [each for each in changed["results"] if each["peer"] != "fastdeploy_sysv"]
    lines = render(changed, Paint(colour=False)).splitlines()
    assert sum(line.startswith("FastDeploy SysV struct") and line.endswith(reason) for line in lines) == 2


def test_colour_only_adds_to_the_text(measured: dict[str, Any]) -> None:
    """A terminal's colours are the same text with escapes around parts of it."""
    plain, coloured = (render(measured, Paint(colour=colour)) for colour in (False, True))
    for code in (0, 1, 31, 32):
        coloured = coloured.replace(f"\x1b[{code}m", "")
    assert coloured == plain


def test_bad_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A number that cannot be is named with its bound, before anything is measured."""
    with pytest.raises(SystemExit):
        main(["--memory-steps", "3"])
    assert "--memory-steps: at least 100, not 3" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--trace", "--write-docs"])
    assert "--trace: it prints its tables" in capsys.readouterr().err


def test_help_teaches() -> None:
    """The help has commands to copy, and says what the goals are."""
    command = [sys.executable, "-m", "benchmarks.bus", "--help"]
    run = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=True)
    assert "python -m benchmarks.bus --memory-steps 1000000 --write-docs" in run.stdout
