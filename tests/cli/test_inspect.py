"""tokenbus inspect: a recording's tokens, against figures computed a token at a time."""

import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.cli.helpers import EPOCH, hello, payloads, recording
from tests.contracts.valid_messages import seeded
from tests.pages import blocks
from tokenbus.cli import main
from tokenbus.recordings.items import Recorder, StreamItem, read_recording
from tokenbus.testing import RowShape, batch
from tokenbus_contracts import BatchKind, LogprobBatch, Row, encode
from tokenbus_contracts.generated.request_pb2 import TokenScoring
from tokenbus_contracts.generated.stream_pb2 import PayloadKind

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
    assert [request["request_id"] for request in found["requests"]] == [f"{key:016x}" for key in (11, 12, 13)]
    for request in found["requests"]:
        pairs = [step.tokens[int(request["request_id"], 16)][0] for step in steps]
        assert [(each["token_id"], each["logprob"]) for each in request["values"]] == pairs
        assert [each["position"] for each in request["values"]] == list(range(8))
    assert main(["inspect", str(path), "--count", "1"]) == 0
    head, tokens, summary = capsys.readouterr().out.splitlines()
    assert head.startswith("request 000000000000000b: tokens 8, mean logprob -")
    assert tokens == "  " + " ".join(f"{token}({logprob:.3f})" for token, logprob in (s.tokens[11][0] for s in steps))
    assert summary.startswith("requests 3, tokens 24, mean logprob -")


def test_one_request_as_text(tmp_path: Path, inspect: Inspect) -> None:
    path = recorded(tmp_path / "a", [Step(0, {5: [(104, -1.0), (105, -1.0)], 6: [(106, -2.0)]})])
    _, found = inspect(path, "--request", f"{5:016x}", "--tokenizer", "bytes")
    (request,) = found["requests"]
    assert (request["request_id"], [each["text"] for each in request["values"]]) == (f"{5:016x}", ["h", "i"])


def test_torn_recording_is_shown_up_to_its_fault(
    tmp_path: Path, inspect: Inspect, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recorded(tmp_path / "a", rollout(seeded(1)), cut=1)
    status, found = inspect(path)
    assert (status, found["summary"]["tokens"]) == (1, 21)
    fault = found["fault"]
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
        (request,) = (each for each in found["requests"] if each["request_id"] == f"{2:016x}")
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


# Parquet.


def test_parquet_of_a_recording(tmp_path: Path, inspect: Inspect, capsys: pytest.CaptureFixture[str]) -> None:
    source, folder = tmp_path / "a", tmp_path / "folder"
    source.write_bytes(recording(payloads(requests=3, tokens=12, drafts=True)))
    folder.mkdir()
    assert main(["export", str(source), "--to", str(folder / "part.parquet")]) == 0
    capsys.readouterr()
    for request in ([], ["--request", "2"]):
        (status, found), *others = (inspect(path, *request) for path in (source, folder, folder / "part.parquet"))
        assert (status, found["summary"]["tokens"]) == (0, 12 if request else 36)
        for other_status, other in others:
            assert (other_status, other["summary"], other["requests"]) == (0, found["summary"], found["requests"])


def test_two_exports_are_compared_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/recording.md's SQL has the figures of the tokens up to where requests part, and of no drafts."""
    import duckdb  # noqa: PLC0415 - slow to import

    rng = seeded(7)
    steps = rollout(rng)
    noise = {(key, place): rng.gauss(0, 0.2) for key in (11, 12, 13) for place in range(8)}
    other = moved(steps, lambda key, place, logprob: min(0.0, logprob + noise[key, place]))
    other[5].tokens[12][0] = (5000, -1.0)
    del other[7].tokens[13]
    drafts = Step(0, {11: [(steps[0].tokens[11][0][0], -9.0)]}, BatchKind.DRAFT, number=1)
    recorded(tmp_path / "rollout.tokenbus", [steps[0], drafts, *steps[1:]])
    recorded(tmp_path / "trainer.tokenbus", [*other, Step(0, {14: [(1, -1.0)]})])
    monkeypatch.chdir(tmp_path)
    for name in ("rollout", "trainer"):
        assert main(["export", f"{name}.tokenbus", "--to", f"{name}.parquet"]) == 0
    differences = [
        float(np.float32(there.tokens[key][0][1])) - pairs[0][1]
        for step, there in zip(steps, other, strict=True)
        for key, pairs in step.tokens.items()
        if key in there.tokens and (key != 12 or step.position < 5)
    ]
    (recipe,) = blocks("sql", of="docs/recording.md")
    with duckdb.connect() as connection:
        found = connection.execute(recipe.text)
        (row,) = found.fetchall()
        figures = dict(zip([column[0] for column in found.description], row, strict=True))
    assert figures == pytest.approx(
        {
            "tokens": 20,
            "mean_difference": mean(map(abs, differences)),
            "max_difference": max(map(abs, differences)),
            "kl_estimate": mean(math.exp(each) - 1 - each for each in differences),
            "importance_ratio_mean": mean(map(math.exp, differences)),
            "importance_ratio_max": math.exp(max(differences)),
        }
    )


# Wrong uses.


def test_wrong_uses(tmp_path: Path, inspect: Inspect) -> None:
    a = recorded(tmp_path / "a", rollout(seeded(1)))
    status, found = inspect(a, "--tokenizer", "nobody")
    assert status == 2
    assert found["error"].startswith("tokenbus: tokenbus.tokenizers: one of ")
    (folder := tmp_path / "folder").mkdir()
    os.mkfifo(folder / "pipe.parquet")
    (text := tmp_path / "text").write_text("root:x:0:0:root:/root:/bin/sh\n")
    for path, line in (
        (tmp_path / "nowhere", "no such file or directory"),
        (folder / "pipe.parquet", "a file or a folder, got neither"),
        (folder, "no rows for each token, as `tokenbus export` writes them"),
        (text, "byte 0: no recording, which begins with a hello: "),
    ):
        status, found = inspect(path)
        assert status == 1
        said = str(found.get("error") or found["fault"])
        assert said.removeprefix("tokenbus: ").startswith(f"{path}: {line}")


def test_long_name_of_many_rows_is_held_once(
    tmp_path: Path, inspect: Inspect, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of some kilobytes that says so asked for sixteen gigabytes."""
    (tmp_path / "a").write_bytes(recording(payloads(requests=1, tokens=4)))
    assert main(["export", str(tmp_path / "a"), "--to", str(tmp_path / "b.parquet")]) == 0
    capsys.readouterr()
    table = pq.read_table(tmp_path / "b.parquet").take([0] * 2**18)
    place = table.schema.get_field_index("value_kind")
    names = pa.DictionaryArray.from_arrays(pa.array([0] * 2**18, pa.int8()), ["x" * 16_000])
    pq.write_table(table.set_column(place, "value_kind", names), tmp_path / "c.parquet")
    status, found = inspect(tmp_path / "c.parquet")
    assert (status, found["error"].count("\n")) == (1, 1)
    assert f"{tmp_path / 'c.parquet'}: one of UNSPECIFIED, " in found["error"]
