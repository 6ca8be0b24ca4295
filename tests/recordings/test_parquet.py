"""Parquet files of streams: what pyarrow, DuckDB and Hugging Face's datasets read is what the recording has."""

import json
from collections.abc import Callable, Iterable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.cli.helpers import hello, payloads, recording
from tests.contracts.valid_messages import canonical, seeded, valid_message
from tests.in_process.builders import BATCH, EPOCH, EVENT, WORKER
from tokenbus.delivery.step import TokenExtras, extras_by_token
from tokenbus.recordings import parquet
from tokenbus.recordings.items import StreamItem, read_items
from tokenbus.recordings.parquet import EXTRAS, RequestFile, TokenFile
from tokenbus.testing import RowShape, batch
from tokenbus_contracts import BatchKind, LogprobBatch, PromptScores, Row, RowStatus, ValueKind, encode
from tokenbus_contracts.frames import write_frame
from tokenbus_contracts.generated.request_pb2 import Admitted, ErrorCode, RequestError, RequestEvent, TokenScoring

Values = dict[str, Any]


# The tokens of items, said once more, a token at a time.


def tokens_of(items: Iterable[StreamItem]) -> list[Values]:
    return [token for item in items for token in of_item(item)]


def of_item(item: StreamItem) -> list[Values]:
    if item.batch is not None:
        return [token for row in item.batch.rows() for token in of_row(item.batch, row)]
    if item.event is None or not item.event.HasField("prompt_scores"):
        return []
    scores = PromptScores.of(item.event.prompt_scores)
    common = {
        "kind": "PROMPT",
        "status": "PREFILLING",
        "scoring": "FULL",
        "value_kind": "RAW_LOGPROBS",
        "draft_token_count": 0,
        "proposal_token_ids": [],
        **dict.fromkeys(("weight_version", "step", "produced_at_ns"), 0),
        "sequence": item.sequence,
        **of_extras(None),
    }
    return [token | common for token in scored(scores.request_id, scores)]


def of_row(made: LogprobBatch, row: Row) -> list[Values]:
    header = made.header
    common = {
        "kind": header.kind.name,
        "status": row.status.name,
        "scoring": row.scoring.name,
        "value_kind": ValueKind(header.value_kind).name,
        "draft_token_count": row.draft_token_count,
        "proposal_token_ids": [],
        **{name: getattr(header, name) for name in ("weight_version", "step", "produced_at_ns", "sequence")},
    }
    extras = extras_by_token(row.extras, row.token_ids.size)
    found = [token | common | of_extras(of) for token, of in zip(scored(row.request_id, row), extras, strict=True)]
    if found:
        found[-1]["proposal_token_ids"] = row.proposal_token_ids.tolist()
    return found


def scored(key: int, of: Row | PromptScores) -> list[Values]:
    """Return what a row and a prompt's scores say of each token, null where it is not scored."""
    has_scores = of.logprobs.size > 0
    return [
        {
            "request_id": key,
            "position": of.position + place,
            "token_id": int(of.token_ids[place]),
            "logprob": float(of.logprobs[place]) if has_scores else None,
            "rank": int(of.ranks[place]) if has_scores else None,
            "alternative_token_ids": of.alternative_token_ids[place].tolist(),
            "alternative_logprobs": of.alternative_logprobs[place].tolist(),
        }
        for place in range(of.token_ids.size)
    ]


def of_extras(extras: TokenExtras | None) -> Values:
    """Return a token's extras, null where they were not asked for, and a mask's ids also where they are too many."""
    if extras is None:
        return dict.fromkeys(EXTRAS)
    return {
        "other_logprob": extras.other_logprob,
        "entropy": extras.entropy,
        "given_token_ids": [token for token, _ in extras.given_logprobs] or None,
        "given_logprobs": [logprob for _, logprob in extras.given_logprobs] or None,
        "mask_size": extras.mask_size,
        "mask_token_ids": None if extras.mask is None else list(extras.mask),
    }


def of_batches(*batches: LogprobBatch) -> list[StreamItem]:
    return [StreamItem(hello(), EPOCH, number, BATCH, encode(each)) for number, each in enumerate(batches, 1)]


def of_event(sequence: int, **event: Any) -> StreamItem:  # noqa: ANN401 - whichever the event is
    return StreamItem(hello(), EPOCH, sequence, EVENT, write_frame(RequestEvent(sequence=sequence, **event)))


def written(
    items: Iterable[StreamItem], path: Path | BytesIO, kind: type[TokenFile] = TokenFile
) -> tuple[list[Values], TokenFile]:
    file = kind(path)
    for item in items:
        file.add(item)
    file.close()
    return pq.read_table(path).to_pylist(), file


def scores(key: int, count: int, k: int, *, are_named: bool = False, position: int = 1) -> PromptScores:
    ids = np.arange(count * k, dtype=np.uint32).reshape(count, k)
    return PromptScores(
        key,
        position,
        position + count,
        np.arange(count, dtype=np.uint32),
        -np.arange(1, count + 1, dtype=np.float32),
        np.arange(1, count + 1, dtype=np.uint32),
        np.broadcast_to(ids[0], (count, k)) if are_named else ids,
        -np.arange(1, count * k + 1, dtype=np.float32).reshape(count, k),
        are_named,
    )


# What the three libraries read.


def by_pyarrow(path: Path, _: Path) -> list[Values]:
    rows: list[Values] = pq.read_table(path).to_pylist()
    return rows


def by_duckdb(path: Path, _: Path) -> list[Values]:
    import duckdb  # noqa: PLC0415 - slow to import

    with duckdb.connect() as connection:
        found = connection.execute("select * from read_parquet(?)", [str(path)])
        names = [column[0] for column in found.description or ()]
        return [dict(zip(names, row, strict=True)) for row in found.fetchall()]


def by_datasets(path: Path, folder: Path) -> list[Values]:
    import datasets  # noqa: PLC0415 - slow to import

    return list(datasets.Dataset.from_parquet(str(path), cache_dir=str(folder)))


READERS = [by_pyarrow, by_duckdb, by_datasets]


def whole_stream() -> list[StreamItem]:
    """Return a stream of three requests with drafts and alternatives, one with a scored prompt, one with extras."""
    scoring = {2: TokenScoring(other_logprobs=True, entropies=True, token_ids=[7, 5, 900], mask_bound=3)}
    items = list(read_items(BytesIO(recording(payloads(drafts=True, parts=2, scoring=scoring)))))
    for number, chunk in enumerate(scores(3, 40, 5).chunks()):
        items.insert(3, of_event(900 + number, prompt_scores=chunk))
    return items


@pytest.mark.long
@pytest.mark.parametrize("read", READERS)
def test_tokens_are_what_the_recording_has(read: Callable[[Path, Path], list[Values]], tmp_path: Path) -> None:
    path, items = tmp_path / "tokens.parquet", whole_stream()
    written(items, path)
    truth = tokens_of(items)
    assert read(path, tmp_path) == truth
    assert {token["kind"] for token in truth} == {"TARGET", "DRAFT", "PROMPT"}
    of_second = [token for token in truth if (token["request_id"], token["kind"]) == (2, "TARGET")]
    assert not any(token[name] is None for token in of_second for name in EXTRAS if name != "mask_token_ids")
    is_listed = {token["mask_token_ids"] is not None for token in of_second}
    assert is_listed == {True, False}


@pytest.mark.long
@pytest.mark.parametrize("read", READERS)
def test_requests_are_what_the_recording_has(read: Callable[[Path, Path], list[Values]], tmp_path: Path) -> None:
    path, items = tmp_path / "requests.parquet", whole_stream()
    written(items, path, RequestFile)
    found = read(path, tmp_path)
    assert sorted(request["request_id"] for request in found) == [1, 2, 3]
    for request in found:
        assert (request["status"], request["error"], request["prompt_tokens"]) == ("FINISHED_LENGTH", None, 1)
        assert_lists(request, tokens_of(items))


def assert_lists(request: Values, tokens: Sequence[Values]) -> None:
    """Assert that a request's lists are the columns of its tokens, in their order."""
    names = {
        "TARGET": ["draft_token_count", "weight_version", "step", "produced_at_ns", *EXTRAS],
        "DRAFT": ["step"],
        "PROMPT": [],
    }
    of_all = ["position", "token_id", "logprob", "rank", "alternative_token_ids", "alternative_logprobs"]
    for kind, prefix in (("TARGET", ""), ("DRAFT", "draft_"), ("PROMPT", "prompt_")):
        mine = [each for each in tokens if (each["request_id"], each["kind"]) == (request["request_id"], kind)]
        for name in [*of_all, *names[kind]]:
            plural = "entropies" if name == "entropy" else f"{name.removesuffix('s')}s"
            assert request[prefix + plural] == [each[name] for each in mine], name


# Every shape.


def test_any_valid_messages() -> None:
    for seed in range(30):
        rng = seeded(seed)
        data = [canonical(valid_message(rng)) for _ in range(rng.randint(1, 4))]
        items = [StreamItem(hello(), 1, number, BATCH, each) for number, each in enumerate(data, 1)]
        found, file = written(items, BytesIO())
        assert found == tokens_of(items)
        assert (file.refused_items, file.tokens) == (0, len(found))
        requests, _ = written(items, BytesIO(), RequestFile)
        assert sum(len(each["token_ids"]) + len(each["draft_token_ids"]) for each in requests) == len(found)


def test_prompt_of_many_named_tokens(tmp_path: Path) -> None:
    """A prompt's alternatives may be more than a batch's ever are, and those that were named are the same each time."""
    chunks = list(scores(5, 300, 256, are_named=True).chunks())
    items = [of_event(number, prompt_scores=chunk) for number, chunk in enumerate(chunks, 1)]
    found, _ = written(items, tmp_path / "tokens")
    assert len(chunks) > 1
    assert found == tokens_of(items)
    (request,), _ = written(items, tmp_path / "requests", RequestFile)
    assert (request["status"], request["prompt_token_ids"]) == ("ACTIVE", list(range(300)))
    assert request["prompt_alternative_token_ids"][299] == list(range(256))


def test_item_that_breaks_the_contract_is_counted_and_left_out(tmp_path: Path) -> None:
    items = of_batches(batch([RowShape(1)]), batch([RowShape(1, position=1)], sequence=2, step=2))
    broken = StreamItem(hello(), EPOCH, 2, BATCH, items[0].payload[:-1])
    found, file = written([items[0], broken], tmp_path / "tokens")
    assert found == tokens_of(items[:1])
    assert file.refused_items == 1


def test_stream_without_tokens_is_a_table_without_rows(tmp_path: Path) -> None:
    for kind in (TokenFile, RequestFile):
        found, _ = written([], tmp_path / kind.rows, kind)
        assert found == []
        assert pq.read_schema(tmp_path / kind.rows).names == kind.schema.names


# Requests.


def test_requests_come_in_the_order_in_which_they_end(tmp_path: Path) -> None:
    admitted = Admitted(request_id=9, worker_id=WORKER, epoch=EPOCH, prompt_tokens=7, cached_tokens=5)
    admitted.first_request_id, admitted.turn, admitted.first_position = 3, 1, 4
    admitted.reason = ErrorCode.ERROR_CODE_WORKER_LOST
    items = [
        of_event(1, admitted=admitted),
        *of_batches(
            batch([RowShape(9, tokens=2), RowShape(8, tokens=1), RowShape(7, tokens=3)]),
            batch(
                [
                    RowShape(9, 2, 1, RowStatus.FINISHED_STOP),
                    RowShape(8, 1, 0, RowStatus.ABORTED),
                    RowShape(7, 3, 1, RowStatus.ACTIVE),
                    RowShape(6, 0, 1, RowStatus.ACTIVE),
                ],
                step=2,
                sequence=2,
            ),
        ),
        of_event(4, error=RequestError(request_id=6, code=ErrorCode.ERROR_CODE_DEADLINE, message="too late")),
    ]
    found, _ = written(items, tmp_path / "requests", RequestFile)
    assert [(each["request_id"], each["status"], len(each["token_ids"])) for each in found] == [
        (9, "FINISHED_STOP", 3),
        (8, "ABORTED", 1),
        (6, "ERROR", 1),
        (7, "ACTIVE", 4),
    ]
    assert [each["prompt_tokens"] for each in found] == [7, None, None, None]
    assert [each["cached_tokens"] for each in found] == [5, None, None, None]
    turns = [(each["first_request_id"], each["turn"], each["first_position"], each["reason"]) for each in found]
    assert turns == [(3, 1, 4, "WORKER_LOST"), *[(None, None, None, None)] * 3]
    assert found[2]["error"] == "DEADLINE: too late"
    for request in found:
        assert_lists(request, tokens_of(items))


def test_key_that_is_used_again_is_another_request(tmp_path: Path) -> None:
    ends = RowStatus.FINISHED_LENGTH
    draft = batch([RowShape(1, 0, 2)], kind=BatchKind.DRAFT, sequence=2)
    items = of_batches(
        batch([RowShape(1, 0, 2, ends)], draft_follows=True),
        draft,
        batch([RowShape(1, 0, 3, ends)], step=2, sequence=3),
    )
    found, _ = written(items, tmp_path / "requests", RequestFile)
    assert [len(each["token_ids"]) for each in found] == [2, 3]
    assert [len(each["draft_token_ids"]) for each in found] == [2, 0]


@pytest.mark.parametrize("most", [1, 7, 40])
def test_row_groups_are_bounded(most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    items = list(read_items(BytesIO(recording(payloads(requests=9, tokens=40, drafts=True)))))
    expected = written(items, tmp_path / "one", RequestFile)[0]
    monkeypatch.setattr(parquet, "_GROUP_TOKENS", most)
    found, _ = written(items, tmp_path / "tokens")
    assert found == tokens_of(items)
    of_item_most = max(len(of_item(item)) for item in items)
    file = pq.ParquetFile(tmp_path / "tokens")
    assert max(file.metadata.row_group(each).num_rows for each in range(file.num_row_groups)) < most + of_item_most
    assert file.num_row_groups > 2
    requests, _ = written(items, tmp_path / "requests", RequestFile)
    assert requests == expected
    assert pq.ParquetFile(tmp_path / "requests").num_row_groups >= 360 / (80 + most)


def test_bytes_of_a_row_group_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    items = list(read_items(BytesIO(recording(payloads()))))
    monkeypatch.setattr(parquet, "_GROUP_BYTES", 1)
    written(items, tmp_path / "tokens")
    batches = sum(item.batch is not None for item in items)
    assert pq.ParquetFile(tmp_path / "tokens").num_row_groups == batches


# What a file says of itself.


def test_metadata(tmp_path: Path) -> None:
    items = list(read_items(BytesIO(recording(without=range(5, 6)))))
    for kind in (TokenFile, RequestFile):
        written(items, tmp_path / kind.rows, kind)
        metadata = pq.read_metadata(tmp_path / kind.rows).metadata
        assert metadata[b"tokenbus.rows"].decode() == kind.rows
        assert metadata[b"tokenbus.schema"] == b"1.0"
        assert metadata[b"tokenbus.writer"].startswith(b"tokenbus ")
        told = json.loads(metadata[b"tokenbus.recording"])
        assert (told["worker_id"], told["epoch"], told["last_sequence"]) == (WORKER, str(EPOCH), "6")
        assert (told["items"], told["missing_items"], told["refused_items"]) == (5, 1, 0)
        assert told["hello"]["limits"]["max_rows"] == 64
