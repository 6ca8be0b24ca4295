"""Token ids out: answers of /inference/v1/generate, of steps that are at hand."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from tests.gateway.rendering import Steps, chunks, said, spelled, three_steps
from tests.in_process.builders import settings
from tokenbus.delivery import RequestFailedError
from tokenbus.delivery.errors import request_error
from tokenbus.gateway.completion_request import CompletionRequest, Reader
from tokenbus.gateway.errors import ApiError, of_request
from tokenbus.gateway.openai_format import GenerateFormat
from tokenbus.gateway.vocabulary import vocabulary_of
from tokenbus_contracts import Scoring
from tokenbus_contracts.generated.request_pb2 import ErrorCode

READER = Reader(settings(), vocabulary_of("bytes"))
OUTPUT = "hello world"
K = 2


def ids_of(steps: Steps) -> list[int]:
    return [token for each, _ in steps for row in each.rows() for token in row.token_ids.tolist()]


def of_vllm(**fields: Any) -> CompletionRequest:  # noqa: ANN401 - JSON
    sampling = {"logprobs": K, **fields.pop("sampling_params", {})}
    return READER.generation({"token_ids": [1, 2], "sampling_params": sampling, **fields})


@pytest.mark.parametrize("mode", ["tokens", "text"])
async def test_generated_ids_are_the_same_streamed(mode: str) -> None:
    steps = three_steps(top_k=K)
    asked = of_vllm(output_mode=mode, return_token_ids=True)
    (whole,) = json.loads(await said(asked, steps, spelled(OUTPUT, steps), GenerateFormat))["choices"]
    streamed = replace(asked, is_streamed=True, wants_usage=True, wants_running_usage=True)
    first, *others, last = chunks(await said(streamed, steps, spelled(OUTPUT, steps), GenerateFormat))
    assert (first["prompt_token_ids"], last["choices"]) == ([1, 2], [])
    parts = [choice for chunk in others for choice in chunk["choices"]]
    assert [token for part in parts for token in part["token_ids"]] == whole["token_ids"] == ids_of(steps)
    assert [entry for part in parts for entry in part["logprobs"]["content"]] == whole["logprobs"]["content"]
    assert "".join(part.get("text", "") for part in parts) == whole.get("text", "")
    assert ("text" in whole) is (mode == "text")
    assert [chunk["usage"]["completion_tokens"] for chunk in (first, *others, last)] == [0, 1, 4, 6, 6]
    assert [part["finish_reason"] for part in parts] == [None, None, whole["finish_reason"]] == [None, None, "length"]


async def test_tokens_without_a_score_have_null() -> None:
    steps = three_steps(scoring=Scoring.NONE, top_k=K)
    whole = json.loads(await said(of_vllm(), steps, spelled(OUTPUT, steps), GenerateFormat))
    assert whole["choices"][0]["logprobs"]["content"] == [
        {**entry, "top_logprobs": [entry]}
        for entry in ({"token_id": token, "logprob": None, "rank": None} for token in ids_of(steps))
    ]


@pytest.mark.parametrize("sampling", [{}, {"max_tokens": None}])
def test_without_max_tokens_as_many_tokens_as_fit_are_generated(sampling: dict[str, Any]) -> None:
    assert of_vllm(sampling_params=sampling).generate(0).sampling.max_tokens == 0


def test_errors_of_workers_name_the_bodys_field() -> None:
    for asked, named in (
        (of_vllm(), "sampling_params.structured_outputs: wrong"),
        (of_vllm(sampling_params={"structured_outputs": {"regex": "a"}}), "sampling_params.structured_outputs: wrong"),
    ):
        error = ApiError(400, "response_format: wrong", param="response_format")
        assert error.renamed(asked.fields).message == named
    asked = of_vllm(return_mask=4, return_logprobs_of=[3])
    for member, field in (("mask_bound", "return_mask"), ("token_ids[0]", "return_logprobs_of[0]")):
        failed = request_error(1, ErrorCode.ERROR_CODE_INVALID_REQUEST, f"token_scoring.{member}: none here")
        assert of_request(RequestFailedError(failed), 0).renamed(asked.fields).message == f"{field}: none here"
