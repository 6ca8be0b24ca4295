"""A gateway with the tokenizer and the chat template of a model's folder."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from tests.support.model_folder import END, TEMPLATE, byte_level, write_model
from tests.support.waiting import until
from tests.system.serving import Served, answers, asking, error_of, is_true, plainly, served
from tokenbus.model_files import ModelTokenizer

pytestmark = pytest.mark.xdist_group("gateway")
CHAT: list[Any] = [{"role": "user", "content": "hello 🦊"}]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with TemporaryDirectory() as name:
        yield write_model(Path(name) / "model", byte_level())


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Served]:
    """Run a system whose gateway has the folder's tokenizer, with a worker that knows no texts."""
    with served(gateway__tokenizer=str(folder)) as system:
        system.start_worker()
        yield system


async def test_texts_are_the_tokens_texts(model: Served, folder: Path) -> None:
    tokenizer = ModelTokenizer(folder)
    async with asking(model.url) as client:
        given: dict[str, Any] = {"model": "tokenbus", "prompt": f"hello 🦊{END}", "max_tokens": 400, "seed": 1}
        extra = {"return_token_ids": True}
        whole = await client.completions.create(**given, extra_body=extra)
        choice: Any = whole.choices[0]
        assert choice.prompt_token_ids == byte_level().encode(given["prompt"]).ids
        pieces = [_piece(tokenizer, token) for token in choice.token_ids]
        assert choice.text == _text(pieces)
        stream = await client.completions.create(**given, stream=True, extra_body=extra)
        streamed: list[Any] = [chunk.choices[0] async for chunk in stream]
        ids = [token for each in streamed for token in getattr(each, "token_ids", ())]
        text = _text([_piece(tokenizer, token) for token in ids])
        assert "".join(each.text for each in streamed) == text


def _piece(tokenizer: ModelTokenizer, token_id: int) -> bytes:
    """Return a token's bytes; ids beyond the tokenizer's have none."""
    return tokenizer.token_bytes(token_id) if token_id < tokenizer.vocabulary_size else b""


def _text(pieces: list[bytes]) -> str:
    """Return the text of tokens; a character at the end that was cut off is left out."""
    return b"".join(pieces).decode(errors="replace").rstrip("\ufffd")


async def test_chat_is_what_the_models_template_writes(model: Served) -> None:
    async with asking(model.url) as client:
        answer = await _chat(client)
    expected = byte_level().encode(f"<user>hello 🦊{END}<assistant>", add_special_tokens=False).ids
    assert answer.prompt_token_ids == expected


async def _chat(client: AsyncOpenAI, **given: Any) -> Any:  # noqa: ANN401 - OpenAI's model, and anything that it takes
    return await client.chat.completions.create(
        model="tokenbus", messages=CHAT, max_tokens=1, extra_body={"return_token_ids": True}, **given
    )


async def test_tokenize_and_detokenize(model: Served) -> None:
    library = byte_level()
    async with plainly(model.url) as client:
        ids = library.encode(f"a 🦊{END}").ids
        answer = await _post(client, "/tokenize", prompt=f"a 🦊{END}", return_token_strs=True)
        assert (answer["count"], answer["tokens"]) == (len(ids), ids)
        assert answer["token_strs"] == list(map(library.id_to_token, ids))
        chat = f"<user>hello 🦊{END}"
        for begins, text in ((True, f"{chat}<assistant>"), (False, chat)):
            expected = library.encode(text).ids
            answer = await _post(client, "/tokenize", messages=CHAT, add_generation_prompt=begins)
            assert answer == {"count": len(expected), "max_model_len": None, "tokens": expected, "token_strs": None}
        assert await _post(client, "/detokenize", tokens=ids) == {"prompt": f"a 🦊{END}"}


TOOLS_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for d in documents or () %}{{ d.title }}{% endfor %}{{ mood }}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or () %}{{ call.function.arguments.a }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOLS: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


async def test_what_a_template_reads_beside_messages(model: Served, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", byte_level(), TOOLS_TEMPLATE)
    _, url = model.start_gateway(gateway__tokenizer=str(folder))
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 7}'}}
    chat: dict[str, Any] = {
        "messages": [*CHAT, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "r"}],
        "tools": TOOLS,
        "documents": [{"title": "d"}],
        "chat_template_kwargs": {"mood": "m"},
    }
    tools = '[{"type": "function", "function": {"name": "f", "description": null, "parameters": {"type": "object"}}}]'
    text = f"{tools}dm<user>hello 🦊<assistant>7<tool>r"
    async with plainly(url) as client, asking(url) as openais:
        for fields, expected in (
            (chat, f"{text}<assistant>"),
            (chat | {"add_generation_prompt": False}, text),
            (chat | {"add_generation_prompt": False, "continue_final_message": True}, text),
        ):
            assert (await _post(client, "/tokenize", **fields))["tokens"] == byte_level().encode(expected).ids
        extra = {"return_token_ids": True, "documents": chat["documents"], "chat_template_kwargs": {"mood": "m"}}
        answer: Any = await openais.chat.completions.create(
            model="tokenbus", messages=chat["messages"], tools=TOOLS, max_tokens=1, extra_body=extra
        )
        assert answer.prompt_token_ids == byte_level().encode(f"{text}<assistant>").ids
        assert (answer.choices[0].message.tool_calls, answer.choices[0].finish_reason) == (None, "length")


async def _post(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


@pytest.mark.parametrize(
    ("body", "param", "status"),
    [
        ({"prompt": "a", "messages": CHAT}, "prompt", 400),
        ({}, "prompt", 400),
        ({"messages": CHAT, "continue_final_message": True}, "continue_final_message", 400),
        ({"prompt": "a", "model": "another"}, "model", 404),
    ],
)
async def test_tokenize_refuses(model: Served, body: dict[str, Any], param: str, status: int) -> None:
    async with plainly(model.url) as client:
        answer = await client.post("/tokenize", json=body)
    assert (answer.status_code, error_of(answer.text)["param"]) == (status, param)


@pytest.mark.parametrize(
    ("template", "chosen", "line"),
    [
        (None, "auto", "messages: the model has no chat template: use /v1/completions, or set gateway.chat_template"),
        ("{{ raise_exception('no users') }}", "auto", "messages: the model's chat template refuses them: no users"),
        (None, "roles", None),
        (TEMPLATE, "text", None),
    ],
)
async def test_chat_of_a_model_whose_template_does_not_fit(
    model: Served, tmp_path: Path, template: str | None, chosen: str, line: str | None
) -> None:
    folder = write_model(tmp_path / "model", byte_level(), template)
    _, url = model.start_gateway(gateway__tokenizer=str(folder), gateway__chat_template=chosen)
    async with plainly(url) as client:
        answer = await client.post(
            "/v1/chat/completions", json={"model": "tokenbus", "messages": CHAT, "max_tokens": 1}
        )
    if line is None:
        assert answer.status_code == 200
    else:
        assert (answer.status_code, error_of(answer.text)["message"]) == (400, line)


async def test_models_are_those_of_the_workers() -> None:
    with served(gateway__tokenizer="numbers") as system:
        async with asking(system.url) as client:
            assert await _lists(client, "tokenbus")
            with pytest.raises(openai.NotFoundError, match="model: one of tokenbus, got 'qwen'"):
                await client.completions.create(model="qwen", prompt="a", max_tokens=1)
            system.start_worker("worker-0", "--model", "qwen")
            system.start_worker("worker-1", "--model", "org/llama")
            await until(lambda: _lists(client, "org/llama", "qwen"))
            for name in ("qwen", "org/llama", "tokenbus"):
                answer = await client.completions.create(model=name, prompt="a", max_tokens=1, logprobs=0)
                assert answer.model == name
                assert is_true(answer)
            assert (await client.models.retrieve("org/llama")).id == "org/llama"
            with pytest.raises(openai.NotFoundError, match="model: one of org/llama, qwen, got 'mistral'"):
                await client.completions.create(model="mistral", prompt="a", max_tokens=1)


async def test_worker_that_comes_is_found_by_the_request_for_its_model() -> None:
    with served(gateway__tokenizer="numbers") as system:
        async with asking(system.url) as client, plainly(system.url) as plain:
            system.start_worker("worker-0", "--model", "qwen")
            await until(lambda: answers(plain, "/readyz"))
            assert is_true(await client.completions.create(model="qwen", prompt="a", max_tokens=1, logprobs=0))


async def test_models_of_the_settings_need_no_processor() -> None:
    with served(gateway__models="qwen") as system:
        system.processor.kill()
        async with asking(system.url) as client:
            with pytest.raises(openai.NotFoundError, match="model: one of qwen, got 'llama'"):
                await client.completions.create(model="llama", prompt="a", max_tokens=1)


async def test_gateway_whose_tokenizer_is_not_the_workers(folder: Path) -> None:
    with served(gateway__tokenizer=str(folder)) as system:
        system.start_worker("worker-0", "--engine", "ngram", "--model", "text", "--context", "512")
        _, right = system.start_gateway(gateway__tokenizer="ngram")
        async with plainly(right) as plain:
            await until(lambda: answers(plain, "/readyz"))
            (known,) = (await plain.get("/v1/models")).json()["data"]
            assert (known["id"], known["max_model_len"]) == ("text", 512)
            answer = await _post(plain, "/tokenize", model="text", prompt="The bus")
            assert answer["max_model_len"] == 512
            assert (await plain.post("/v1/completions", json={"model": "text", "prompt": "The bus"})).status_code == 200
        async with plainly(system.url) as plain:
            answer = (await plain.get("/readyz")).json()
            (problem,) = answer["problems"]
            differs = "; worker worker-0 makes other tokens of '5': if both name one folder, AutoTokenizer."
            assert problem.startswith(f"no worker has the tokenizer that gateway.tokenizer names{differs}")
            refused = await plain.post("/v1/completions", json={"model": "text", "prompt": "hello"})
            assert refused.status_code == 503
            message = error_of(refused.text)["message"]
            assert message.startswith("tokenizer_digest: that of a worker (worker-0 has ")
            assert differs in message


async def _lists(client: AsyncOpenAI, *models: str) -> bool:
    return [each.id async for each in await client.models.list()] == list(models)
