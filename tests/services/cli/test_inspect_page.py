"""tokenbus inspect --html: one page with the requests, bounded, and with no text that a browser would run."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.services.cli.helpers import payloads, recording
from tokenbus_contracts.generated.request_pb2 import TokenScoring
from tokenbus_services.cli import inspect_page, main
from tokenbus_services.items import read_recording

Values = dict[str, Any]
DATA = recording(payloads(drafts=True, scoring={2: TokenScoring(entropies=True, other_logprobs=True)}))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "a.tokenbus"
    path.write_bytes(DATA)
    return path


def recorded_in(page: Path) -> Values:
    """Return what a page has for its scripts."""
    (data,) = re.findall(r'<script id="recorded" type="application/json">(.*?)</script>', page.read_text())
    found: Values = json.loads(data)
    return found


def inspected(page: Path, *arguments: str | Path) -> Values:
    assert main(["inspect", *map(str, arguments), "--html", str(page)]) == 0
    return recorded_in(page)


def values_in(recorded: Values) -> list[Values]:
    return [value for request in recorded["requests"] for value in request["values"]]


def test_page_has_each_token_with_its_alternatives(source: Path, tmp_path: Path) -> None:
    """It has what --json prints, and what the file says of each token; a recording and its Parquet make the same."""
    found = inspected(tmp_path / "a.html", source)
    batches = [item.batch for item in read_recording(source) if item.batch is not None]
    true = {
        (str(row.key), row.position + place): (int(row.token_ids[place]), int(row.ranks[place]), pairs_of(row, place))
        for batch in batches
        if batch.header.kind == 1
        for row in batch.rows()
        for place in range(row.token_ids.size)
    }
    told = {
        (request["request_id"], value["position"]): (value["token_id"], value["rank"], value["alternatives"])
        for request in found["requests"]
        for value in request["values"]
    }
    assert told == true
    assert main(["export", str(source), "--to", str(tmp_path / "a.parquet")]) == 0
    again = inspected(tmp_path / "b.html", tmp_path / "a.parquet")
    assert again["requests"] == found["requests"]


def pairs_of(row: Any, place: int) -> list[Sequence[Any]]:  # noqa: ANN401 - a row
    ids, logprobs = row.alternative_token_ids[place].tolist(), row.alternative_logprobs[place].tolist()
    return [[token, str(token), logprob] for token, logprob in zip(ids, logprobs, strict=True)]


def test_page_is_bounded_and_says_so(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(inspect_page, "_MOST_TOKENS", 12)
    found = inspected(tmp_path / "a.html", source, "--count", "2")
    assert [len(request["values"]) for request in found["requests"]] == [9, 3]
    assert found["shown"] == {
        "requests": 2,
        "of_requests": 3,
        "tokens": 12,
        "of_tokens": 27,
        "most_requests": 100,
        "most_tokens": 12,
    }
    line, summary = capsys.readouterr().out.splitlines()
    assert line == f"{tmp_path / 'a.html'}: 2 requests of 3, 12 tokens of 27"
    assert summary.startswith("requests 3, tokens 27, ")


def test_two_of_them(source: Path, tmp_path: Path) -> None:
    found = inspected(tmp_path / "a.html", source, source)
    assert {(value["difference"], len(value["alternatives"])) for value in values_in(found)} == {(0.0, 2)}


def test_files_that_exist_are_not_written_over(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "a.html"
    page.write_text("mine")
    assert main(["inspect", str(source), "--html", str(page)]) == 2
    assert capsys.readouterr().err == f"tokenbus: {page}: exists already, and is not written over\n"
    assert page.read_text() == "mine"


def test_no_text_ends_the_data(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x<").mkdir()
    hostile = Path("x<", "script><b>{{style}}.tokenbus")
    hostile.write_bytes(source.read_bytes())
    page = tmp_path / "a.html"
    assert inspected(page, hostile)["files"] == [str(hostile)]
    assert "<b>" not in page.read_text()
