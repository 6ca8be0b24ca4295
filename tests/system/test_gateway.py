"""The gateway in front of a running system, used by OpenAI's own client."""

import asyncio
import json
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.processes import run
from tests.support.waiting import MOST, soon, until
from tests.system.deployment import COMMAND
from tests.system.serving import Served, answers, asking, error_of, is_true, plainly, served
from tokenbus.delivery.step import extras_by_token
from tokenbus.engines.synthetic import true_extras
from tokenbus.gateway.metrics import GATEWAY
from tokenbus.gateway.vocabulary import vocabulary_of
from tokenbus_contracts.generated.request_pb2 import TokenScoring

pytestmark = pytest.mark.xdist_group("gateway")
MODEL = "tokenbus"
PROMPT = "How do you learn a language?"
LONG = 100_000
TEXT = {"gateway__tokenizer": "ngram"}
NUMBERS = {"gateway__tokenizer": "numbers"}


@pytest.fixture(scope="module")
def text() -> Iterator[Served]:
    """Run a system whose engine writes text."""
    with served(**TEXT) as system:
        system.deployment.start_worker("worker-0", "--engine", "ngram", "--steps-per-second", "0")
        yield system


@pytest.fixture(scope="module")
def numbers() -> Iterator[Served]:
    """Run a system whose tokens a test can compute again."""
    with served(**NUMBERS) as system:
        system.start_worker("worker-0", "--drafts")
        yield system


# What is asked for is what comes.


async def test_completion_streams_what_it_answers_at_once(text: Served) -> None:
    given: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 40, "logprobs": 3, "seed": 7}
    async with asking(text.url) as client:
        whole = await client.completions.create(**given)
        again = await client.completions.create(**given)
        stream = await client.completions.create(**given, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
    *parts, last = chunks
    choice = whole.choices[0]
    assert whole.id == f"cmpl-{whole._request_id}"
    assert choice.text
    assert choice.logprobs is not None
    assert (again.choices[0].text, again.choices[0].logprobs) == (choice.text, choice.logprobs)
    assert "".join(part.choices[0].text for part in parts) == choice.text
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        found = [each for part in parts for each in getattr(part.choices[0].logprobs, name)]
        assert found == getattr(choice.logprobs, name)
    assert last.usage == whole.usage
    assert whole.usage is not None
    assert whole.usage.completion_tokens == len(choice.logprobs.tokens or ())
    assert whole.usage.prompt_tokens == len(vocabulary_of("ngram").encode(PROMPT))
    assert parts[-1].choices[0].finish_reason == choice.finish_reason
    assert all(part.choices[0].finish_reason is None for part in parts[:-1])


async def test_chat_streams_what_it_answers_at_once(text: Served) -> None:
    given: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "system", "content": "Answer."}, {"role": "user", "content": PROMPT}],
        "max_completion_tokens": 24,
        "logprobs": True,
        "top_logprobs": 2,
        "seed": 3,
    }
    async with asking(text.url) as client:
        whole = await client.chat.completions.create(**given)
        chunks = [chunk async for chunk in await client.chat.completions.create(**given, stream=True)]
    choice = whole.choices[0]
    assert choice.logprobs is not None
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
    entries = [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert entries == choice.logprobs.content
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == choice.message.content


async def test_choices_of_one_seed_differ_and_can_be_had_again(text: Served) -> None:
    given: dict[str, Any] = {"model": MODEL, "prompt": [PROMPT, "Once"], "max_tokens": 12, "n": 3, "seed": 11}
    async with asking(text.url) as client:
        first = await client.completions.create(**given)
        second = await client.completions.create(**given)
        alone = await client.completions.create(**given | {"prompt": "Once", "n": 1, "seed": 12})
    texts = [choice.text for choice in first.choices]
    assert [choice.index for choice in first.choices] == list(range(6))
    assert len(set(texts)) == 6
    assert texts == [choice.text for choice in second.choices]
    assert alone.choices[0].text == texts[4]


async def test_stop_ends_the_text_before_it(text: Served) -> None:
    given: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 200, "seed": 5}
    async with asking(text.url) as client:
        full = (await client.completions.create(**given)).choices[0].text
        stop = full[20:24]
        whole = (await client.completions.create(**given, stop=[stop, "never this"])).choices[0]
        chunks = [chunk async for chunk in await client.completions.create(**given, stop=stop, stream=True)]
    assert whole.text == "".join(chunk.choices[0].text for chunk in chunks) == full[: full.find(stop)]
    assert whole.finish_reason == chunks[-1].choices[0].finish_reason == "stop"


async def test_tokens_and_text_of_an_ended_answer_agree(text: Served) -> None:
    """The token that ends an answer is empty in the list of tokens and keeps its logprob; `ignore_eos` goes past it."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 400, "seed": 5, "logprobs": 3}
    async with plainly(text.url) as client:
        answer = (await client.post("/v1/completions", json=body)).json()
        went_on = (await client.post("/v1/completions", json=body | {"ignore_eos": True})).json()
    assert (went_on["choices"][0]["finish_reason"], went_on["usage"]["completion_tokens"]) == ("length", 400)
    (choice,) = answer["choices"]
    found = choice["logprobs"]
    assert choice["finish_reason"] == "stop"
    assert "".join(found["tokens"]) == choice["text"]
    assert found["tokens"][-1] == ""
    assert len(found["token_logprobs"]) == len(found["tokens"]) == answer["usage"]["completion_tokens"]
    assert all(token in top for token, top in zip(found["tokens"], found["top_logprobs"], strict=True))
    assert found["top_logprobs"][-1][""] == found["token_logprobs"][-1]


async def test_inspection_tells_where_each_token_came_from(text: Served) -> None:
    """Rows say worker, step and position; their drafts which were accepted; the tokens' texts are the answer's."""
    body = {"prompt": PROMPT, "max_tokens": 30, "top_logprobs": 4, "seed": 9, "stop": []}
    completion = {"model": MODEL, "prompt": PROMPT, "max_tokens": 30, "seed": 9}
    async with plainly(text.url) as client:
        answer = await client.post("/inspect", json=body)
        whole = (await client.post("/v1/completions", json=completion)).json()
    events = [event.split("\n") for event in answer.text.removesuffix("\n\n").split("\n\n")]
    told = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in events]
    assert [name for name, _ in told] == ["begin", *["row"] * (len(told) - 2), "end"]
    rows = [data for name, data in told if name == "row"]
    tokens = [token for row in rows for token in row["tokens"]]
    assert "".join(token["text"] for token in tokens) == whole["choices"][0]["text"]
    assert told[-1][1] == {"reason": whole["choices"][0]["finish_reason"], "tokens": len(tokens)}
    assert all(len(token["alternatives"]) == 4 for token in tokens)
    position = 0
    for row in rows:
        assert (row["worker"], row["position"]) == ("worker-0", position)
        position += len(row["tokens"])
        accepted = [draft["accepted"] for draft in row["draft"]]
        assert accepted == sorted(accepted, reverse=True)  # whatever follows a draft that was rejected was, too
        assert sum(accepted) >= min(len(accepted), len(row["tokens"]) - 1)
    assert any(row["draft"] for row in rows)
    assert [row["step"] for row in rows] == sorted({row["step"] for row in rows})
    assert not any("entropy" in token for token in tokens)


async def test_inspection_with_entropies(numbers: Served) -> None:
    async with plainly(numbers.url) as client:
        answer = await client.post("/inspect", json={"prompt": "a", "max_tokens": 5, "return_entropies": True})
    events = [event.partition("\ndata: ") for event in answer.text.removesuffix("\n\n").split("\n\n")]
    key = int(json.loads(events[0][2])["request"], 16)
    tokens = [token for name, _, data in events if name == "event: row" for token in json.loads(data)["tokens"]]
    true = true_extras(key, 0, 5, TokenScoring(entropies=True))
    assert [token["entropy"] for token in tokens] == true.entropies.tolist()


async def test_models_health_and_documents(text: Served) -> None:
    async with asking(text.url) as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL
    async with plainly(text.url) as client:
        assert (await client.get("/readyz")).json() == {"status": "ready", "problems": []}
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


async def test_bus_tells_of_workers(text: Served) -> None:
    async with plainly(text.url) as client:
        await client.post("/v1/completions", json={"model": MODEL, "prompt": PROMPT, "max_tokens": 30})

        async def told() -> dict[str, Any]:
            bus: dict[str, Any] = (await client.get("/bus")).json()
            return bus

        bus = await told()
        while bus["workers"][0]["open_requests"] or not bus["workers"][0]["tokens"]:  # as it was half a second ago
            bus = await told()
    (worker,) = bus["workers"]
    assert (worker["id"], worker["role"], worker["connected"]) == ("worker-0", "mixed", True)
    assert len(worker["acceptance_by_head"]) == 3
    assert bus["clients"] == 1


# Many at once, and every token true.


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_256_at_once_get_their_own_tokens(numbers: Served, *, is_streamed: bool) -> None:
    """256 requests at once, streamed or not, with different lengths and alternatives, get exactly their true tokens."""

    async def one(client: openai.AsyncOpenAI, number: int) -> bool:
        given: dict[str, Any] = {"model": MODEL, "prompt": "a", "max_tokens": 20 + number % 7, "logprobs": number % 4}
        if not is_streamed:
            answer = await client.completions.create(**given)
            return is_true(answer) and answer.usage.completion_tokens == given["max_tokens"]
        chunks = [chunk async for chunk in await client.completions.create(**given, stream=True)]
        whole = chunks[0]
        for chunk in chunks[1:]:
            whole.choices[0].text += chunk.choices[0].text
            for name in ("tokens", "token_logprobs"):
                getattr(whole.choices[0].logprobs, name).extend(getattr(chunk.choices[0].logprobs, name))
        return is_true(whole) and len(whole.choices[0].logprobs.tokens) == given["max_tokens"]

    async with asking(numbers.url) as client:
        assert all(await soon(asyncio.gather(*(one(client, number) for number in range(256)))))


EXTRAS: dict[str, Any] = {
    "return_other_logprobs": True, "return_entropies": True, "return_logprobs_of": [9, 300], "return_mask": 4
}  # fmt: skip


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("names", [list(EXTRAS), ["return_entropies"], ["return_mask"]], ids="+".join)
async def test_tokens_have_the_extras_that_were_asked_for(
    numbers: Served, names: list[str], *, is_streamed: bool
) -> None:
    asked = {name: EXTRAS[name] for name in names}
    given: dict[str, Any] = {"model": MODEL, "prompt": "a", "max_tokens": 9, "logprobs": 1, "extra_body": asked}
    async with asking(numbers.url) as client:
        if is_streamed:
            chunks = [chunk async for chunk in await client.completions.create(**given, stream=True)]
        else:
            chunks = [await client.completions.create(**given)]
    found = [each for chunk in chunks for each in chunk.choices[0].token_extras]
    scoring = TokenScoring(
        other_logprobs="return_other_logprobs" in asked,
        entropies="return_entropies" in asked,
        token_ids=asked.get("return_logprobs_of"),
        mask_bound=asked.get("return_mask", 0),
    )
    true = extras_by_token(true_extras(int(chunks[0].id.removeprefix("cmpl-"), 16), 0, 9, scoring), 9)
    for said, extras in zip(found, true, strict=True):
        assert extras is not None
        assert said.get("other_logprob") == extras.other_logprob
        assert said.get("entropy") == extras.entropy
        assert said.get("logprobs", {}) == {str(token_id): value for token_id, value in extras.given_logprobs}
        assert said.get("mask_size") == extras.mask_size
        assert said.get("mask") == (None if extras.mask is None else list(extras.mask))


# What breaks.


async def test_client_that_leaves_ends_its_request_at_the_worker(numbers: Served) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": LONG, "n": 3}
    async with plainly(numbers.url) as client, plainly(f"http://{numbers.metrics}") as processor:
        async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
            async for _ in stream.aiter_lines():
                break
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/completions", json=body, timeout=0.3)

        async def is_idle() -> bool:
            page = (await client.get("/metrics")).text
            return (
                'tokenbus_open_requests{state="running"} 0.0' in (await processor.get("/metrics")).text
                and 'tokenbus_fill_ratio{of="requests"} 0.0' in page
            )

        await until(is_idle)


async def test_stream_of_a_killed_worker_ends_with_an_error() -> None:
    patience = {"bus__heartbeat_timeout_ms": 1000}
    with served(**NUMBERS, **patience) as system:
        worker = system.start_worker()
        async with asking(system.url) as client, plainly(system.url) as plain:
            given: dict[str, Any] = {"model": MODEL, "prompt": "a", "max_tokens": LONG}
            stream = await client.completions.create(**given, stream=True)
            whole = asyncio.create_task(client.completions.create(**given))
            inspected = asyncio.create_task(plain.post("/inspect", json={"prompt": "a", "max_tokens": LONG}))
            got = []

            async def read() -> None:
                async for chunk in stream:
                    got.append(chunk)
                    if len(got) == 5:
                        worker.kill()

            with pytest.raises(openai.APIError) as raised:
                await soon(read())
            assert raised.value.code == "worker_lost"
            assert f"(after {3 * len(got)} tokens)" in raised.value.message
            with pytest.raises(openai.InternalServerError) as refused:
                await soon(whole)
            assert refused.value.status_code == 502
            *rows, last = (await soon(inspected)).text.removesuffix("\n\n").split("\n\n")
            assert last.startswith("event: error\ndata: ")
            told = json.loads(last.partition("\ndata: ")[2])
            got_there = sum(len(json.loads(row.partition("\ndata: ")[2])["tokens"]) for row in rows[1:])
            assert (told["code"], told["tokens"]) == ("worker_lost", got_there)
            logged = await asyncio.to_thread(system.gateway.wait_for, '"event":"request failed"')
            assert '"code":"worker_lost"' in logged
            assert len(refused.value.response.headers["x-request-id"]) == 16
            page = (await plain.get("/metrics")).text
            assert 'tokenbus_gateway_broken_answers_total{code="worker_lost"} 2.0' in page


async def test_without_a_worker_it_is_not_ready() -> None:
    with served(**NUMBERS, bus__heartbeat_timeout_ms=1000) as system:
        async with asking(system.url) as client, plainly(system.url) as plain:
            answer = await plain.get("/readyz")
            assert (answer.status_code, answer.json()["problems"]) == (
                503,
                ["no worker is connected that takes requests"],
            )
            assert [(await plain.get(path)).status_code for path in ("/health", "/ping")] == [503, 503]
            with pytest.raises(openai.InternalServerError) as raised:
                await client.completions.create(model=MODEL, prompt="a")
            assert (raised.value.status_code, raised.value.code) == (503, "no_worker")
            assert raised.value.response.headers["retry-after"] == "1"
            system.start_worker()
            await until(lambda: answers(plain, "/readyz"))
            assert is_true(await client.completions.create(model=MODEL, prompt="a", logprobs=0))


async def test_over_capacity_is_429(numbers: Served) -> None:
    program, url = await asyncio.to_thread(numbers.start_gateway, gateway__max_requests=2)
    async with asking(url) as client:
        given: dict[str, Any] = {"model": MODEL, "prompt": "a"}
        stream = await client.completions.create(**given, max_tokens=LONG, n=2, stream=True)
        with pytest.raises(openai.RateLimitError) as raised:
            await client.completions.create(**given)
        assert raised.value.response.headers["retry-after"] == "1"
        assert raised.value.code == "overloaded"
        with pytest.raises(openai.BadRequestError):  # however long it waits, there is never room for three
            await client.completions.create(**given, n=3)
        await stream.close()

        async def is_served() -> bool:
            try:
                return is_true(await client.completions.create(**given, logprobs=0))
            except openai.RateLimitError:
                return False

        await until(is_served)
    assert await asyncio.to_thread(program.terminate) == 0


async def test_stopping_gateway_lets_streams_end(numbers: Served) -> None:
    program, url = await asyncio.to_thread(numbers.start_gateway, gateway__drain_timeout_ms=1000)
    async with asking(url) as client:
        short = await client.completions.create(model=MODEL, prompt="a", max_tokens=60, stream=True)
        long = await client.completions.create(model=MODEL, prompt="a", max_tokens=LONG, stream=True)
        ending = asyncio.create_task(asyncio.to_thread(program.terminate))
        chunks = [chunk async for chunk in short]
        assert chunks[-1].choices[0].finish_reason == "length"
        with pytest.raises(openai.APIError) as raised:
            async for _ in long:
                pass
        assert raised.value.code == "stopping"
        assert await soon(ending) == 0


async def test_taken_address_is_told_in_one_line(numbers: Served) -> None:
    taken = numbers.url.removeprefix("http://")
    environment = numbers.deployment.environment(gateway__address=taken)
    done = await asyncio.to_thread(run, [COMMAND, "gateway"], env=environment, text=True, timeout=MOST)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [f"tokenbus: gateway.address: {taken}: taken: something listens there already"]


# Wrong requests.


BODY: dict[str, Any] = {"model": MODEL, "prompt": "a", "max_tokens": 3}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("completions", BODY | {"foo": 1}, 400, "foo"),
        ("completions", BODY | {"temperature": "hot"}, 400, "temperature"),
        ("completions", BODY | {"logprobs": 21}, 400, "logprobs"),
        ("completions", BODY | {"n": 64, "prompt": ["a", "b", "c"]}, 400, "n"),
        ("completions", BODY | {"prompt": [[1], [-1]]}, 400, "prompt[1][0]"),
        ("completions", BODY | {"stream_options": {"include_usage": True}}, 400, "stream_options"),
        ("completions", BODY | {"include_draft_logprobs": True}, 400, "include_draft_logprobs"),
        ("completions", BODY | {"return_entropies": True}, 400, "return_entropies"),
        ("completions", BODY | {"logprobs": 1, "return_mask": 1025}, 400, "return_mask"),
        ("completions", BODY | {"logprobs": 1, "return_logprobs_of": [1] * 129}, 400, "return_logprobs_of"),
        ("completions", BODY | {"logprobs": 1, "return_logprobs_of": [50_000]}, 400, "return_logprobs_of[0]"),
        ("completions", BODY | {"frequency_penalty": 1}, 400, "frequency_penalty"),
        ("completions", BODY | {"suffix": "end"}, 400, "suffix"),
        ("chat/completions", CHAT | {"response_format": {"type": "json_object"}}, 400, "response_format"),
        ("completions", BODY | {"model": "another"}, 404, "model"),
        ("completions", {"model": MODEL}, 400, "prompt"),
        ("completions", [1], 400, None),
        ("chat/completions", CHAT | {"top_logprobs": 1}, 400, "top_logprobs"),
    ],
)  # fmt: skip
async def test_wrong_field_is_named(numbers: Served, path: str, body: Any, status: int, param: str | None) -> None:  # noqa: ANN401
    async with plainly(numbers.url) as client:
        answer = await client.post(f"/v1/{path}", json=body)
    assert answer.status_code == status, answer.text
    error = error_of(answer.text)
    assert error["param"] == param
    assert (error["param"] or "") in error["message"]


async def test_engine_refuses_by_name_what_it_cannot_do(text: Served) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"presence_penalty": 0.5}, "presence_penalty: only 0 with this engine, got 0.5"),
        ({"logit_bias": {"7": -100}}, "logit_bias: no element with this engine, got 1"),
        ({"extra_body": {"min_p": 0.25}}, "min_p: only 0 with this engine, got 0.25"),
        ({"extra_body": {"min_tokens": 2}}, "min_tokens: only 0 with this engine, got 2"),
        (
            {"extra_body": {"structured_outputs": {"regex": "a+"}}},
            "structured_outputs: none with this engine, got regex",
        ),
        ({"extra_body": {"repetition_penalty": 1e-60}}, "repetition_penalty: above 0, got 0.0"),
        ({"extra_body": {"min_tokens": 9}}, "min_tokens: at most 3, max_tokens, got 9"),
    ]
    async with asking(text.url) as client:
        for fields, line in refused:
            with pytest.raises(openai.BadRequestError) as raised:
                await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=3, **fields)
            assert isinstance(raised.value.body, dict)
            assert raised.value.body["message"].startswith(line)
            assert raised.value.param == line.partition(":")[0]
        tools: list[Any] = [{"type": "function", "function": {"name": "f"}}]
        with pytest.raises(openai.BadRequestError, match="tool_choice: none with this engine, got json_schema"):
            await client.chat.completions.create(
                model=MODEL, messages=CHAT["messages"], tools=tools, tool_choice="required"
            )


async def test_parameters_that_change_nothing_and_stop_tokens_are_taken(text: Served) -> None:
    given: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "seed": 7}
    ids = {"return_token_ids": True}
    neutral = {"min_p": 0, "repetition_penalty": 1, "min_tokens": 0, "priority": 0, "cache_salt": "mine"}
    async with asking(text.url) as client:
        plain = (await client.completions.create(**given, extra_body=ids)).choices[0]
        same = await client.completions.create(
            **given, presence_penalty=0, frequency_penalty=0, logit_bias={}, extra_body=ids | neutral
        )
        tokens = plain.token_ids
        last = next(place for place in range(3, 12) if tokens[place] not in tokens[:place])
        stops = ids | {"stop_token_ids": [tokens[last]]}
        ended = (await client.completions.create(**given, extra_body=stops)).choices[0]
        chunks = [chunk async for chunk in await client.completions.create(**given, stream=True, extra_body=stops)]
        including = stops | {"include_stop_str_in_output": True}
        included = (await client.completions.create(**given, extra_body=including)).choices[0]
    assert same.choices[0].text == plain.text
    vocabulary = vocabulary_of("ngram")
    for choice, shown in ((ended, tokens[:last]), (included, tokens[: last + 1])):
        assert choice.token_ids == tokens[: last + 1]
        assert choice.text == b"".join(vocabulary.pieces[token] for token in shown).decode()
        assert (choice.finish_reason, choice.stop_reason) == ("stop", tokens[last])
    assert "".join(chunk.choices[0].text for chunk in chunks) == ended.text
    assert chunks[-1].choices[0].stop_reason == tokens[last]


@pytest.mark.parametrize("data", [b"{", b"", b"\xff", b'{"model": "\\ud800"}', b'{"a": NaN}'])
async def test_malformed_json_is_400(numbers: Served, data: bytes) -> None:
    async with plainly(numbers.url) as client:
        answer = await client.post("/v1/completions", content=data, headers={"content-type": "application/json"})
    assert (answer.status_code, error_of(answer.text)["code"]) == (400, "invalid_json")


async def test_other_content_is_415(numbers: Served) -> None:
    async with plainly(numbers.url) as client:
        answer = await client.post("/v1/completions", data={"model": "x"})
    assert (answer.status_code, error_of(answer.text)["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/inspect"])
async def test_ten_megabytes_are_413(numbers: Served, path: str) -> None:
    async with plainly(numbers.url) as client:

        async def chunks() -> Any:  # noqa: ANN401 - bytes, for a while
            for _ in range(160):
                yield b"x" * 65_536

        for content in (b'{"prompt": "' + b"x" * 10_000_000 + b'"}', chunks()):
            answer = await client.post(path, content=content, headers={"content-type": "application/json"})
            assert (answer.status_code, error_of(answer.text)["code"]) == (413, "request_too_large")


async def test_unknown_paths_and_methods(numbers: Served) -> None:
    async with plainly(numbers.url) as client:
        assert error_of((await client.get("/v1/nothing")).text)["code"] == "not_found"
        assert (await client.get("/page/../secret")).status_code == 404
        answer = await client.get("/v1/completions")
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        assert error_of(answer.text)["code"] == "method_not_allowed"


async def test_errors_of_the_engine_are_400(text: Served) -> None:
    async with asking(text.url) as client:
        with pytest.raises(openai.BadRequestError) as raised:
            await client.completions.create(model=MODEL, prompt="word " * 4000)
        assert raised.value.code == "context_length_exceeded"
        assert "this model's maximum context length is 2048 tokens" in raised.value.message
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(model=MODEL, prompt=[10_000_000])
