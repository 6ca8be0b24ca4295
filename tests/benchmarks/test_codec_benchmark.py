"""The codec's benchmark: every peer delivers the same, and the record, the tables and the page agree."""

import gc
import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.codec import measure, vllm_shape
from benchmarks.codec.__main__ import main
from benchmarks.codec.fastdeploy_struct import STRUCT_BYTES
from benchmarks.codec.lineup import PEERS, lineup
from benchmarks.codec.ours import STAGES, Views, message_of
from benchmarks.codec.peer import Queues
from benchmarks.codec.plot import plot
from benchmarks.codec.record import goals_of
from benchmarks.codec.tables import render
from benchmarks.errors import WrongDeliveryError
from benchmarks.machine import Placement
from benchmarks.paint import Paint
from benchmarks.workload import Case, Step, cases, make_steps, truth

# What only some machines can run; anything else that is absent is a failure.

pytestmark = pytest.mark.xdist_group("codec_benchmark")  # what its tests share is made once
MAY_BE_ABSENT = {"fastdeploy_sysv", "vllm", "vllm_processed", "zeromq_other_core"}
SIZES = [*cases(quick=True), Case(1, 1, 0), Case(16, 1, None), Case(99, 3, 20), Case(512, 3, 5)]


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a quick run: its JSON file, and its page with the figures."""
    folder = tmp_path_factory.mktemp("benchmark")
    main(["--quick", "--json", str(folder / "quick.json"), "--write-docs", str(folder)])
    return folder


@pytest.fixture(scope="module")
def record(quick_run: Path) -> dict[str, Any]:
    """The record of a quick run."""
    loaded: dict[str, Any] = json.loads((quick_run / "quick.json").read_text())
    return loaded


@pytest.mark.parametrize("case", SIZES, ids=str)
def test_every_peer_delivers_what_the_engine_emitted(case: Case) -> None:
    """Each request gets the engine's own tokens, logprobs, ranks and alternatives, whichever peer carries them."""
    steps = make_steps(case, 2, seed=7)
    with lineup(Placement.here()) as (peers, _):
        for peer in peers:
            peer.prepare(steps)
            for step in steps:
                if peer.delivers:
                    assert peer.deliver(step) == truth(step), peer.name
                else:
                    assert peer.carry(step, {}) == len(message_of(step))


def test_a_peer_that_does_not_run_says_why() -> None:
    """Only what needs rights, a second core or vLLM may be absent, and each absence has its reason."""
    with lineup(Placement.here()) as (peers, absent):
        assert {peer.name for peer in peers} | absent.keys() == {kind.name for kind in PEERS}
        assert absent.keys() <= MAY_BE_ABSENT
        assert all(reason.startswith("not run: ") for reason in absent.values())


def test_goals_compare_with_vllm_itself_where_it_ran(record: dict[str, Any]) -> None:
    """The goal's line says whether vLLM or its shape is meant; the processed line has ratios, but no goal."""
    result = json.loads(json.dumps(record["results"][0]))
    for name in ("vllm", "vllm_processed"):
        result["peers"].pop(name, None)
    shape = {goal["goal"]: goal for goal in goals_of(result)}
    assert shape["vLLM shape / Tokenbus"]["measured"] == result["peers"]["vllm_shape"]["times_ours"]
    assert shape["vLLM + processor / as lists"]["measured"] is None
    for name, microseconds in (("ours", 10), ("ours_lists", 20), ("vllm", 700), ("vllm_processed", 800)):
        result["peers"][name] = {**result["peers"]["ours"], "median_us": microseconds}
    real = {goal["goal"]: goal for goal in goals_of(result)}
    assert (real["vLLM / Tokenbus"]["measured"], real["vLLM / Tokenbus"]["met"]) == (70, True)
    assert "vLLM shape / Tokenbus" not in real
    for other, measured in (("Tokenbus", 80), ("as lists", 40)):
        goal = real[f"vLLM + processor / {other}"]
        assert (goal["measured"], goal["met"]) == (measured, None)


def test_an_array_of_256_bytes_travels_beside_the_message() -> None:
    """The shape of vLLM puts small arrays into the message and larger ones into frames of their own."""
    step = make_steps(Case(1, 6, 20), 1, seed=7)[0]
    codec = vllm_shape.ArrayCodec(vllm_shape.EngineCoreOutputs)
    lists = vllm_shape.LogprobsLists(step.rectangle_ids, step.rectangle_logprobs, step.ranks)
    outputs = vllm_shape.EngineCoreOutputs(outputs=[vllm_shape.EngineCoreOutput("a", [1], lists)])
    frames = codec.encode(outputs)
    assert len(frames) == 3
    got = codec.decode(frames).outputs[0].new_logprobs
    assert got is not None
    assert [array.tolist() for array in got[:3]] == [array.tolist() for array in lists[:3]]


def test_wrong_delivery_ends_the_run() -> None:
    """A peer that hands one request another's row is refused before anything is timed."""

    class Shifted(Views):
        """Gives the first request the second's row."""

        def carry(self, step: Step, queues: Queues) -> int:
            """Carry the step, then mix two queues up."""
            size = super().carry(step, queues)
            first, second = step.keys[:2]
            queues[first], queues[second] = queues[second], queues[first]
            return size

    with pytest.raises(WrongDeliveryError, match=r"ours, .* row 0"):
        measure.measure(Case(16, 3, 5), [Shifted()], turns=1, seed=7)


def test_steps_of_one_seed_are_the_same_and_of_one_run_differ() -> None:
    """A run can be repeated exactly, and no step in it stands in for another."""
    case = Case(16, 3, None)
    again, steps = (make_steps(case, 3, seed=7) for _ in range(2))
    assert [truth(step) for step in again] == [truth(step) for step in steps]
    assert len({tuple(step.keys) for step in steps}) == len(steps)


def test_the_record_has_every_peer_at_every_size(record: dict[str, Any]) -> None:
    """The JSON file has, for every size, each peer that ran with its times and bytes, and nothing else."""
    ran = {peer["name"] for peer in record["peers"] if not peer["not_run"]}
    assert [peer["name"] for peer in record["peers"]] == [kind.name for kind in PEERS]
    assert {kind.name for kind in PEERS} - ran <= MAY_BE_ABSENT
    assert [result["top_k"] for result in record["results"]] == ["0", "5", "20", "mixed"]
    for result in record["results"]:
        assert (result["rows"], result["tokens_per_row"]) == (256, 3)
        assert result["peers"].keys() == ran
        for peer in result["peers"].values():
            assert 0 < peer["p10_us"] <= peer["median_us"] <= peer["p90_us"]
            assert peer["first_median_us"] > 0
            assert peer["bytes_per_token"] == round(peer["message_bytes"] / 768, 2)
        assert result["peers"]["ours"]["times_ours"] == 1
        if "fastdeploy_sysv" in ran:
            assert result["peers"]["fastdeploy_sysv"]["message_bytes"] == STRUCT_BYTES
    assert [tuple(stage["us"]) for stage in record["stages"]] == [STAGES] * 4
    assert {goal["top_k"] for goal in record["goals"]} == {"0", "5", "20"}


def test_messages_of_ours_and_of_the_generated_classes_are_as_long(record: dict[str, Any]) -> None:
    """Tokenbus's bytes a token are those of the schema, whichever code writes it."""
    for result in record["results"]:
        peers = result["peers"]
        names = ("ours", "ours_lists", "ours_zeromq", "protobuf", "zeromq", "memcpy")
        assert len({peers[name]["message_bytes"] for name in names}) == 1


def test_the_page_shows_the_record(quick_run: Path, record: dict[str, Any], tmp_path: Path) -> None:
    """The page holds the report word for word, and the plots depend on the record alone."""
    page = (quick_run / "codec.md").read_text()
    assert render(record, Paint(colour=False)) in page
    assert record["machine"]["cpu"] in page
    assert json.loads((quick_run / "codec.json").read_text()) == record
    assert (quick_run / "codec.png").read_bytes().startswith(b"\x89PNG")
    figure = (quick_run / "codec.svg").read_text()
    assert "FastDeploy pickle" in figure
    assert "<dc:date>" not in figure
    plot(record, tmp_path)
    assert (tmp_path / "codec.svg").read_text() == figure


def test_the_tables_say_what_did_not_run(record: dict[str, Any]) -> None:
    """A peer that is absent has its reason in its line, and its goal is neither met nor missed."""
    reason = "not run: kernel.msgmax is 8192"
    changed = json.loads(json.dumps(record))
    for peer in changed["peers"]:
        if peer["name"] == "fastdeploy_sysv":
            peer["not_run"] = reason
    for goal in changed["goals"]:
        if goal["goal"].startswith("SysV"):
            goal.update(measured=None, met=None)
    lines = render(changed, Paint(colour=False)).splitlines()
    assert sum(line.startswith("FastDeploy SysV struct") and line.endswith(reason) for line in lines) == 3
    goals = next(line for line in lines if line.startswith("SysV struct / Tokenbus"))
    assert goals.count("not run") == 3


def test_the_tables_say_where_a_peer_is_faster(record: dict[str, Any]) -> None:
    """A size at which Tokenbus loses is named, with the peer."""
    changed = json.loads(json.dumps(record))
    for result in changed["results"]:
        for name, peer in result["peers"].items():
            peer["times_ours"] = 0.9 if name == "protobuf" and result["top_k"] == "0" else 1.0
    assert "Faster than Tokenbus at some k: pb at 256 x 3." in render(changed, Paint(colour=False))


def test_colour_only_adds_to_the_text(record: dict[str, Any]) -> None:
    """A terminal's colours are the same text with escapes around parts of it."""
    plain, coloured = (render(record, Paint(colour=colour)) for colour in (False, True))
    assert "\x1b" not in plain
    for code in (0, 1, 31, 32):
        coloured = coloured.replace(f"\x1b[{code}m", "")
    assert coloured == plain


def test_a_run_leaves_the_process_as_it_was() -> None:
    """Afterwards the cores, the IPC namespace and the garbage collection are those of before."""

    def state() -> list[Any]:
        return [os.sched_getaffinity(0), Path("/proc/self/ns/ipc").readlink(), gc.isenabled()]

    before = state()
    main(["--quick", "--turns", "1"])
    assert state() == before
