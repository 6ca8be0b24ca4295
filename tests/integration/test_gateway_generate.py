"""Token ids in, token ids out: vLLM's /inference/v1/generate and SGLang's /generate, as rollout clients send them."""

import json
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from typing import Any

import httpx
import numpy as np
import pytest

from tests.integration.serving import Served, error_of, served, when_ready
from tests.services.gateway.rendering import array
from tokenbus_contracts.generated.request_pb2 import PromptScoring, TokenScoring
from tokenbus_engines.synthetic import alternatives, draws, true_extras, true_prompt_scores, true_tokens
from tokenbus_services.delivery.step import extras_by_token

pytestmark = pytest.mark.xdist_group("gateway")
VLLM, SGLANG = "/inference/v1/generate", "/generate"
PROMPT = [5, 6, 7]
COUNT = 20


@pytest.fixture(scope="module")
def system() -> Iterator[Served]:
    with served(gateway__tokenizer="numbers", gateway__processes=2) as made:
        made.start_worker("worker-0", "--steps-per-second", "200")
        yield made


@pytest.fixture
async def client(system: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with when_ready(system.url, "/health_generate") as made:
        yield made


async def _said(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:  # noqa: ANN401 - JSON
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def _chunks(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with client.stream("POST", path, json=body | {"stream": True}) as answer:
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
        *chunks, last = await _chunks(client, VLLM, body | {"stream_options": {"include_usage": True}})
        whole: dict[str, Any] = {**chunks[0], **last}
        assert last["choices"] == []
        parts = [each for chunk in chunks for each in chunk["choices"]]
    else:
        whole = await _said(client, VLLM, body)
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
    parts = await _chunks(client, VLLM, body) if is_streamed else [await _said(client, VLLM, body)]
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
        (await _said(client, VLLM, body))["choices"],
        [each for chunk in await _chunks(client, VLLM, body) for each in chunk["choices"]],
    ):
        ids = [token for each in parts for token in each["token_ids"]]
        assert "".join(each["text"] for each in parts) == "".join(f" {token}" for token in ids)
        entries = [entry for each in parts for entry in each["logprobs"]["content"]]
        assert [entry["token"] for entry in entries] == [f" {token}" for token in ids]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("k", [0, 2])
async def test_sglangs_answers_have_the_true_tokens(client: httpx.AsyncClient, k: int, *, is_streamed: bool) -> None:
    """Of several prompts, as a stream's chunks each with all that came before."""
    body = {
        "input_ids": [PROMPT, [9]], "sampling_params": {"max_new_tokens": COUNT}, "return_logprob": True,
        "top_logprobs_num": k,
    }  # fmt: skip
    if is_streamed:
        chunks = await _chunks(client, SGLANG, body)
        of_each = [[chunk for chunk in chunks if chunk["index"] == index] for index in range(2)]
        for before, after in (pair for own in of_each for pair in pairwise(own)):
            ids, logprobs = before["output_ids"], before["meta_info"]["output_token_logprobs"]
            assert after["output_ids"][: len(ids)] == ids
            assert after["meta_info"]["output_token_logprobs"][: len(ids)] == logprobs
        answers = [own[-1] for own in of_each]
        assert len(chunks) > 4
    else:
        answers = await _said(client, SGLANG, body)
    first = int(answers[0]["meta_info"]["id"].removesuffix("_0"), 16)
    for index, answer in enumerate(answers):
        meta, key = answer["meta_info"], (first + index) % 2**64
        true = true_tokens(key, 0, COUNT)
        assert answer["output_ids"] == true.ids.tolist()
        assert answer["text"] == "".join(f" {token}" for token in true.ids)
        assert meta["finish_reason"] == {"type": "length", "length": COUNT}
        assert (meta["prompt_tokens"], meta["completion_tokens"]) == ((3, 1)[index], COUNT)
        logprobs, ids, texts = zip(*meta["output_token_logprobs"], strict=True)
        assert (_singles(logprobs), list(ids), set(texts)) == (true.logprobs.tolist(), true.ids.tolist(), {None})
        assert meta["output_token_logprobs_length"] == COUNT
        if k:
            found = [[(token, logprob) for logprob, token, _ in each] for each in meta["output_top_logprobs"]]
            assert found == _true_tops(key, k)
        else:
            assert "output_top_logprobs" not in meta


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_sglangs_answers_have_given_tokens_and_masks(client: httpx.AsyncClient, *, is_streamed: bool) -> None:
    """The prompt's given tokens too, where it is scored; a mask of more tokens than are listed is null."""
    given = [9, 300]
    body = {
        "input_ids": PROMPT, "return_logprob": True,
        "token_ids_logprob": given, "return_sampling_mask": True,
    }  # fmt: skip
    body["sampling_params"] = {"max_new_tokens": COUNT, "custom_params": {"return_top_p_token_ids": True}}
    if is_streamed:
        *_, answer = await _chunks(client, SGLANG, body)
    else:
        answer = await _said(client, SGLANG, body | {"logprob_start_len": 0})
    meta = answer["meta_info"]
    key = int(meta["id"], 16)
    scoring = TokenScoring(other_logprobs=True, token_ids=given, mask_bound=1024)
    true = true_extras(key, 0, COUNT, scoring)
    for found, values in zip(meta["output_token_ids_logprobs"], true.given_logprobs.tolist(), strict=True):
        assert [(_singles(logprob), token) for logprob, token, _ in found] == list(zip(values, given, strict=True))
    assert meta["output_token_sampling_mask"] == [None if mask is None else mask.tolist() for mask in true.masks()]
    assert _singles(meta["output_token_sampling_logprobs"]) == true.other_logprobs.tolist()
    assert meta["output_token_sampling_mask_length"] == COUNT
    offsets = array(meta["top_p_token_offsets"], "<i4")  # as slime reads them
    assert array(meta["top_p_token_ids"], "<i4").tolist() == true.mask_token_ids.tolist()
    assert offsets.tolist() == [0, *np.cumsum(true.mask_sizes).tolist()]
    if is_streamed:
        assert meta["input_token_ids_logprobs"] == []
    else:
        scores = true_prompt_scores(key, PROMPT, PromptScoring(token_ids=given))
        nothing, *lines = meta["input_token_ids_logprobs"]
        assert nothing is None
        assert [_singles([value for value, _, _ in line]) for line in lines] == scores.alternative_logprobs.tolist()


async def test_one_prompts_answer_is_no_list(client: httpx.AsyncClient) -> None:
    one = await _said(client, SGLANG, {"text": "5 6", "rid": "mine", "sampling_params": {"max_new_tokens": 3}})
    assert (one["meta_info"]["id"], one["meta_info"]["prompt_tokens"], len(one["output_ids"])) == ("mine", 3, 3)
    assert "output_token_logprobs" not in one["meta_info"]
    several = await _said(client, SGLANG, {"input_ids": PROMPT, "rid": "mine", "sampling_params": {"n": 2}})
    assert [each["meta_info"]["id"] for each in several] == ["mine_0", "mine_1"]
    assert [each["meta_info"]["completion_tokens"] for each in several] == [128, 128]  # SGLang's default
    named = await _said(client, SGLANG, {"input_ids": [[1], [2]], "rid": ["a", "b"]})
    assert [each["meta_info"]["id"] for each in named] == ["a", "b"]


async def test_prompt_is_scored(client: httpx.AsyncClient) -> None:
    """Scored alone, as slime asks a teacher, from a position on, and by given tokens."""
    prompt = [11, 12, 13, 14]
    body: dict[str, Any] = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}
    cases: list[tuple[dict[str, Any], PromptScoring, str | None]] = [
        ({"logprob_start_len": 0}, PromptScoring(), None),
        ({"logprob_start_len": 2, "top_logprobs_num": 2}, PromptScoring(top_logprobs=2, first_position=3), "top"),
        ({"logprob_start_len": 0, "token_ids_logprob": [3, 1]}, PromptScoring(token_ids=[3, 1]), "token_ids"),
        ({"logprob_start_len": 3}, PromptScoring(first_position=4), None),
    ]
    for asked, wanted, name in cases:
        answer = await _said(client, SGLANG, body | asked)
        meta = answer["meta_info"]
        true = true_prompt_scores(int(meta["id"], 16), prompt, wanted)
        assert (answer["output_ids"], meta["finish_reason"]) == ([], {"type": "length", "length": 0})
        (nothing, first, _), *others = meta["input_token_logprobs"]
        assert (nothing, first) == (None, prompt[asked["logprob_start_len"]])
        assert _singles([logprob for logprob, _, _ in others]) == true.logprobs.tolist()
        assert [token for _, token, _ in others] == true.token_ids.tolist()
        if name is not None:
            nothing, *tops = meta[f"input_{name}_logprobs"]
            assert nothing is None
            assert [[token for _, token, _ in top] for top in tops] == true.alternative_token_ids.tolist()
            assert [_singles([value for value, _, _ in top]) for top in tops] == true.alternative_logprobs.tolist()
    whole = await _said(client, VLLM, {"token_ids": prompt, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0}})
    key = int(whole["request_id"].removeprefix("generate-tokens-"), 16)
    nothing, *scored = whole["prompt_logprobs"]
    assert nothing is None
    assert _singles([each[str(token)]["logprob"] for token, each in zip(prompt[1:], scored, strict=True)]) == (
        true_prompt_scores(key, prompt, PromptScoring()).logprobs.tolist()
    )


async def test_long_prompt_is_read_by_an_encoder(client: httpx.AsyncClient) -> None:
    prompt = list(range(4000))
    of_vllm = {"token_ids": prompt, "sampling_params": {"max_tokens": 1}, "return_token_ids": True}
    assert (await _said(client, VLLM, of_vllm))["prompt_token_ids"] == prompt
    of_sglang = {"input_ids": [prompt, prompt], "sampling_params": {"max_new_tokens": 1}, "rid": ["a", "b"]}
    answers = await _said(client, SGLANG, of_sglang)
    assert [(each["meta_info"]["id"], each["meta_info"]["prompt_tokens"]) for each in answers] == [
        ("a", 4000), ("b", 4000)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "line"),
    [
        (VLLM, {"sampling_params": {}}, "token_ids: required, got nothing"),
        (VLLM, {"sampling_params": {"n": 0}}, "sampling_params.n: expected int >= 1, got 0"),
        (VLLM, {"sampling_params": {"stop": [""]}}, None),
        (VLLM, {"features": {"a": 1}}, "features: expected null, got {'a': 1}"),
        (VLLM, {"kv_transfer_params": {}}, "kv_transfer_params: expected null, got {}"),
        (VLLM, {"sampling_params": {"logprob_token_ids": [1]}}, None),
        (VLLM, {"reasoning_ended": False}, "reasoning_ended: only True, got False"),
        (VLLM, {"output_mode": "json"}, "output_mode: one of 'tokens', 'text', got 'json'"),
        (
            VLLM,
            {"sampling_params": {"detokenize": False}, "output_mode": "text"},
            "output_mode: tokens where sampling_params.detokenize is false, got text",
        ),
        (SGLANG, {"input_ids": []}, "input_ids: expected array of length >= 1, got a length of 0"),
        (SGLANG, {"text": "a"}, "input_ids: either this or text, got both"),
        (SGLANG, {"sampling_params": {"custom_params": {"a": 1}}}, None),
        (SGLANG, {"return_routed_experts": True}, "return_routed_experts: only False, got True"),
        (SGLANG, {"image_data": "a"}, "image_data: no such field, got 'a'"),
        (
            SGLANG,
            {"token_ids_logprob": [1], "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2},
            "token_ids_logprob: only with top_logprobs_num 0 where logprob_start_len is at least 0, got 2",
        ),
        (
            SGLANG,
            {"token_ids_logprob": [1] * 129, "return_logprob": True},
            "token_ids_logprob: at most 128 where tokens are generated, got 129",
        ),
        (
            SGLANG,
            {"token_ids_logprob": [1], "return_logprob": True, "sampling_params": {"max_new_tokens": 0}},
            "token_ids_logprob: only where tokens are generated or logprob_start_len is at least 0, got it",
        ),
        (SGLANG, {"return_entropy": True}, "return_entropy: only False, got True"),
        (SGLANG, {"sampling_logprobs_mode": "support"}, "sampling_logprobs_mode: only 'selected', got 'support'"),
        (
            SGLANG,
            {"return_logprob": True, "logprob_start_len": 3},
            "logprob_start_len: below 3, the tokens of the shortest prompt, got 3",
        ),
        (
            SGLANG,
            {"return_logprob": True, "logprob_start_len": 0, "stream": True},
            "logprob_start_len: only without stream, got it with",
        ),
        (SGLANG, {"rid": ["a", "b"]}, "rid: one for each of 1 prompts, got 2"),
    ],
)
async def test_wrong_bodies_are_refused(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], line: str | None
) -> None:
    valid = {"token_ids": PROMPT, "sampling_params": {}} if path == VLLM else {"input_ids": PROMPT}
    if line == "token_ids: required, got nothing":
        del valid["token_ids"]
    answer = await client.post(path, json=valid | body)
    error = error_of(answer.text)
    (field, given) = next(iter(body.items()))
    param = f"{field}.{next(iter(given))}" if field == "sampling_params" and given else field
    assert answer.status_code == 400
    if line is None:
        assert (error["param"] or "").startswith(param)
    else:
        assert error["message"] == line
