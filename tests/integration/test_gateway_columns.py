"""Answers as columns: protobuf's libraries and Arrow's read the true tokens of /inference/v1/generate."""

import json
from collections.abc import AsyncIterator, Iterator
from io import BytesIO
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pytest
from google.protobuf.proto import parse_length_prefixed

from tests.integration.serving import Served, error_of, served, when_ready
from tokenbus_contracts.generated import logprob_batch_pb2 as pb
from tokenbus_contracts.generated.request_pb2 import PromptScoring, TokenScoring
from tokenbus_engines.synthetic import alternatives, draws, true_extras, true_prompt_scores, true_tokens
from tokenbus_services.delivery.step import extras_by_token
from tokenbus_services.gateway.columns_format import ARROW, PROTOBUF

pytestmark = pytest.mark.xdist_group("gateway")
PROMPT = [5, 6, 7]
COUNT = 100


@pytest.fixture(scope="module")
def system() -> Iterator[Served]:
    with served(gateway__tokenizer="numbers") as made:
        made.start_worker("worker-0", "--steps-per-second", "1000")
        yield made


@pytest.fixture
async def client(system: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with when_ready(system.url) as made:
        yield made


async def _asked(client: httpx.AsyncClient, accept: str, **body: Any) -> tuple[int, httpx.Response]:  # noqa: ANN401 - JSON
    """Return the first choice's request id, and the answer."""
    answer = await client.post(
        "/inference/v1/generate", json={"token_ids": PROMPT, **body}, headers={"accept": f"{accept}, */*;q=0.1"}
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == accept
    return int(answer.headers["x-request-id"], 16), answer


def _tops(key: int, k: int) -> tuple[list[int], list[float]]:
    numbers = draws(np.full(COUNT, key, np.uint64), np.arange(COUNT))
    ids, logprobs = alternatives(numbers, np.full(COUNT, k))
    return ids.tolist(), logprobs.tolist()


def _batches(data: bytes) -> list[pb.LogprobBatch]:
    """Return the messages of a body as protobuf's own library reads them."""
    stream, found = BytesIO(data), []
    while (message := parse_length_prefixed(pb.LogprobBatch, stream)) is not None:
        found.append(message)
    return found


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("k", [None, 0, 3])
async def test_batches_have_the_true_tokens(client: httpx.AsyncClient, k: int | None, *, is_streamed: bool) -> None:
    sampling = {"max_tokens": COUNT, "logprobs": k, "n": 2}
    first, answer = await _asked(client, PROTOBUF, sampling_params=sampling, stream=is_streamed)
    batches = _batches(answer.content)
    for index in range(2):
        key = (first + index) % 2**64
        own = [each for each in batches if list(each.request_keys) == [key]]
        true = true_tokens(key, 0, COUNT)
        assert [token for each in own for token in each.token_ids] == true.ids.tolist()
        assert [each.positions[0] for each in own] == list(np.cumsum([0, *(each.token_counts[0] for each in own)])[:-1])
        assert own[-1].statuses[0] == pb.ROW_STATUS_FINISHED_LENGTH
        logprobs = np.array([value for each in own for value in each.logprobs], np.float32)
        assert logprobs.tolist() == ([] if k is None else true.logprobs.tolist())
        if k:
            ids, values = _tops(key, k)
            assert [token for each in own for token in each.alternative_token_ids] == ids
            assert [value for each in own for value in each.alternative_logprobs] == values
    assert len(batches) == sum(len(each.request_keys) for each in batches)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("k", [None, 0, 3])
async def test_arrow_has_the_true_tokens(client: httpx.AsyncClient, k: int | None, *, is_streamed: bool) -> None:
    sampling = {"max_tokens": COUNT, "logprobs": k, "n": 2}
    first, answer = await _asked(client, ARROW, sampling_params=sampling, stream=is_streamed)
    reader = pa.ipc.open_stream(answer.content)
    found = [
        reader.read_next_batch_with_custom_metadata() for _ in range(len(list(pa.ipc.open_stream(answer.content))))
    ]
    assert (len(found) > 2) == is_streamed
    assert json.loads(found[-1].custom_metadata[b"finish_reasons"]) == ["length", "length"]
    table = pa.Table.from_batches([each.batch for each in found])
    for index in range(2):
        key = (first + index) % 2**64
        rows = [row for row in table.to_pylist() if row["request_id"] == key]
        true = true_tokens(key, 0, COUNT)
        assert [row["token_id"] for row in rows] == true.ids.tolist()
        assert [row["position"] for row in rows] == list(range(COUNT))
        assert {row["kind"] for row in rows} == {"TARGET"}
        assert [row["logprob"] for row in rows] == ([None] * COUNT if k is None else true.logprobs.tolist())
        if k:
            ids, values = _tops(key, k)
            assert [token for row in rows for token in row["alternative_token_ids"]] == ids
            assert [value for row in rows for value in row["alternative_logprobs"]] == values


async def test_arrow_has_the_prompts_scores(client: httpx.AsyncClient) -> None:
    first, answer = await _asked(client, ARROW, sampling_params={"max_tokens": 2, "prompt_logprobs": 2})
    rows = pa.ipc.open_stream(answer.content).read_all().to_pylist()
    true = true_prompt_scores(first, PROMPT, PromptScoring(top_logprobs=2))
    prompt = [row for row in rows if row["kind"] == "PROMPT"]
    assert [row["token_id"] for row in prompt] == true.token_ids.tolist() == PROMPT[1:]
    assert [row["position"] for row in prompt] == [1, 2]
    assert [row["logprob"] for row in prompt] == true.logprobs.tolist()
    assert [row["alternative_token_ids"] for row in prompt] == true.alternative_token_ids.tolist()
    assert [row["kind"] for row in rows[2:]] == ["TARGET"] * 2


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_arrow_has_the_extras_that_were_asked_for(client: httpx.AsyncClient, *, is_streamed: bool) -> None:
    asked = {"return_other_logprobs": True, "return_entropies": True, "return_logprobs_of": [9, 300], "return_mask": 4}
    sampling = {"max_tokens": COUNT, "logprobs": 0}
    first, answer = await _asked(client, ARROW, sampling_params=sampling, stream=is_streamed, **asked)
    table = pa.ipc.open_stream(answer.content).read_all()
    scoring = TokenScoring(other_logprobs=True, entropies=True, token_ids=[9, 300], mask_bound=4)
    true = extras_by_token(true_extras(first, 0, COUNT, scoring), COUNT)
    for row, extras in zip(table.to_pylist(), true, strict=True):
        assert extras is not None
        assert (row["other_logprob"], row["entropy"]) == (extras.other_logprob, extras.entropy)
        assert list(zip(row["given_token_ids"], row["given_logprobs"], strict=True)) == list(extras.given_logprobs)
        assert (row["mask_size"], row["mask_token_ids"]) == (extras.mask_size, extras.mask and list(extras.mask))
    _, plain = await _asked(client, ARROW, sampling_params=sampling)
    names = pa.ipc.open_stream(plain.content).schema.names
    assert table.schema.names[: len(names)] == names
    assert "entropy" not in names


async def test_json_is_the_answer_where_it_is_asked_for_first(client: httpx.AsyncClient) -> None:
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1}}
    for accept in ("*/*", "application/json", f"application/json, {ARROW};q=0.5", ""):
        answer = await client.post("/inference/v1/generate", json=body, headers={"accept": accept})
        assert answer.json()["choices"][0]["finish_reason"] == "length"
    completion = {"prompt": PROMPT, "max_tokens": 1}
    assert (await client.post("/v1/completions", json=completion, headers={"accept": ARROW})).json()["choices"]


@pytest.mark.parametrize(
    ("accept", "body", "line"),
    [
        (ARROW, {"output_mode": "text"}, f"output_mode: tokens where the answer is {ARROW}, got text"),
        (
            PROTOBUF,
            {"sampling_params": {"stop": "a"}},
            f"sampling_params.stop: none, but stop_token_ids, where the answer is {PROTOBUF}, got a text",
        ),
        (
            PROTOBUF,
            {"sampling_params": {"prompt_logprobs": 0}},
            f"sampling_params.prompt_logprobs: null where the answer is {PROTOBUF}, got a number",
        ),
    ],
)
async def test_what_columns_cannot_have_is_refused(
    client: httpx.AsyncClient, accept: str, body: dict[str, Any], line: str
) -> None:
    valid = {"token_ids": PROMPT, "sampling_params": {}}
    answer = await client.post("/inference/v1/generate", json=valid | body, headers={"accept": accept})
    assert (answer.status_code, error_of(answer.text)["message"]) == (400, line)
