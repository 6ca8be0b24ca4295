"""tokenbus inspect: a recording's tokens, against figures computed a token at a time."""

import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.cli.helpers import BATCH, payloads, recording
from tests.contracts.valid_messages import seeded
from tests.pages import blocks
from tokenbus.cli import main
from tokenbus.engines.synthetic import true_tokens
from tokenbus.recordings.items import read_recording
from tokenbus.testing import RowShape, batch
from tokenbus_contracts import LogprobBatch, Row, encode
from tokenbus_contracts.generated.request_pb2 import TokenScoring

Values = dict[str, Any]
Inspect = Callable[..., tuple[int, Values]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "a").write_bytes(recording())
    return tmp_path / "a"


@pytest.fixture
def inspect(capsys: pytest.CaptureFixture[str]) -> Inspect:
    def run(*arguments: object) -> tuple[int, Values]:
        status = main(["inspect", *map(str, arguments), "--json"])
        printed = capsys.readouterr()
        document: Values = json.loads(printed.out) if printed.out else {"error": printed.err}
        return status, document

    return run


# One recording.


def test_requests_of_a_recording(path: Path, inspect: Inspect, capsys: pytest.CaptureFixture[str]) -> None:
    truth = {key: true_tokens(key, 0, 9) for key in (1, 2, 3)}
    status, found = inspect(path)
    logprobs = [float(logprob) for true in truth.values() for logprob in true.logprobs]
    assert status == 0
    assert found["summary"] == {"requests": 3, "tokens": 27, "mean_logprob": pytest.approx(mean(logprobs))}
    assert [request["request_id"] for request in found["requests"]] == [f"{key:016x}" for key in truth]
    for request, true in zip(found["requests"], truth.values(), strict=True):
        pairs = zip(true.ids.tolist(), true.logprobs.tolist(), strict=True)
        assert [(each["token_id"], each["logprob"]) for each in request["values"]] == list(pairs)
        assert [each["position"] for each in request["values"]] == list(range(9))
    assert main(["inspect", str(path), "--count", "1"]) == 0
    head, tokens, summary = capsys.readouterr().out.splitlines()
    assert head.startswith("request 0000000000000001: tokens 9, mean logprob -")
    shown = [f"{token}({logprob:.3f})" for token, logprob in zip(truth[1].ids, truth[1].logprobs, strict=True)]
    assert tokens == f"  {' '.join(shown)}"
    assert summary.startswith("requests 3, tokens 27, mean logprob -")


def test_one_request_as_text(path: Path, inspect: Inspect) -> None:
    made = batch([RowShape(5, tokens=2, top_k=0), RowShape(6, top_k=0)])
    letters = LogprobBatch.of_views(made.header, made.columns | {"token_ids": np.array([104, 105, 106], "u4")})
    path.write_bytes(recording(iter([(1, BATCH, encode(letters))])))
    _, found = inspect(path, "--request", f"{5:016x}", "--tokenizer", "bytes")
    (request,) = found["requests"]
    assert (request["request_id"], [each["text"] for each in request["values"]]) == (f"{5:016x}", ["h", "i"])


def test_torn_recording_is_shown_up_to_its_fault(
    path: Path, inspect: Inspect, capsys: pytest.CaptureFixture[str]
) -> None:
    path.write_bytes(path.read_bytes()[:-1])
    status, found = inspect(path)
    assert (status, found["summary"]["tokens"]) == (1, 18)
    fault = found["fault"]
    assert "the file ends within the entry" in fault
    assert main(["inspect", str(path)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == f"BROKEN {fault}"


def with_extras(path: Path, key: int = 2) -> tuple[Path, list[Row]]:
    """Write a recording of three requests, one of which has extras; return that one's rows, too."""
    scoring = {key: TokenScoring(entropies=True, other_logprobs=True)}
    path.write_bytes(recording(payloads(scoring=scoring)))
    batches = [item.batch for item in read_recording(path) if item.batch is not None]
    return path, [row for each in batches for row in each.rows() if row.request_id == key]


def extras_in(rows: Sequence[Row], name: str) -> list[float]:
    return [float(value) for row in rows for value in getattr(row.extras, name)]


def test_entropies_and_importance_ratios(tmp_path: Path, inspect: Inspect, capsys: pytest.CaptureFixture[str]) -> None:
    """The values are the model's own, so a ratio is the exponential of the logprob less the other one."""
    path, rows = with_extras(tmp_path / "a")
    entropies, others = extras_in(rows, "entropies"), extras_in(rows, "other_logprobs")
    logprobs = [float(value) for row in rows for value in row.logprobs]
    ratios = [math.exp(own - other) for own, other in zip(logprobs, others, strict=True)]
    _, found = inspect(path)
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


# Two recordings.


def test_two_exports_are_compared_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/recording.md's SQL has the figures of the tokens up to where requests part, and of no drafts."""
    import duckdb  # noqa: PLC0415 - slow to import

    monkeypatch.chdir(tmp_path)
    Path("rollout.tokenbus").write_bytes(recording(payloads(tokens=8, drafts=True)))
    assert main(["export", "rollout.tokenbus", "--to", "rollout.parquet"]) == 0
    rollout, rng, differences = pq.read_table("rollout.parquet"), seeded(7), list[float]()
    trainer = [row for row in rollout.to_pylist() if row["kind"] == "TARGET"]
    for row in trainer:
        key, position, logprob = row["request_id"], row["position"], row["logprob"]
        row["logprob"] = float(np.float32(logprob + rng.gauss(0, 0.2)))
        if (key, position) == (2, 5):
            row["token_id"] += 1
        elif (key, position) == (3, 7):
            row["request_id"] = 14
        if row["request_id"] != 14 and (key != 2 or position < 5):
            differences.append(row["logprob"] - logprob)
    pq.write_table(pa.Table.from_pylist(trainer, rollout.schema), "trainer.parquet")
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


def test_wrong_uses(path: Path, tmp_path: Path, inspect: Inspect) -> None:
    status, found = inspect(path, "--tokenizer", "nobody")
    assert status == 2
    assert found["error"].startswith("tokenbus: tokenizer: one of ")
    os.mkfifo(pipe := tmp_path / "pipe")
    (text := tmp_path / "text").write_text("root:x:0:0:root:/root:/bin/sh\n")
    for wrong, line in (
        (tmp_path / "nowhere", "no such file or directory"),
        (pipe, "not a file"),
        (tmp_path, "not a file"),
        (text, "byte 0: not a recording: no hello at the beginning: "),
    ):
        status, found = inspect(wrong)
        assert status == 1
        said = str(found.get("error") or found["fault"])
        assert said.removeprefix("tokenbus: ").startswith(f"{wrong}: {line}")
