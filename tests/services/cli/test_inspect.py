"""tokenbus inspect: a recording's tokens, and how two recordings differ, against figures computed a token at a time."""

import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.contracts.valid_messages import seeded
from tests.services.cli.helpers import EPOCH, hello, payloads, recording
from tokenbus.testing import RowShape, batch
from tokenbus_contracts import BatchKind, LogprobBatch, Row, Scoring, encode
from tokenbus_contracts.generated.request_pb2 import TokenScoring
from tokenbus_contracts.generated.stream_pb2 import PayloadKind
from tokenbus_services import terminal
from tokenbus_services.cli import main
from tokenbus_services.items import Recorder, StreamItem, read_recording
from tokenbus_services.parquet import TokenFile

Values = dict[str, Any]
Inspect = Callable[..., tuple[int, Values]]


class Step(NamedTuple):
    """A step's tokens by request, each an id and a logprob; all of a step begin at one position."""

    position: int
    tokens: dict[int, list[tuple[int, float]]]
    kind: BatchKind = BatchKind.TARGET
    number: int = 0


def batch_of(step: Step, sequence: int) -> LogprobBatch:
    rows = [RowShape(key, step.position, len(tokens)) for key, tokens in step.tokens.items()]
    made = batch(rows, sequence=sequence, step=step.number or sequence, kind=step.kind)
    pairs = [pair for tokens in step.tokens.values() for pair in tokens]
    ids, logprobs = np.array([pair[0] for pair in pairs], "u4"), np.array([pair[1] for pair in pairs], "f4")
    changed = {"token_ids": ids, "logprobs": logprobs, "ranks": np.ones(len(pairs), "u4")}
    changed |= {name: made.columns[name][:0] for name in ("alternative_token_ids", "alternative_logprobs")}
    changed |= {"top_ks": np.zeros(made.row_count, "u1")}
    return LogprobBatch.of_views(made.header, made.columns | changed)


def recorded(path: Path, steps: Iterable[Step], cut: int = 0) -> Path:
    recorder, data = Recorder(EPOCH, hello()), b""
    for sequence, step in enumerate(steps, 1):
        payload = encode(batch_of(step, sequence))
        kind = PayloadKind.PAYLOAD_KIND_LOGPROB_BATCH
        data += recorder.add(StreamItem(hello(), EPOCH, sequence, kind, payload))
    path.write_bytes(data[: len(data) - cut])
    return path


def rollout(rng: Random, requests: Sequence[int] = (11, 12, 13), length: int = 8) -> list[Step]:
    return [
        Step(place, {key: [(rng.randrange(1000), -rng.randrange(1, 4000) / 1024)] for key in requests})
        for place in range(length)
    ]


def moved(steps: Iterable[Step], by: Callable[[int, int, float], float]) -> list[Step]:
    """Return the same tokens with other logprobs."""
    return [
        step._replace(
            tokens={
                key: [(token, by(key, step.position + place, logprob)) for place, (token, logprob) in enumerate(pairs)]
                for key, pairs in step.tokens.items()
            }
        )
        for step in steps
    ]


@pytest.fixture
def inspect(capsys: pytest.CaptureFixture[str]) -> Inspect:
    def run(*arguments: object) -> tuple[int, Values]:
        status = main(["inspect", *map(str, arguments), "--json"])
        printed = capsys.readouterr()
        document: Values = json.loads(printed.out) if printed.out else {"error": printed.err}
        return status, document

    return run


# One recording.


def test_requests_of_a_recording(tmp_path: Path, inspect: Inspect, capsys: pytest.CaptureFixture[str]) -> None:
    steps = rollout(seeded(1))
    path = recorded(tmp_path / "a", steps)
    status, found = inspect(path)
    logprobs = [pairs[0][1] for step in steps for pairs in step.tokens.values()]
    assert status == 0
    assert found["summary"] == {"requests": 3, "tokens": 24, "mean_logprob": pytest.approx(mean(logprobs))}
    assert [request["request_id"] for request in found["requests"]] == ["11", "12", "13"]
    for request in found["requests"]:
        pairs = [step.tokens[int(request["request_id"])][0] for step in steps]
        assert [(each["token_id"], each["logprob"]) for each in request["values"]] == pairs
        assert [each["position"] for each in request["values"]] == list(range(8))
    assert main(["inspect", str(path), "--count", "1"]) == 0
    head, tokens, summary = capsys.readouterr().out.splitlines()
    assert head.startswith("request 11: tokens 8, mean logprob -")
    assert tokens == "  " + " ".join(f"{token}({logprob:.3f})" for token, logprob in (s.tokens[11][0] for s in steps))
    assert summary.startswith("requests 3, tokens 24, mean logprob -")


def test_one_request_as_text(tmp_path: Path, inspect: Inspect) -> None:
    path = recorded(tmp_path / "a", [Step(0, {5: [(104, -1.0), (105, -1.0)], 6: [(106, -2.0)]})])
    _, found = inspect(path, "--request", "0x5", "--tokenizer", "bytes")
    (request,) = found["requests"]
    assert (request["request_id"], [each["text"] for each in request["values"]]) == ("5", ["h", "i"])


def test_tokens_without_logprobs(tmp_path: Path, inspect: Inspect) -> None:
    made = batch([RowShape(5, tokens=2, scoring=Scoring.NONE)])
    item = StreamItem(hello(), EPOCH, 1, PayloadKind.PAYLOAD_KIND_LOGPROB_BATCH, encode(made))
    path = tmp_path / "a"
    path.write_bytes(Recorder(EPOCH, hello()).add(item))
    _, found = inspect(path)
    assert found["summary"] == {"requests": 1, "tokens": 2, "mean_logprob": None}
    status, found = inspect(path, path)
    assert (status, found["summary"]["tokens_compared"], found["summary"]["max_difference"]) == (1, 0, None)


def test_torn_recording_is_shown_up_to_its_fault(
    tmp_path: Path, inspect: Inspect, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recorded(tmp_path / "a", rollout(seeded(1)), cut=1)
    status, found = inspect(path)
    assert (status, found["summary"]["tokens"]) == (1, 21)
    (fault,) = found["faults"]
    assert "the file ends within the entry" in fault
    assert main(["inspect", str(path)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == f"BROKEN {fault}"


def with_extras(path: Path, key: int = 2) -> tuple[Path, list[Row]]:
    """Write a recording of three requests, one of which has extras; return that one's rows, too."""
    scoring = {key: TokenScoring(entropies=True, other_logprobs=True)}
    path.write_bytes(recording(payloads(scoring=scoring)))
    batches = [item.batch for item in read_recording(path) if item.batch is not None]
    return path, [row for each in batches for row in each.rows() if row.key == key]


def extras_in(rows: Sequence[Row], name: str) -> list[float]:
    return [float(value) for row in rows for value in getattr(row.extras, name)]


def test_entropies_and_importance_ratios(tmp_path: Path, inspect: Inspect, capsys: pytest.CaptureFixture[str]) -> None:
    """The values are the model's own, so a ratio is the exponential of the logprob less the other one."""
    path, rows = with_extras(tmp_path / "a")
    entropies, others = extras_in(rows, "entropies"), extras_in(rows, "other_logprobs")
    logprobs = [float(value) for row in rows for value in row.logprobs]
    ratios = [math.exp(own - other) for own, other in zip(logprobs, others, strict=True)]
    assert main(["export", str(path), "--to", str(tmp_path / "b.parquet")]) == 0
    capsys.readouterr()
    for file in (path, tmp_path / "b.parquet"):
        _, found = inspect(file)
        (request,) = (each for each in found["requests"] if each["request_id"] == "2")
        assert [each["entropy"] for each in request["values"]] == pytest.approx(entropies)
        assert [each["importance_ratio"] for each in request["values"]] == pytest.approx(ratios, rel=1e-4)
        for summary in (found["summary"], request):  # the only request that has any
            assert summary["mean_entropy"] == pytest.approx(mean(entropies))
            assert summary["importance_ratio_mean"] == pytest.approx(mean(ratios), rel=1e-4)
            assert summary["importance_ratio_max"] == pytest.approx(max(ratios), rel=1e-4)
        others_values = [value for each in found["requests"] if each is not request for value in each["values"]]
        assert not any({"entropy", "importance_ratio"} & value.keys() for value in others_values)
    main(["inspect", str(path), "--request", "2"])
    shown = capsys.readouterr().out.splitlines()[1].split()
    assert [each.partition("[")[2] for each in shown] == [f"{entropy:.2f}]" for entropy in entropies]


# Two of them.


def test_entropies_of_two_are_compared(tmp_path: Path, inspect: Inspect) -> None:
    """Where one of them has no entropy there is no difference."""
    path, rows = with_extras(tmp_path / "a")
    file = TokenFile(tmp_path / "exported.parquet")
    for item in read_recording(path):
        file.add(item)
    file.close()
    table = pq.read_table(tmp_path / "exported.parquet").to_pylist()
    for row in table:
        row["entropy"] = None if row["entropy"] is None or row["position"] == 0 else row["entropy"] + 0.5
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "other.parquet")
    _, found = inspect(path, tmp_path / "other.parquet", "--request", "2")
    assert found["summary"]["mean_entropy_difference"] == pytest.approx(0.5)
    (request,) = found["requests"]
    assert [each["entropy"] for each in request["values"]] == pytest.approx(extras_in(rows, "entropies"))
    assert "other_entropy" not in request["values"][0]
    assert "mean_entropy_difference" not in inspect(path, path, "--request", "1")[1]["summary"]


@pytest.mark.parametrize("seed", range(5))
def test_figures_of_a_comparison(seed: int, tmp_path: Path, inspect: Inspect) -> None:
    rng = seeded(seed)
    steps = rollout(rng)
    noise = {(key, place): rng.gauss(0, 0.2) for key in (11, 12, 13) for place in range(8)}
    other = moved(steps, lambda key, place, logprob: min(0.0, logprob + noise[key, place]))
    ours, theirs = recorded(tmp_path / "a", steps), recorded(tmp_path / "b", other)
    differences = {
        (key, step.position): float(np.float32(there.tokens[key][0][1])) - pairs[0][1]
        for step, there in zip(steps, other, strict=True)
        for key, pairs in step.tokens.items()
    }
    every = list(differences.values())
    status, found = inspect(ours, theirs)
    assert status == 0
    assert found["summary"] == pytest.approx(
        {
            "requests": 3,
            "tokens_compared": 24,
            "tokens_only_in_first": 0,
            "tokens_only_in_second": 0,
            "tokens_that_differ": 0,
            "mean_difference": mean(map(abs, every)),
            "max_difference": max(map(abs, every)),
            "kl_estimate": mean(math.exp(each) - 1 - each for each in every),
            "importance_ratio_mean": mean(map(math.exp, every)),
            "importance_ratio_max": math.exp(max(every)),
        }
    )
    by_request = {key: [each for (of, _), each in differences.items() if of == key] for key in (11, 12, 13)}
    worst = sorted(by_request, key=lambda key: -max(map(abs, by_request[key])))
    assert [int(request["request_id"]) for request in found["requests"]] == worst
    for request in found["requests"]:
        mine = by_request[int(request["request_id"])]
        assert request["max_difference"] == pytest.approx(max(map(abs, mine)))
        assert request["mean_difference"] == pytest.approx(mean(map(abs, mine)))
        assert [each["difference"] for each in request["values"]] == pytest.approx(mine)


def test_tolerance_decides_the_status(tmp_path: Path, inspect: Inspect) -> None:
    steps = rollout(seeded(3))
    ours = recorded(tmp_path / "a", steps)
    theirs = recorded(tmp_path / "b", moved(steps, lambda *each: each[2] - 1 / 64))
    shorter = recorded(tmp_path / "c", steps[:-1])
    assert inspect(ours, ours, "--tolerance", 0)[0] == 0
    assert inspect(ours, theirs, "--tolerance", 1 / 64)[0] == 0
    assert inspect(ours, theirs, "--tolerance", 0.015)[0] == 1
    assert inspect(ours, shorter)[0] == 0
    for pair in ((ours, shorter), (shorter, ours)):
        status, found = inspect(*pair, "--tolerance", 1)
        assert status == 1
        assert found["summary"]["tokens_only_in_first"] + found["summary"]["tokens_only_in_second"] == 3


def test_tokens_behind_another_one_are_not_compared(
    tmp_path: Path, inspect: Inspect, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = rollout(seeded(4), requests=(7, 8))
    other = moved(steps, lambda key, place, logprob: logprob - 0.5 if (key, place) == (8, 1) else logprob - 0.05)
    other[5].tokens[8][0] = (5000, -1.0)
    ours, theirs = recorded(tmp_path / "a", steps), recorded(tmp_path / "b", other)
    status, found = inspect(ours, theirs)
    assert (status, found["summary"]["tokens_compared"], found["summary"]["tokens_that_differ"]) == (0, 13, 1)
    parted, whole = found["requests"]
    assert (parted["request_id"], parted["parts_at"], parted["tokens"]) == ("8", 5, 5)
    assert (whole["request_id"], whole["parts_at"], whole["tokens"]) == ("7", None, 8)
    assert [each["difference"] is None for each in parted["values"]] == [False] * 5 + [True] * 3

    monkeypatch.setattr(terminal, "wants_colour", lambda: True)
    main(["inspect", str(ours), str(theirs), "--count", "1"])
    tokens = capsys.readouterr().out.splitlines()[1].split()
    shown = [steps[place].tokens[8][0][0] for place in range(8)]
    assert tokens[0] == f"{shown[0]}(-0.0500)"
    assert tokens[1] == f"\x1b[31m{shown[1]}(-0.5000)\x1b[0m"
    assert tokens[5] == f"\x1b[31m{shown[5]}|5000\x1b[0m"
    assert tokens[6] == f"{shown[6]}(-)"
    main(["inspect", str(ours), str(ours), "--count", "1"])
    assert capsys.readouterr().out.splitlines()[1].split()[0].startswith("\x1b[32m")


def test_requests_are_matched_by_order_if_asked(tmp_path: Path, inspect: Inspect) -> None:
    steps = rollout(seeded(5), requests=(30, 20, 10))
    names = {30: 5, 20: 30, 10: 7}
    again = [step._replace(tokens={names[key]: pairs for key, pairs in step.tokens.items()}) for step in steps]
    again.append(Step(0, {1: [(1, -1.0)]}))
    ours, theirs = recorded(tmp_path / "a", steps), recorded(tmp_path / "b", again)
    assert inspect(ours, theirs)[1]["requests"][0]["parts_at"] == 0  # one id is in both, of another request
    status, found = inspect(ours, theirs, "--by-order")
    assert (status, found["summary"]["tokens_compared"], found["summary"]["max_difference"]) == (0, 24, 0)
    assert found["summary"]["tokens_only_in_second"] == 1
    assert {request["request_id"] for request in found["requests"]} == {"10", "20", "30"}


def test_nothing_in_common_is_no_success(tmp_path: Path, inspect: Inspect) -> None:
    ours = recorded(tmp_path / "a", rollout(seeded(1), requests=(1,)))
    theirs = recorded(tmp_path / "b", rollout(seeded(1), requests=(2,)))
    status, found = inspect(ours, theirs)
    assert (status, found["summary"]["tokens_compared"], found["requests"]) == (1, 0, [])
    empty = recorded(tmp_path / "c", [Step(0, {})])
    for pair in ((ours, empty), (empty, ours), (empty, empty)):
        assert inspect(*pair)[0] == 1


def test_output_beside_the_drafts_of_its_steps(tmp_path: Path, inspect: Inspect) -> None:
    """A draft is compared with what was accepted in its place in its step; one that was rejected is another token."""
    steps = [
        Step(0, {1: [(10, -1.0), (11, -1.5)]}, number=1),
        Step(0, {1: [(10, -1.25), (99, -0.5), (98, -0.5)]}, BatchKind.DRAFT, number=1),
        Step(2, {1: [(12, -2.0)]}, number=2),
        Step(2, {1: [(12, -1.0)]}, BatchKind.DRAFT, number=2),
    ]
    status, found = inspect(recorded(tmp_path / "a", steps), "--drafts")
    summary = found["summary"]
    assert status == 0
    assert (summary["tokens_compared"], summary["tokens_that_differ"], summary["tokens_only_in_second"]) == (2, 1, 1)
    (request,) = found["requests"]
    assert [each["difference"] for each in request["values"]] == [-0.25, None, 1.0]
    assert summary["max_difference"] == 1.0


def test_parquet_of_others(tmp_path: Path, inspect: Inspect) -> None:
    """A trainer's file needs four columns, in any order of rows."""
    steps = rollout(seeded(6))
    ours = recorded(tmp_path / "a", steps)
    rows = [
        {"request_id": key, "position": step.position, "token_id": pairs[0][0], "logprob": pairs[0][1] - 0.25}
        for step in steps
        for key, pairs in step.tokens.items()
    ]
    pq.write_table(pa.Table.from_pylist(rows[::-1]), tmp_path / "trainer.parquet")
    _, found = inspect(ours, tmp_path / "trainer.parquet")
    assert (found["summary"]["tokens_compared"], found["summary"]["mean_difference"]) == (24, 0.25)


def test_parquet_of_ours(tmp_path: Path, inspect: Inspect, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "a"
    source.write_bytes(recording(payloads(requests=3, tokens=12, drafts=True)))
    (tmp_path / "folder").mkdir()
    assert main(["export", str(source), "--to", str(tmp_path / "folder" / "part.parquet")]) == 0
    capsys.readouterr()
    status, found = inspect(source, tmp_path / "folder", "--tolerance", 0)
    assert (status, found["summary"]["tokens_compared"]) == (0, 36)
    whole, part = (inspect(path, "--drafts") for path in (source, tmp_path / "folder" / "part.parquet"))
    assert (whole[0], whole[1]["summary"], whole[1]["requests"]) == (part[0], part[1]["summary"], part[1]["requests"])


def test_parquet_that_lacks_a_column(tmp_path: Path, inspect: Inspect) -> None:
    path = tmp_path / "b.parquet"
    pq.write_table(pa.table({"request_id": [1], "token_id": [2]}), path)
    status, found = inspect(path)
    needed = "needs the columns request_id, position, token_id, logprob, lacks position, logprob"
    assert (status, found["error"]) == (1, f"tokenbus: {path}: {needed}\n")


# Wrong uses.


def test_wrong_uses(tmp_path: Path, inspect: Inspect) -> None:
    a = recorded(tmp_path / "a", rollout(seeded(1)))
    for arguments, reason in (
        ([a, a, "--drafts"], "one FILE with --drafts, otherwise one or two"),
        ([a, a, a], "one FILE with --drafts, otherwise one or two"),
        ([a, "--tolerance", "1"], "--tolerance: with something to compare"),
        ([a, "--tokenizer", "nobody"], "tokenbus.tokenizers: one of "),
    ):
        status, found = inspect(*arguments)
        assert status == 2
        assert found["error"].startswith(f"tokenbus: {reason}")
    assert "a number of at least 0, got '-1'" in inspect(a, a, "--tolerance=-1")[1]["error"]
    status, found = inspect(tmp_path / "nowhere")
    assert (status, found["error"]) == (1, f"tokenbus: {tmp_path / 'nowhere'}: no such file or directory\n")


def test_without_pyarrow(tmp_path: Path, inspect: Inspect, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.delitem(sys.modules, "pyarrow.dataset", raising=False)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    status, found = inspect(tmp_path / "a.parquet")
    assert (status, found["error"]) == (1, "tokenbus: Parquet needs pyarrow: install the extra, tokenbus[parquet]\n")
    assert inspect(recorded(tmp_path / "b", rollout(seeded(1))))[0] == 0
