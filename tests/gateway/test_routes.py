"""The routes on an in-process bus: OpenAI's own client, plain HTTP, and what every answer has to be true to."""

import asyncio
import json
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Message

from tests.gateway.answering import App, answering
from tests.system.serving import error_of
from tokenbus.delivery.step import extras_by_token
from tokenbus.engines.ngram import NgramEngine
from tokenbus.engines.synthetic import (
    SyntheticEngine,
    alternatives,
    draws,
    true_extras,
    true_prompt_scores,
    true_tokens,
)
from tokenbus.gateway.metrics import GATEWAY
from tokenbus.worker import StepArrays
from tokenbus_contracts.generated.request_pb2 import Generate, PromptScoring, TokenScoring

MODEL = "tokenbus"
PROMPT = "How do you learn a language?"
TEXT: dict[str, Any] = {"gateway__tokenizer": "ngram"}
BODY: dict[str, Any] = {"model": MODEL, "prompt": "a", "max_tokens": 3}
TALK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "seed": 3}
GENERATE = "/inference/v1/generate"


async def _post(app: App, path: str, **body: Any) -> Any:  # noqa: ANN401 - JSON
    answer = await app.client().post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def _chunks(app: App, path: str, **body: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - JSON
    answer = await app.client().post(path, json=body | {"stream": True})
    *chunks, done = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert done == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


# Engines that write text.


async def test_chat_streams_what_it_answers_at_once() -> None:
    given: dict[str, Any] = TALK | {"max_completion_tokens": 24, "logprobs": True, "top_logprobs": 2}
    async with answering(NgramEngine(), **TEXT) as app, app.openai() as client:
        (choice,) = (await client.chat.completions.create(**given)).choices
        chunks: list[Any] = [chunk async for chunk in await client.chat.completions.create(**given, stream=True)]
    assert choice.logprobs is not None
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
    entries = [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert entries == choice.logprobs.content
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == choice.message.content


async def test_tokens_and_text_of_an_ended_answer_agree() -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 400, "seed": 5, "logprobs": 3}
    async with answering(NgramEngine(), **TEXT) as app:
        answer = await _post(app, "/v1/completions", **body)
        went_on = await _post(app, "/v1/completions", **body, ignore_eos=True)
    assert (went_on["choices"][0]["finish_reason"], went_on["usage"]["completion_tokens"]) == ("length", 400)
    (choice,) = answer["choices"]
    found = choice["logprobs"]
    assert choice["finish_reason"] == "stop"
    assert "".join(found["tokens"]) == choice["text"]
    assert found["tokens"][-1] == ""
    assert len(found["token_logprobs"]) == len(found["tokens"]) == answer["usage"]["completion_tokens"]
    assert all(token in top for token, top in zip(found["tokens"], found["top_logprobs"], strict=True))
    assert found["top_logprobs"][-1][""] == found["token_logprobs"][-1]


async def test_inspection_tells_where_each_token_came_from() -> None:
    body = {"prompt": PROMPT, "max_tokens": 30, "seed": 9}
    async with answering(NgramEngine(), **TEXT) as app:
        answer = await app.client().post("/inspect", json=body | {"top_logprobs": 4})
        (whole,) = (await _post(app, "/v1/completions", model=MODEL, **body))["choices"]
    events = [event.split("\n") for event in answer.text.removesuffix("\n\n").split("\n\n")]
    told = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in events]
    assert [name for name, _ in told] == ["begin", *["row"] * (len(told) - 2), "end"]
    rows = [data for name, data in told if name == "row"]
    tokens = [token for row in rows for token in row["tokens"]]
    assert "".join(token["text"] for token in tokens) == whole["text"]
    assert told[-1][1] == {"reason": whole["finish_reason"], "tokens": len(tokens)}
    assert all(len(token["alternatives"]) == 4 and "entropy" not in token for token in tokens)
    position = 0
    for row in rows:
        assert (row["worker"], row["position"]) == ("worker-0", position)
        position += len(row["tokens"])
        accepted = [draft["accepted"] for draft in row["draft"]]
        assert accepted == sorted(accepted, reverse=True)  # whatever follows a draft that was rejected was, too
        assert sum(accepted) >= min(len(accepted), len(row["tokens"]) - 1)
    assert any(row["draft"] for row in rows)
    assert [row["step"] for row in rows] == sorted({row["step"] for row in rows})


async def test_engine_refuses_by_name_what_it_cannot_do() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"presence_penalty": 0.5}, "presence_penalty: only 0 with this engine, got 0.5"),
        ({"logit_bias": {"7": -100}}, "logit_bias: no element with this engine, got 1"),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs: none with this engine, got regex"),
        ({"min_tokens": 9}, "min_tokens: at most 3, max_tokens, got 9"),
        ({"prompt": [10_000_000]}, "prompt[0]: "),
    ]
    neutral = {"min_p": 0, "repetition_penalty": 1, "min_tokens": 0, "logit_bias": {}, "cache_salt": "mine"}
    async with answering(NgramEngine(), **TEXT) as app:
        for fields, line in refused:
            answer = await app.client().post("/v1/completions", json=BODY | fields)
            error = error_of(answer.text)
            assert (answer.status_code, error["param"]) == (400, line.partition(":")[0])
            assert error["message"].startswith(line)
        answer = await app.client().post("/v1/completions", json=BODY | {"prompt": "word " * 3000})
        assert error_of(answer.text)["code"] == "context_length_exceeded"
        assert "this model's maximum context length is 2048 tokens" in answer.text
        assert await _post(app, "/v1/completions", **BODY, **neutral)


# Engines whose tokens are known.


EXTRAS: dict[str, Any] = {
    "return_other_logprobs": True, "return_entropies": True, "return_logprobs_of": [9, 300], "return_mask": 4
}  # fmt: skip


@pytest.mark.parametrize("names", [list(EXTRAS), ["return_entropies"], ["return_mask"]], ids="+".join)
async def test_tokens_have_the_extras_that_were_asked_for(names: list[str]) -> None:
    asked = {name: EXTRAS[name] for name in names}
    given = {"max_tokens": 9, "logprobs": 0}
    bodies = {"/v1/completions": BODY | given | asked, GENERATE: {"token_ids": [5], "sampling_params": given, **asked}}
    scoring = TokenScoring(
        other_logprobs="return_other_logprobs" in asked,
        entropies="return_entropies" in asked,
        token_ids=asked.get("return_logprobs_of"),
        mask_bound=asked.get("return_mask", 0),
    )
    async with answering() as app:
        answers = [
            parts
            for path, body in bodies.items()
            for parts in (await _chunks(app, path, **body), [await _post(app, path, **body)])
        ]
        inspected = await app.client().post("/inspect", json={"prompt": "a", "return_entropies": True})
    assert '"entropy":' in inspected.text
    for parts in answers:
        key = int((parts[0].get("id") or parts[0]["request_id"]).rpartition("-")[2], 16)
        true = extras_by_token(true_extras(key, 0, 9, scoring), 9)
        found = [each for part in parts for choice in part["choices"] for each in choice["token_extras"]]
        for said, extras in zip(found, true, strict=True):
            assert extras is not None
            assert said.get("other_logprob") == extras.other_logprob
            assert said.get("entropy") == extras.entropy
            assert said.get("logprobs", {}) == {str(token_id): value for token_id, value in extras.given_logprobs}
            assert said.get("mask_size") == extras.mask_size
            assert said.get("mask") == (None if extras.mask is None else list(extras.mask))


async def test_generate_has_the_given_tokens_as_alternatives() -> None:
    """Their ranks are null; that ids are named asks for logprobs, as in vLLM."""
    given = [300, 9, 4]
    async with answering() as app:
        body = await _post(app, "/v1/completions/render", **BODY, logprobs=1, logprob_token_ids=given)
        assert body[0]["sampling_params"]["logprobs"] is None
        whole = await _post(app, GENERATE, **body[0])
    (choice,) = whole["choices"]
    for token_id, entry in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
        own, *others = entry["top_logprobs"]
        assert own == {name: entry[name] for name in ("token_id", "logprob", "rank")}
        assert [other["token_id"] for other in others] == [each for each in given if each != token_id]
        assert all(other["rank"] is None and other["logprob"] <= 0 for other in others)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_alternatives_are_the_given_tokens(path: str) -> None:
    """As vLLM has them: the token itself, then those of `logprob_token_ids` in their order, and no others."""
    given, is_chat = [300, 9, 4], path != "/v1/completions"
    body = {"model": MODEL, "max_tokens": 9, "logprob_token_ids": given, "return_tokens_as_token_ids": True}
    body |= {"messages": TALK["messages"], "logprobs": True} if is_chat else {"prompt": "a", "logprobs": 3}
    async with answering() as app:
        answers = [await _chunks(app, path, **body), [await _post(app, path, **body)]]
    for parts in answers:
        key = int(parts[0]["id"].rpartition("-")[2], 16)
        true = true_tokens(key, 0, 9)
        extras = extras_by_token(true_extras(key, 0, 9, TokenScoring(token_ids=given)), 9)
        found = [choice["logprobs"] for part in parts for choice in part["choices"] if choice["logprobs"]]
        if is_chat:
            entries = [entry for each in found for entry in each["content"]]
            tops = [[(top["token"], top["logprob"]) for top in entry["top_logprobs"]] for entry in entries]
        else:
            tops = [list(top.items()) for each in found for top in each["top_logprobs"]]
        assert "token_extras" not in parts[0]["choices"][0]
        for top, token_id, logprob, each in zip(tops, true.ids.tolist(), true.logprobs.tolist(), extras, strict=True):
            assert each is not None
            others = [pair for pair in each.given_logprobs if pair[0] != token_id]
            wanted = [(f"token_id:{other}", value) for other, value in [(token_id, logprob), *others]]
            assert [(name, np.float32(value)) for name, value in top] == wanted


async def test_rendered_request_generates_what_it_asked_for() -> None:
    asked = {"temperature": 0.0, "logit_bias": {}, "stop": ["qq"], "max_tokens": 8, "return_token_ids": True}
    async with answering(NgramEngine(), **TEXT) as app:
        bodies: list[Any] = [
            await _post(app, "/v1/chat/completions/render", **TALK | asked, request_id="mine"),
            *(await _post(app, "/v1/completions/render", prompt=[PROMPT, "Once"], **asked)),
        ]
        wanted = (await _post(app, "/v1/chat/completions", **TALK | asked))["choices"]
        wanted += (await _post(app, "/v1/completions", prompt=[PROMPT, "Once"], **asked))["choices"]
        made = [(await _post(app, GENERATE, **body))["choices"][0] for body in bodies]
        whole = await _post(app, "/v1/completions/render", prompt="Once", temperature=0.5, max_tokens=2000)
        message = await _post(app, "/v1/messages/render", messages=TALK["messages"], max_tokens=8)
        response = await _post(app, "/v1/responses/render", input=PROMPT)
    assert [choice["token_ids"] for choice in made] == [choice["token_ids"] for choice in wanted]
    assert message["token_ids"] == response["token_ids"] == bodies[0]["token_ids"]
    assert (bodies[0]["request_id"], response["request_id"][:5]) == ("chatcmpl-mine", "resp_")
    assert [body["request_id"].rpartition("-")[2] for body in bodies[1:]] == ["0", "1"]
    assert whole[0]["sampling_params"] == {
        "temperature": 0.5, "n": 1, "max_tokens": 2000, "logprobs": None, "structured_outputs": None,
        "ignore_eos": False, "include_stop_str_in_output": False, "skip_special_tokens": True,
    }  # fmt: skip


async def test_answers_have_the_name_in_the_header() -> None:
    """As with vLLM it stands before the body's own."""
    async with answering(NgramEngine(), **TEXT) as app, app.client() as client:
        client.headers["x-request-id"] = "hdr"
        for prompt in ("a", ["a", "b"]):
            body = BODY | {"prompt": prompt, "request_id": "abc"}
            answer = await client.post("/v1/completions", json=body)
            assert answer.json()["id"] == "cmpl-hdr"
            assert answer.headers["x-request-id"] != "hdr"  # which is the bus's
            rendered = (await client.post("/v1/completions/render", json=body)).json()
            names = ["cmpl-hdr"] if prompt == "a" else ["cmpl-hdr-0", "cmpl-hdr-1"]
            assert [each["request_id"] for each in rendered] == names
        refused = await client.post("/v1/completions", json=BODY, headers={"x-request-id": "a" * 257})
        assert error_of(refused.text)["message"] == "x-request-id: at most 256 characters, got 257"
        del client.headers["x-request-id"]
        answer = await client.post("/v1/completions", json=BODY | {"request_id": "abc"})
        assert answer.json()["id"] == "cmpl-abc"


@pytest.mark.parametrize(
    ("begins", "role", "echo"), [(False, "user", True), (True, "assistant", True), (True, "user", False)]
)
async def test_chat_is_echoed(begins: bool, role: str, echo: bool) -> None:  # noqa: FBT001 - parameters
    """The text begins with the last message's, if it has the answer's role; logprobs are the answer's own."""
    said = [{"role": "user", "content": "b"}, {"role": role, "content": [{"type": "text", "text": PROMPT}]}]
    asked = TALK | {"messages": said, "add_generation_prompt": begins, "max_tokens": 8, "logprobs": True, "n": 2}
    path = "/v1/chat/completions"
    async with answering(NgramEngine(), **TEXT) as app:
        plain = await _post(app, path, **asked)
        whole = await _post(app, path, **asked, echo=True)
        chunks = await _chunks(app, path, **asked, echo=True)
    for index, (own, choice) in enumerate(zip(plain["choices"], whole["choices"], strict=True)):
        wanted = (PROMPT if echo else "") + own["message"]["content"]
        deltas = [each["delta"] for chunk in chunks for each in chunk["choices"] if each["index"] == index]
        assert "".join(delta["content"] for delta in deltas) == choice["message"]["content"] == wanted
        assert choice["logprobs"] == own["logprobs"]
        assert deltas[0]["role"] == "assistant"


async def test_every_response_has_a_request_id_where_that_is_set() -> None:
    mine = {"x-request-id": "mine"}
    async with answering(gateway__request_id_headers=True) as app, app.client() as client:
        new, given = [(await client.get("/health", headers=each)).headers["x-request-id"] for each in ({}, mine)]
        answer = await client.post("/v1/completions", json=BODY, headers=mine)
    assert (len(new), given) == (32, "mine")
    assert answer.headers.get_list("x-request-id") != ["mine"]
    async with answering() as app, app.client() as client:
        assert "x-request-id" not in (await client.get("/health", headers=mine)).headers


async def test_answer_reports_the_load_to_a_proxy_that_asks() -> None:
    async with answering(NgramEngine(), **TEXT) as app, app.client() as client:
        await client.get("/v1/models")  # the gateway learns of its workers only once
        app.gateway.cache_usage = {("a", "m"): 0.25, ("b", "m"): 0.5}
        reports = [
            (await client.post("/v1/completions", json=BODY, headers=headers)).headers.get("endpoint-load-metrics")
            for headers in ({}, {"endpoint-load-metrics-format": "TEXT"}, {"endpoint-load-metrics-format": "json"})
        ]
    load = {"kv_cache_usage_perc": 0.5, "num_requests_waiting": 0}
    text = ", ".join(f"named_metrics.{name}={value}" for name, value in load.items())
    assert reports[:2] == [None, f"TEXT {text}"]
    assert json.loads(reports[2].removeprefix("JSON ")) == {"named_metrics": load}


async def test_settings_say_what_requests_may_leave_open() -> None:
    path, asked = "/v1/completions", BODY | {"logprobs": 0, "ignore_eos": True}
    given = {"gateway__return_tokens_as_token_ids": True, "gateway__force_include_usage": True}
    async with answering(NgramEngine(), **TEXT, **given) as app:
        by_ids = await _post(app, path, **asked)
        by_texts = await _post(app, path, **asked, return_tokens_as_token_ids=False)
        chunks = await _chunks(app, path, **asked)
    is_id = [each.startswith("token_id:") for each in by_ids["choices"][0]["logprobs"]["tokens"]]
    assert is_id == [True] * 3
    assert "".join(by_texts["choices"][0]["logprobs"]["tokens"]) == by_texts["choices"][0]["text"]
    used = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert used == sorted(used)
    assert used[-1] == 3


async def test_requests_are_aborted_by_the_names_that_their_clients_gave_them() -> None:
    abort = "/inference/v1/abort_requests"
    body = {"token_ids": [5], "sampling_params": {"max_tokens": 500}}
    async with answering(gateway__control=True) as app, app.client() as client:
        app.bus.worker.step_seconds = 1.0  # no step is computed before the test says so
        asking = [asyncio.create_task(client.post(GENERATE, json=body | {"request_id": name})) for name in ("a", "b")]
        await app.bus.settle()
        named = dict(app.gateway.named)
        for names in (["generate-tokens-a"], [f"generate-tokens-{named['b'][0]:016x}", "gone"]):
            answer = await client.post(abort, json={"request_ids": names})
            assert (answer.status_code, answer.json()) == (200, {"status": "aborted"})
        answers = [await app.bus.until(each) for each in asking]
        assert [each.json()["choices"][0]["finish_reason"] for each in answers] == ["abort", "abort"]
        assert app.gateway.named == {}
        answer = await client.post(abort, json={})
        assert (answer.status_code, error_of(answer.text)["param"]) == (400, "request_ids")


def _true_tops(key: int, k: int, count: int) -> list[list[tuple[int, float]]]:
    numbers = draws(np.full(count, key, np.uint64), np.arange(count))
    ids, logprobs = alternatives(numbers, np.full(count, k))
    pairs = list(zip(ids.tolist(), logprobs.tolist(), strict=True))
    return [pairs[k * place : k * (place + 1)] for place in range(count)]


def _singles(values: Any) -> list[float]:  # noqa: ANN401 - numbers of JSON
    return np.array(values, np.float32).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("k", [None, 0, 3])
async def test_generate_has_the_true_tokens(k: int | None, *, is_streamed: bool) -> None:
    prompt, count = [5, 6, 7], 20
    sampling = {"max_tokens": count, "logprobs": k, "n": 2}
    body = {"token_ids": prompt, "sampling_params": sampling, "return_token_ids": True}
    async with answering() as app:
        if is_streamed:
            *chunks, last = await _chunks(app, GENERATE, **body, stream_options={"include_usage": True})
            whole = {**chunks[0], **last}
            parts = [each for chunk in chunks for each in chunk["choices"]]
        else:
            whole = await _post(app, GENERATE, **body)
            parts = whole["choices"]
    assert (whole["prompt_token_ids"], whole["output_mode"]) == (prompt, "tokens")
    usage = {name: value for name, value in whole["usage"].items() if value is not None}
    assert usage == {"prompt_tokens": 3, "completion_tokens": 2 * count, "total_tokens": 2 * count + 3}
    for index in range(2):
        own = [each for each in parts if each["index"] == index]
        key = (int(whole["request_id"].removeprefix("generate-tokens-"), 16) + index) % 2**64
        true = true_tokens(key, 0, count)
        assert [token for each in own for token in each["token_ids"]] == true.ids.tolist()
        assert [each["finish_reason"] for each in own if each["finish_reason"]] == ["length"]
        entries = [entry for each in own for entry in (each["logprobs"] or {"content": ()})["content"]]
        if k is None:
            assert entries == []
            continue
        assert [entry["token_id"] for entry in entries] == true.ids.tolist()
        assert _singles([entry["logprob"] for entry in entries]) == true.logprobs.tolist()
        assert [entry["rank"] for entry in entries] == true.ranks.tolist()
        for entry, tops in zip(entries, _true_tops(key, k, count), strict=True):
            first = {name: entry[name] for name in ("token_id", "logprob", "rank")}
            others = [
                {"token_id": token, "logprob": logprob, "rank": rank}
                for rank, (token, logprob) in enumerate(tops, 1)
                if token != entry["token_id"]
            ]
            assert entry["top_logprobs"] == [first, *others][: k or 1]


async def test_generate_has_scores_of_the_prompt_where_they_are_wanted() -> None:
    prompt = [11, 12, 13, 14]
    async with answering() as app:
        scores = {"max_tokens": 1, "prompt_logprobs": 0, "n": 2}
        whole = await _post(app, GENERATE, token_ids=prompt, sampling_params=scores)
    nothing, *scored = whole["prompt_logprobs"]
    assert nothing is None
    key = int(whole["request_id"].removeprefix("generate-tokens-"), 16)
    assert _singles([each[str(token)]["logprob"] for token, each in zip(prompt[1:], scored, strict=True)]) == (
        true_prompt_scores(key, prompt, PromptScoring()).logprobs.tolist()
    )


async def test_batch_of_chats_is_answered_as_each_alone() -> None:
    chats = [[{"role": "user", "content": text}] for text in (PROMPT, "a", "Once upon")]
    body = {"seed": 3, "max_tokens": 8, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    async with answering(NgramEngine(), **TEXT) as app:
        batch = await _post(app, "/v1/chat/completions/batch", messages=chats, **body)
        alone = [await _post(app, "/v1/chat/completions", messages=each, **body) for each in chats]
    assert batch["choices"] == [one["choices"][0] | {"index": index} for index, one in enumerate(alone)]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert batch["usage"][name] == sum(one["usage"][name] for one in alone)
    assert (batch["object"], batch["prompt_token_ids"]) == ("chat.completion", None)


class Remembering(SyntheticEngine):
    """An engine that has the first half of each prompt in its cache, but of the first."""

    kv_cache_usage = 0.25

    def __init__(self) -> None:
        super().__init__()
        self._new: list[tuple[int, int, int]] = []
        self._is_first = True

    def admit(self, generate: Generate) -> int:
        size = super().admit(generate)
        if not self._is_first:
            self._new.append((generate.request_id, size, size // 2))
        self._is_first = False
        return size

    def step(self) -> Sequence[StepArrays]:
        made = super().step()
        made[0].cached_prompts, self._new = self._new, []
        return made


async def test_usage_says_how_much_of_all_prompts_was_cached() -> None:
    body, found = {"max_tokens": 3, "n": 2}, []
    async with answering(Remembering()) as app:
        for prompt in ([5, 6, 7, 8], [5, 6, 7, 8], [[5, 6, 7, 8], [9, 9]]):
            *_, chunk = await _chunks(
                app, "/v1/completions", **body, prompt=prompt, stream_options={"include_usage": True}
            )
            found.append(chunk["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert found == [0, 2, 3]


# Facts.


async def test_models_health_and_documents() -> None:
    async with answering() as app, app.client() as client, app.openai() as openais:
        assert [model.id async for model in openais.models.list()] == [MODEL]
        model = (await client.get(f"/v1/models/{MODEL}")).json()
        assert {name: model[name] for name in ("id", "root", "parent", "max_model_len")} == {
            "id": MODEL, "root": MODEL, "parent": None, "max_model_len": None
        }  # fmt: skip
        assert (await openais.models.retrieve(MODEL)).id == MODEL
        assert (await client.get("/readyz")).json() == {"status": "ready", "problems": [], "paused": []}
        assert (await client.get("/healthz")).json()["connection"] == "open"
        for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
            answer = await client.request(method, path)
            assert (answer.status_code, answer.content) == (200, b"")
        assert (await client.get("/version")).json() == {"version": version("tokenbus")}
        assert (await client.get("/load")).json() == {"server_load": 0}
        told = {family.name: family for family in text_string_to_metric_families((await client.get("/metrics")).text)}
        assert (await client.get("/openapi.json")).json()["openapi"] == "3.1.0"
        page = await client.get("/")
        assert page.headers["content-security-policy"].startswith("default-src 'self'")
        assert (await client.get("/", headers={"if-none-match": page.headers["etag"]})).status_code == 304
    for family in GATEWAY:
        found = told[family.name.removesuffix("_total")]
        assert (found.type, found.documentation) == (family.kind, family.help)


def _of_vllm(page: str, *names: str) -> list[float]:
    found = {each.name: each.value for family in text_string_to_metric_families(page) for each in family.samples}
    return [found[f"vllm:{name}"] for name in names]


async def test_open_requests_run_or_wait_under_vllms_names() -> None:
    """What waits has no token yet; what ended is counted with its parameters."""
    names = ("num_requests_running", "num_requests_waiting")
    async with answering() as app, app.client() as client:
        app.bus.worker.step_seconds = 1.0  # no step is computed before the test says so
        asking = asyncio.create_task(client.post("/v1/completions", json=BODY | {"max_tokens": 900, "n": 2}))
        await app.bus.settle()
        assert _of_vllm((await client.get("/metrics")).text, *names) == [0, 2]
        await app.bus.advance(2.5)
        assert _of_vllm((await client.get("/metrics")).text, *names) == [2, 0]
        app.bus.worker.step_seconds = 0.0
        await app.bus.until(asking)
        page = (await client.get("/metrics")).text
    assert _of_vllm(page, *names) == [0, 0]
    ended = ("request_params_max_tokens_sum", "request_time_per_output_token_seconds_count")
    assert _of_vllm(page, *ended) == [1800, 2]


@pytest.mark.parametrize(("engine", "told"), [(Remembering, {("worker-0", MODEL): 0.25}), (SyntheticEngine, {})])
async def test_use_of_caches_is_told_under_vllms_name(
    engine: type[SyntheticEngine], told: dict[tuple[str, str], float]
) -> None:
    async with answering(engine()) as app, app.client() as client:
        await app.bus.advance(app.bus.settings.bus.heartbeat_interval_ms / 1000)
        await app.gateway.learn_models(is_new=True)
        page = (await client.get("/metrics")).text
    (family,) = [each for each in text_string_to_metric_families(page) if each.name == "vllm:kv_cache_usage_perc"]
    assert {(each.labels["engine"], each.labels["model_name"]): each.value for each in family.samples} == told


async def test_without_a_worker_it_is_not_ready() -> None:
    async with answering(workers=0) as app, app.client() as client:
        answer = await client.get("/readyz")
        assert (answer.status_code, answer.json()["problems"]) == (503, ["no connected worker takes requests"])
        assert [(await client.get(path)).status_code for path in ("/health", "/ping")] == [503, 503]
        asking = asyncio.create_task(client.post("/v1/completions", json=BODY))
        refused = await app.bus.until(asking)
        assert (refused.status_code, error_of(refused.text)["code"]) == (503, "no_worker")
        assert refused.headers["retry-after"] == "1"
        await app.bus.add_worker()
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200


async def test_answers_of_a_lost_worker_end_with_its_error(caplog: pytest.LogCaptureFixture) -> None:
    async with answering() as app, app.client() as client:
        app.bus.worker.step_seconds = 0.1
        bodies = [BODY | {"max_tokens": 900, "stream": is_streamed} for is_streamed in (True, False)]
        answers = [asyncio.create_task(client.post("/v1/completions", json=body)) for body in bodies]
        await app.bus.advance(0.5)
        await app.bus.worker.lose()
        stream, whole = [await app.bus.until(answer) for answer in answers]
        page = (await client.get("/metrics")).text
    *chunks, broken = [line.removeprefix("data: ") for line in stream.text.splitlines() if line.startswith("data: ")]
    assert (whole.status_code, error_of(whole.text)["code"], error_of(broken)["code"]) == (502, *["worker_lost"] * 2)
    assert f"(after {3 * len(chunks)} tokens)" in error_of(broken)["message"]
    lines = [f'request failed request="{each.headers["x-request-id"]}" code="worker_lost"' for each in (stream, whole)]
    assert any(line in caplog.text for line in lines)  # one line for both
    assert 'tokenbus_gateway_broken_answers_total{code="worker_lost"} 1.0' in page


async def test_a_gateway_that_can_go_on_with_nothing_says_so() -> None:
    """Where what hands out tokens has ended, requests would wait for ever: /healthz says so."""
    async with answering() as app, app.client() as client:
        assert (await client.get("/healthz")).status_code == 200
        assert app.gateway.dispatching is not None
        app.gateway.dispatching.cancel()
        await asyncio.wait([app.gateway.dispatching])
        answer = await client.get("/healthz")
        assert (answer.status_code, "restart the gateway" in answer.text) == (503, True)


# Wrong requests.


async def test_unknown_fields_are_logged_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    async with answering() as app, app.client() as client:
        for _ in range(3):
            await _post(app, "/v1/completions", **BODY, no_stop_trim=False)
        for number in range(300):
            await client.post("/tokenize", json={"prompt": "a", f"a{number}": 1, "no_stop_trim": 1})
        told = {family.name: family for family in text_string_to_metric_families((await client.get("/metrics")).text)}
    counts = {each.labels["field"]: each.value for each in told["tokenbus_gateway_ignored_fields"].samples}
    assert (counts["no_stop_trim"], counts["a0"], counts["(others)"]) == (303, 1, 45)
    lines = [line for line in caplog.text.splitlines() if "an unknown field is ignored" in line]
    assert len([line for line in lines if "no_stop_trim" in line]) == 1
    assert len(lines) == 256


async def test_what_is_no_request_of_a_route_is_refused() -> None:
    async with answering(workers=0) as app, app.client() as client:
        for data in (b"{", b"", b"\xff", b'{"model": "\\ud800"}', b'{"a": NaN}'):
            answer = await client.post("/v1/completions", content=data, headers={"content-type": "application/json"})
            assert (answer.status_code, error_of(answer.text)["code"]) == (400, "invalid_json")
        for kind in ({}, {"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"}):
            answer = await client.post("/v1/completions", content=b"{}", headers=kind)
            assert (answer.status_code, error_of(answer.text)["code"]) == (415, "unsupported_media_type")

        async def chunks() -> Any:  # noqa: ANN401 - bytes, for a while
            for _ in range(160):
                yield b"x" * 65_536

        for path in ("/v1/completions", "/inspect"):
            for content in (b'{"prompt": "' + b"x" * 10_000_000 + b'"}', chunks()):
                answer = await client.post(path, content=content, headers={"content-type": "application/json"})
                assert (answer.status_code, error_of(answer.text)["code"]) == (413, "request_too_large")
        assert error_of((await client.get("/v1/nothing")).text)["code"] == "not_found"
        assert (await client.get("/page/../secret")).status_code == 404
        answer = await client.get("/v1/completions")
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        assert error_of(answer.text)["code"] == "method_not_allowed"
        answer = await client.get("/v1/messages")
        assert (answer.status_code, answer.json()["type"]) == (405, "error")


@pytest.mark.parametrize(("path", "body", "encoding"), [
    ("/v1/completions", {"prompt": "a", "max_tokens": 400, "logprobs": 20}, b""),
    ("/v1/completions", {"prompt": "a", "max_tokens": 400, "logprobs": 20}, b"gzip"),
    ("/tokenize", {"prompt": "a" * 16_000, "return_token_strs": True}, b""),
])  # fmt: skip
async def test_others_run_between_the_pieces_of_a_long_answer(path: str, body: dict[str, Any], encoding: bytes) -> None:
    order = ""
    async with answering(gateway__compression="gzip") as app:
        given: list[Message] = [{"type": "http.request", "body": json.dumps(body).encode()}]
        headers = {b"host": b"localhost", b"content-type": b"application/json", b"accept-encoding": encoding}
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "client": ("127.0.0.1", 1)}

        async def receive() -> Message:
            if not given:
                await asyncio.Event().wait()
            return given.pop()

        async def send(message: Message) -> None:
            nonlocal order
            order += "p" * (message["type"] == "http.response.body")

        async def watch() -> None:
            nonlocal order
            while True:
                order += "-" * (not order.endswith("-"))
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        await app.asgi({**scope, "headers": list(headers.items())}, receive, send)
        watching.cancel()
    assert order.count("p") > 2
    assert "ppp" not in order


async def test_over_capacity_is_429() -> None:
    async with answering(gateway__max_requests=2) as app, app.client() as client:
        app.bus.worker.step_seconds = 1.0  # no step is computed before the test says so
        asking = asyncio.create_task(client.post("/v1/completions", json=BODY | {"n": 2}))
        await app.bus.settle()
        held = app.gateway.buffers.size
        refused = await client.post("/v1/completions", json=BODY)
        assert (refused.status_code, error_of(refused.text)["code"]) == (429, "overloaded")
        assert app.gateway.buffers.size == held
        assert refused.headers["retry-after"] == "1"
        # However long it waits, there is never room for three.
        assert (await client.post("/v1/completions", json=BODY | {"n": 3})).status_code == 400
        assert (await app.bus.until(asking)).status_code == 200
        app.bus.worker.step_seconds = 0.0
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200


async def test_answers_and_prompts_are_bounded() -> None:
    bounds: dict[str, Any] = {"gateway__max_prompt_tokens": 100, "gateway__answer_bytes": 20_000}
    async with answering(**bounds) as app, app.client() as client:
        for prompt, n, status in (([1] * 100, 4, 200), ([1] * 100, 5, 400), (["a" * 81] * 5, 1, 400)):
            answer = await client.post("/v1/completions", json=BODY | {"prompt": prompt, "n": n})
            assert answer.status_code == status
        assert "at most 400 tokens together" in error_of(answer.text)["message"]
        for fields in (
            {"max_tokens": 9000},
            {"max_tokens": 1_000_000, "logprobs": 20},
        ):  # many short rows, and long ones
            answer = await client.post("/v1/completions", json=BODY | fields)
            assert (answer.status_code, error_of(answer.text)["code"]) == (400, "answer_too_large")
        assert "an answer of at most" in answer.text
        await app.bus.settle()
        assert not len(app.gateway.dispatcher)
