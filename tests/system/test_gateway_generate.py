"""Token ids in, token ids out: vLLM's /inference/v1/generate, as rollout clients send it."""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from tests.system.serving import Served, error_of, served, when_ready
from tokenbus.delivery.step import extras_by_token
from tokenbus.engines.synthetic import alternatives, draws, true_extras, true_prompt_scores, true_tokens
from tokenbus_contracts.generated.request_pb2 import PromptScoring, TokenScoring

pytestmark = pytest.mark.xdist_group("gateway")
PATH = "/inference/v1/generate"
PROMPT = [5, 6, 7]
COUNT = 20


@pytest.fixture(scope="module")
def system() -> Iterator[Served]:
    with served(gateway__tokenizer="numbers") as made:
        made.start_worker("worker-0", "--steps-per-second", "200")
        yield made


@pytest.fixture
async def client(system: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with when_ready(system.url, "/health") as made:
        yield made


async def _said(client: httpx.AsyncClient, body: dict[str, Any]) -> Any:  # noqa: ANN401 - JSON
    answer = await client.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def _chunks(client: httpx.AsyncClient, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with client.stream("POST", PATH, json=body | {"stream": True}) as answer:
        *chunks, done = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
    assert done == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


def _singles(values: Any) -> list[float]:  # noqa: ANN401 - numbers of JSON
    """Return numbers as the ones of 32 bits that they stand for."""
    return np.array(values, np.float32).tolist()  # type: ignore[no-any-return]


def _true_tops(key: int, k: int, count: int = COUNT) -> list[list[tuple[int, float]]]:
    numbers = draws(np.full(count, key, np.uint64), np.arange(count))
    ids, logprobs = alternatives(numbers, np.full(count, k))
    pairs = list(zip(ids.tolist(), logprobs.tolist(), strict=True))
    return [pairs[k * place : k * (place + 1)] for place in range(count)]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("k", [None, 0, 3])
async def test_generate_has_the_true_tokens(client: httpx.AsyncClient, k: int | None, *, is_streamed: bool) -> None:
    sampling = {"max_tokens": COUNT, "logprobs": k, "n": 2}
    body = {"token_ids": PROMPT, "sampling_params": sampling, "return_token_ids": True}
    if is_streamed:
        *chunks, last = await _chunks(client, body | {"stream_options": {"include_usage": True}})
        whole: dict[str, Any] = {**chunks[0], **last}
        assert last["choices"] == []
        parts = [each for chunk in chunks for each in chunk["choices"]]
    else:
        whole = await _said(client, body)
        parts = whole["choices"]
    assert (whole["prompt_token_ids"], whole["output_mode"]) == (PROMPT, "tokens")
    assert whole["usage"] == {"prompt_tokens": 3, "completion_tokens": 2 * COUNT, "total_tokens": 2 * COUNT + 3}
    for index in range(2):
        own = [each for each in parts if each["index"] == index]
        key = (int(whole["request_id"].removeprefix("generate-tokens-"), 16) + index) % 2**64
        true = true_tokens(key, 0, COUNT)
        assert [token for each in own for token in each["token_ids"]] == true.ids.tolist()
        assert [each["finish_reason"] for each in own if each["finish_reason"]] == ["length"]
        entries = [entry for each in own for entry in (each["logprobs"] or {"content": ()})["content"]]
        if k is None:
            assert entries == []
            continue
        assert [entry["token_id"] for entry in entries] == true.ids.tolist()
        assert _singles([entry["logprob"] for entry in entries]) == true.logprobs.tolist()
        assert [entry["rank"] for entry in entries] == true.ranks.tolist()
        for entry, tops in zip(entries, _true_tops(key, k), strict=True):
            first = {name: entry[name] for name in ("token_id", "logprob", "rank")}
            others = [
                {"token_id": token, "logprob": logprob, "rank": rank}
                for rank, (token, logprob) in enumerate(tops, 1)
                if token != entry["token_id"]
            ]
            assert entry["top_logprobs"] == [first, *others][: k or 1]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_generate_has_the_extras_that_were_asked_for(client: httpx.AsyncClient, *, is_streamed: bool) -> None:
    asked = {"return_entropies": True, "return_logprobs_of": [9, 300], "return_mask": 4}
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": COUNT, "logprobs": 0}, **asked}
    parts = await _chunks(client, body) if is_streamed else [await _said(client, body)]
    found = [each for part in parts for choice in part["choices"] for each in choice["token_extras"]]
    key = int(parts[0]["request_id"].removeprefix("generate-tokens-"), 16)
    scoring = TokenScoring(entropies=True, token_ids=[9, 300], mask_bound=4)
    true = extras_by_token(true_extras(key, 0, COUNT, scoring), COUNT)
    for said, extras in zip(found, true, strict=True):
        assert extras is not None
        assert said.keys() == {"entropy", "logprobs", "mask_size", "mask"}
        assert (said["entropy"], said["mask_size"]) == (extras.entropy, extras.mask_size)
        assert said["mask"] == (None if extras.mask is None else list(extras.mask))
        assert list(said["logprobs"].values()) == [value for _, value in extras.given_logprobs]


async def test_generate_has_a_text_where_it_is_wanted(client: httpx.AsyncClient) -> None:
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 5, "logprobs": 1}, "output_mode": "text"}
    for parts in (
        (await _said(client, body))["choices"],
        [each for chunk in await _chunks(client, body) for each in chunk["choices"]],
    ):
        ids = [token for each in parts for token in each["token_ids"]]
        assert "".join(each["text"] for each in parts) == "".join(f" {token}" for token in ids)
        entries = [entry for each in parts for entry in each["logprobs"]["content"]]
        assert [entry["token"] for entry in entries] == [f" {token}" for token in ids]


async def test_prompt_is_scored(client: httpx.AsyncClient) -> None:
    prompt = [11, 12, 13, 14]
    whole = await _said(client, {"token_ids": prompt, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0}})
    key = int(whole["request_id"].removeprefix("generate-tokens-"), 16)
    nothing, *scored = whole["prompt_logprobs"]
    assert nothing is None
    assert _singles([each[str(token)]["logprob"] for token, each in zip(prompt[1:], scored, strict=True)]) == (
        true_prompt_scores(key, prompt, PromptScoring()).logprobs.tolist()
    )


async def test_long_prompt_is_read_by_an_encoder(client: httpx.AsyncClient) -> None:
    prompt = list(range(4000))
    of_vllm = {"token_ids": prompt, "sampling_params": {"max_tokens": 1}, "return_token_ids": True}
    assert (await _said(client, of_vllm))["prompt_token_ids"] == prompt


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ({"sampling_params": {}}, "token_ids: required, got nothing"),
        ({"sampling_params": {"n": 0}}, "sampling_params.n: expected int >= 1, got 0"),
        ({"sampling_params": {"stop": [""]}}, None),
        ({"features": {"a": 1}}, "features: expected null, got {'a': 1}"),
        ({"kv_transfer_params": {}}, "kv_transfer_params: expected null, got {}"),
        ({"sampling_params": {"logprob_token_ids": [1]}}, None),
        ({"reasoning_ended": False}, "reasoning_ended: only True, got False"),
        ({"output_mode": "json"}, "output_mode: one of 'tokens', 'text', got 'json'"),
        (
            {"sampling_params": {"detokenize": False}, "output_mode": "text"},
            "output_mode: tokens where sampling_params.detokenize is false, got text",
        ),
    ],
)
async def test_wrong_bodies_are_refused(client: httpx.AsyncClient, body: dict[str, Any], line: str | None) -> None:
    valid: dict[str, Any] = {"token_ids": PROMPT, "sampling_params": {}}
    if line == "token_ids: required, got nothing":
        del valid["token_ids"]
    answer = await client.post(PATH, json=valid | body)
    error = error_of(answer.text)
    (field, given) = next(iter(body.items()))
    param = f"{field}.{next(iter(given))}" if field == "sampling_params" and given else field
    assert answer.status_code == 400
    if line is None:
        assert (error["param"] or "").startswith(param)
    else:
        assert error["message"] == line
