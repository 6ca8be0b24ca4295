"""Token ids out: answers in vLLM's form of /inference/v1/generate and in SGLang's, of steps that are at hand."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.services.builders import settings
from tests.services.gateway.rendering import Steps, array, chunks, joined, said, spelled
from tokenbus.testing import RowShape, batch
from tokenbus_contracts import LogprobBatch, RowStatus, Scoring, ValueKind
from tokenbus_contracts.batch import STOP_TOKEN
from tokenbus_contracts.generated.request_pb2 import ErrorCode, PromptScoring
from tokenbus_contracts.schema import COLUMNS
from tokenbus_services.delivery import RequestFailedError
from tokenbus_services.delivery.errors import request_error
from tokenbus_services.delivery.weight_spans import WeightSpans
from tokenbus_services.gateway.buffers import Buffers
from tokenbus_services.gateway.completion_request import CompletionRequest, Reader
from tokenbus_services.gateway.errors import ApiError, of_request
from tokenbus_services.gateway.generate_format import GenerateFormat
from tokenbus_services.gateway.rendered_step import RenderedStep
from tokenbus_services.gateway.sglang_format import SglangFormat
from tokenbus_services.gateway.sse import StreamedAnswer
from tokenbus_services.gateway.vocabulary import vocabulary_of

READER = Reader(settings(), vocabulary_of("bytes"))
OUTPUT = "hello world"
K = 2


def steps_to(status: RowStatus = RowStatus.FINISHED_LENGTH, stop: int = 0, scoring: Scoring = Scoring.FULL) -> Steps:
    shapes = [(0, 1, RowStatus.ACTIVE), (1, 3, RowStatus.ACTIVE), (4, 2, status)]
    rows = [RowShape(3, *shape, scoring=scoring, top_k=K, stop=stop * (shape[0] == 4)) for shape in shapes]
    return [(batch([row], step=step), None) for step, row in enumerate(rows, 1)]


def ids_of(steps: Steps) -> list[int]:
    return [token for each, _ in steps for row in each.rows() for token in row.token_ids.tolist()]


def of_vllm(**fields: Any) -> CompletionRequest:  # noqa: ANN401 - JSON
    sampling = {"logprobs": K, **fields.pop("sampling_params", {})}
    return READER.generation({"token_ids": [1, 2], "sampling_params": sampling, **fields})


def of_sglang(**fields: Any) -> CompletionRequest:  # noqa: ANN401 - JSON
    body = {"input_ids": [1, 2], "return_logprob": True, "top_logprobs_num": K, **fields}
    return READER.sglang_generation(body)


async def sglangs(asked: CompletionRequest, steps: Steps) -> dict[str, Any]:
    """Return an answer in SGLang's form, of which a stream's last chunk has the same."""
    whole: dict[str, Any] = json.loads(await said(asked, steps, spelled(OUTPUT, steps), SglangFormat))
    *_, last = chunks(await said(replace(asked, is_streamed=True), steps, spelled(OUTPUT, steps), SglangFormat))
    assert whole["meta_info"].pop("e2e_latency") >= 0
    assert last["meta_info"].pop("e2e_latency") >= 0
    assert last == whole
    return whole


@pytest.mark.parametrize("mode", ["tokens", "text"])
async def test_generated_ids_are_the_same_streamed(mode: str) -> None:
    steps = steps_to()
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
    steps = steps_to(scoring=Scoring.NONE)
    whole = json.loads(await said(of_vllm(), steps, spelled(OUTPUT, steps), GenerateFormat))
    assert whole["choices"][0]["logprobs"]["content"] == [
        {**entry, "top_logprobs": [entry]}
        for entry in ({"token_id": token, "logprob": None, "rank": None} for token in ids_of(steps))
    ]
    meta = (await sglangs(of_sglang(), steps))["meta_info"]
    assert meta["output_token_logprobs"] == [[None, token, None] for token in ids_of(steps)]
    assert meta["output_top_logprobs"] == [None] * 6


@pytest.mark.parametrize(
    ("status", "stop", "stops", "reason"),
    [
        (RowStatus.FINISHED_LENGTH, 0, None, {"type": "length", "length": 6}),
        (RowStatus.FINISHED_STOP, 0, None, {"type": "stop", "matched": "its last"}),
        (RowStatus.FINISHED_STOP, STOP_TOKEN, None, {"type": "stop", "matched": "its last"}),
        (RowStatus.FINISHED_LENGTH, 0, "ld", {"type": "stop", "matched": "ld"}),
        (RowStatus.ABORTED, 0, None, {"type": "abort", "message": "Aborted"}),
    ],
)
async def test_why_sglangs_answers_ended(status: RowStatus, stop: int, stops: str | None, reason: Any) -> None:  # noqa: ANN401 - JSON
    steps = steps_to(status, stop)
    answer = await sglangs(of_sglang(sampling_params={"stop": stops}), steps)
    if reason.get("matched") == "its last":
        reason = {"type": "stop", "matched": ids_of(steps)[-1]}
    assert answer["meta_info"]["finish_reason"] == reason
    assert answer["output_ids"] == ids_of(steps)
    hidden = "ld" if stops or stop else ""
    assert answer["text"] == OUTPUT.removesuffix(hidden)


async def test_texts_are_in_sglangs_logprobs_where_they_are_asked_for() -> None:
    steps = steps_to()
    meta = (await sglangs(of_sglang(return_text_in_logprobs=True), steps))["meta_info"]
    assert "".join(text for _, _, text in meta["output_token_logprobs"]) == OUTPUT
    assert all(isinstance(text, str) for top in meta["output_top_logprobs"] for _, _, text in top)
    assert (meta["input_token_logprobs"], meta["input_top_logprobs"]) == ([], [])


def with_masks(made: LogprobBatch, sizes: list[int], kind: ValueKind = ValueKind.RAW_LOGPROBS) -> LogprobBatch:
    """Return a batch of one row, of whose tokens the first has a mask of two tokens; 4 are listed at most."""
    extras = {
        "extras": np.array([1], np.uint8),
        "mask_bounds": np.array([4], np.uint32),
        "mask_sizes": np.array(sizes, np.uint32),
        "mask_token_ids": np.array([3, 7], np.uint32),
        "other_logprobs": np.array([-0.1, -0.2], np.float32)[: len(sizes)],
    }
    return LogprobBatch.of_views(
        made.header._replace(value_kind=kind), {column.name: column.empty for column in COLUMNS} | made.columns | extras
    )


async def test_masks_that_are_too_large_are_null() -> None:
    """The logprobs beside them are of the distribution that the token was sampled from, whichever the engine's are."""
    custom = {"custom_params": {"return_top_p_token_ids": True}}
    asked = of_sglang(return_sampling_mask=True, token_ids_logprob=[9], sampling_params=custom)
    plain = batch([RowShape(3, 0, 2, RowStatus.FINISHED_LENGTH, top_k=K)])
    for kind, sampled in (
        (ValueKind.RAW_LOGPROBS, [-0.1, -0.2]),
        (ValueKind.PROCESSED_LOGPROBS, np.float64(plain.logprobs).tolist()),
    ):
        steps: Steps = [(with_masks(plain, [2, 5], kind), None)]
        meta = (await sglangs(asked, steps))["meta_info"]
        assert meta["output_token_sampling_mask"] == [[3, 7], None]
        assert meta["output_token_sampling_logprobs"] == pytest.approx(sampled)
        assert meta["output_token_ids_logprobs"] == [None, None]  # which were dropped on the way
        assert "top_p_token_ids" not in meta
    meta = (await sglangs(asked, [(plain, None)]))["meta_info"]
    assert meta["output_token_sampling_mask"] == meta["output_token_sampling_logprobs"] == [None, None]


async def test_the_last_version_of_the_weights_is_named() -> None:
    weights, steps = WeightSpans(), steps_to()
    for version, (each, _) in zip((7, 7, 9), steps, strict=True):
        weights.note(version, each.request_keys, each.positions)
    asked = replace(of_sglang(), is_streamed=True)
    answer = StreamedAnswer(asked, SglangFormat(asked, 1), settings().gateway, Buffers(2**30))
    answer.begin(lambda: None)
    for each, _ in steps:
        answer.listeners[0].take(RenderedStep(each, spelled(OUTPUT, steps), None, weights), 0)
    *_, last = chunks(answer.outbox.take(2**30).data)
    assert last["meta_info"]["weight_version"] == "9"
    assert last["meta_info"]["weight_versions"] == [
        {"version": "7", "start": 0, "end": 4}, {"version": "9", "start": 4, "end": 6}
    ]  # fmt: skip


def _begun(**overrides: Any) -> tuple[StreamedAnswer, Steps]:  # noqa: ANN401 - settings
    asked, steps = replace(of_sglang(), is_streamed=True), steps_to()
    answer = StreamedAnswer(asked, SglangFormat(asked, 1), settings(overrides).gateway, Buffers(2**30))
    answer.begin(lambda: None)
    answer.listeners[0].take(RenderedStep(steps[0][0], spelled("hello" * 500, steps)), 0)
    return answer, steps


async def test_what_sglangs_streams_send_again_is_bounded() -> None:
    answer, _ = _begun(**{"gateway.answer_bytes": 400})
    assert answer.error is not None
    assert answer.error.code == "answer_too_large"


@pytest.mark.parametrize(("interval", "tokens"), [(None, [1, 4, 6]), (2, [1, 4, 6]), (5, [1, 6])])
async def test_chunks_come_after_so_many_tokens(interval: int | None, tokens: list[int]) -> None:
    asked, steps = of_sglang(stream=True, sampling_params={"stream_interval": interval}), steps_to()
    found = list(chunks(await said(asked, steps, spelled(OUTPUT, steps), SglangFormat)))
    assert [each["meta_info"]["completion_tokens"] for each in found] == tokens
    assert [each["output_ids"] for each in found] == [ids_of(steps)[:count] for count in tokens]


@pytest.mark.parametrize("interval", [1, 2, 5])
async def test_chunks_have_what_is_new_where_the_settings_say_so(interval: int) -> None:
    reader = Reader(settings({"gateway.incremental_streaming_output": True}), vocabulary_of("bytes"))
    body = {"input_ids": [1, 2], "return_logprob": True, "top_logprobs_num": K, "stream": True}
    steps = steps_to(RowStatus.FINISHED_STOP)
    asked = reader.sglang_generation(body | {"sampling_params": {"stream_interval": interval}})
    found = list(chunks(await said(asked, steps, spelled(OUTPUT, steps), SglangFormat)))
    whole = await sglangs(of_sglang(), steps)
    assert len(found) == (2 if interval == 5 else 3)
    assert "".join(each["text"] for each in found) == whole["text"]
    assert joined(found, "output_ids") == whole["output_ids"]
    metas = [each["meta_info"] for each in found]
    for name in ("output_token_logprobs", "output_top_logprobs"):
        assert joined(metas, name) == whole["meta_info"][name]
    assert {name: metas[-1][name] for name in ("finish_reason", "completion_tokens")} == {
        name: whole["meta_info"][name] for name in ("finish_reason", "completion_tokens")
    }
    answer = StreamedAnswer(
        asked, SglangFormat(asked, 1), settings({"gateway.answer_bytes": 1}).gateway, Buffers(2**30)
    )
    answer.begin(lambda: None)
    answer.listeners[0].take(RenderedStep(steps[0][0], spelled(OUTPUT, steps)), 0)
    assert answer.error is None


async def test_what_waits_for_an_interval_is_bounded() -> None:
    asked, steps = replace(of_sglang(), is_streamed=True, is_incremental=True, stream_interval=100), steps_to()
    answer = StreamedAnswer(
        asked, SglangFormat(asked, 1), settings({"gateway.answer_bytes": 400}).gateway, Buffers(2**30)
    )
    answer.begin(lambda: None)
    for each, _ in steps[:2]:
        assert answer.error is None
        answer.listeners[0].take(RenderedStep(each, spelled("hello" * 500, steps)), 0)
    assert answer.error is not None
    assert answer.error.code == "answer_too_large"


async def test_slimes_arrays_are_of_what_is_new_in_each_chunk() -> None:
    """Their offsets would else be of other tokens than the chunk has."""
    custom = {"custom_params": {"return_top_p_token_ids": True}}
    asked = replace(of_sglang(sampling_params=custom), is_streamed=True, is_incremental=True)
    rows = [RowShape(3, 0, 1, top_k=K), RowShape(3, 1, 1, RowStatus.FINISHED_LENGTH, top_k=K)]
    steps: Steps = [(with_masks(batch([row], step=step), [2]), None) for step, row in enumerate(rows, 1)]
    found = list(chunks(await said(asked, steps, spelled(OUTPUT, steps), SglangFormat)))
    assert len(found) == len(rows)
    for chunk in found:
        meta = chunk["meta_info"]
        assert meta["output_token_sampling_mask"] == [[3, 7]]
        assert array(meta["top_p_token_ids"], "<i4").tolist() == [3, 7]
        assert array(meta["top_p_token_offsets"], "<i4").tolist() == [0, 2]


async def test_sglangs_stream_that_breaks_ends_with_its_error() -> None:
    answer, _ = _begun()
    answer.end(ApiError(502, "lost", code="worker_lost"))
    *_, last = chunks(answer.outbox.take(2**30).data)
    assert last["error"]["message"] == "lost"


def test_bodies_are_the_same_request() -> None:
    """Each of SGLang's names means what vLLM's does."""
    others = {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "stop": ["a"], "stop_token_ids": [3], "n": 2,
        "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.5, "logit_bias": {"5": 200},
        "ignore_eos": True, "skip_special_tokens": False}  # fmt: skip
    theirs = of_vllm(cache_salt="s", sampling_params=others | {
        "max_tokens": 7, "min_tokens": 2, "seed": 3, "include_stop_str_in_output": True,
        "structured_outputs": {"regex": "a+"},
    })  # fmt: skip
    ours = of_sglang(cache_salt="s", sampling_params=others | {
        "max_new_tokens": 7, "min_new_tokens": 2, "sampling_seed": 3, "no_stop_trim": True, "regex": "a+",
        "spaces_between_special_tokens": False, "custom_params": None,
    })  # fmt: skip
    assert ours.generate(1) == theirs.generate(1)
    assert ours.generate(1).sampling.seed == 4
    assert {each.bias for each in ours.generate(0).sampling.logit_bias} == {100}


@pytest.mark.parametrize(
    ("request_", "most"),
    [
        (of_vllm(), 0),
        (of_vllm(sampling_params={"max_tokens": None}), 0),
        (of_sglang(), 128),
        (of_sglang(sampling_params={"max_new_tokens": None}), 0),
    ],
)
def test_most_tokens_where_none_are_named(request_: CompletionRequest, most: int) -> None:
    """In vLLM as many as fit, in SGLang 128."""
    assert request_.generate(0).sampling.max_tokens == most


def test_errors_of_workers_name_the_bodys_field() -> None:
    for asked, named in (
        (of_vllm(), "sampling_params.structured_outputs: wrong"),
        (of_vllm(sampling_params={"structured_outputs": {"regex": "a"}}), "sampling_params.structured_outputs: wrong"),
        (of_sglang(sampling_params={"regex": "a"}), "sampling_params: wrong"),
    ):
        error = ApiError(400, "response_format: wrong", param="response_format")
        assert error.renamed(asked.fields).message == named
    asked = of_sglang(return_sampling_mask=True, token_ids_logprob=[3])
    for member, field in (
        ("mask_bound", "return_sampling_mask"),
        ("other_logprobs", "return_sampling_mask"),
        ("token_ids[0]", "token_ids_logprob[0]"),
    ):
        failed = request_error(1, ErrorCode.ERROR_CODE_INVALID_REQUEST, f"token_scoring.{member}: none here")
        assert of_request(RequestFailedError(failed), 0).renamed(asked.fields).message == f"{field}: none here"


def test_prompt_is_scored_from_a_position_on() -> None:
    asked = of_sglang(logprob_start_len=1, sampling_params={"max_new_tokens": 0})
    assert asked.generate(0).prompt_scoring == PromptScoring(
        top_logprobs=K, first_position=2, without_generation=True
    )  # fmt: skip
    for fields in ({}, {"logprob_start_len": -1}, {"logprob_start_len": 0, "return_logprob": False}):
        assert not of_sglang(**fields).generate(0).HasField("prompt_scoring")
