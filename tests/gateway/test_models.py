"""Models by name, and a gateway with the tokenizer and the chat template of a model's folder, on an in-process bus."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.answering import App, answering
from tests.in_process.builders import settings
from tests.support.model_folder import END, TEMPLATE, byte_level, write_model
from tests.system.serving import error_of
from tokenbus.engines.ngram import NgramEngine
from tokenbus.gateway.completion_request import Reader
from tokenbus.gateway.errors import ApiError
from tokenbus.gateway.vocabulary import vocabulary_of
from tokenbus.model_files import ModelTokenizer

CHAT: list[Any] = [{"role": "user", "content": "hello 🦊"}]
LIBRARY = byte_level()
TOOLS_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for d in documents or () %}{{ d.title }}{% endfor %}{{ mood }}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or () %}{{ call.function.arguments.a }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("model"), byte_level()))


async def _said(app: App, path: str, status: int = 200, **body: Any) -> Any:  # noqa: ANN401 - JSON
    answer = await app.bus.until(app.client().post(path, json=body))
    assert answer.status_code == status, answer.text
    return answer.json() if status == 200 else error_of(answer.text)


async def test_texts_are_the_tokens_texts(folder: str) -> None:
    tokenizer = ModelTokenizer(Path(folder))
    given: dict[str, Any] = {"prompt": f"hello 🦊{END}", "max_tokens": 400, "seed": 1, "return_token_ids": True}
    async with answering(gateway__tokenizer=folder) as app:
        (choice,) = (await _said(app, "/v1/completions", **given))["choices"]
        chat = await _said(app, "/v1/chat/completions", messages=CHAT, max_tokens=1, return_token_ids=True)
    assert choice["prompt_token_ids"] == LIBRARY.encode(given["prompt"]).ids
    known = [token for token in choice["token_ids"] if token < tokenizer.vocabulary_size]  # others have no text
    text = b"".join(map(tokenizer.token_bytes, known)).decode(errors="replace")
    assert choice["text"] == text.rstrip("\ufffd")  # a character at the end that was cut off
    expected = LIBRARY.encode(f"<user>hello 🦊{END}<assistant>", add_special_tokens=False).ids
    assert chat["prompt_token_ids"] == expected


async def test_rendered_tokens_have_their_places_in_the_text(folder: str) -> None:
    text, chat = "hello world, the quick fox", f"<user>hello 🦊{END}<assistant>"
    asked: dict[str, Any] = {"return_token_offsets": True}
    async with answering(gateway__tokenizer=folder) as app:
        path = "/v1/completions/render"
        whole, other = await _said(app, path, prompt=[text, "a"], **asked)
        (cut,) = await _said(app, path, prompt=text, **asked, truncate_prompt_tokens=4, truncation_side="left")
        (of_ids,) = await _said(app, path, prompt=[5, 6], **asked)
        (unasked,) = await _said(app, path, prompt=text)
        talk = await _said(app, "/v1/chat/completions/render", messages=CHAT, **asked)
    assert of_ids["token_offsets"] is unasked["token_offsets"] is None
    assert (cut["token_ids"], cut["token_offsets"]) == (whole["token_ids"][-4:], whole["token_offsets"][-4:])
    for written, answer in ((text, whole), ("a", other), (chat, talk)):
        assert answer["token_ids"] == LIBRARY.encode(written, add_special_tokens=False).ids
        places = dict(zip(map(tuple, answer["token_offsets"]), answer["token_ids"], strict=True))
        assert {begin for begin, _ in places} >= {0}
        assert max(end for _, end in places) == len(written)
        for (begin, end), token_id in places.items():
            assert (
                "🦊" in written[begin:end]
                or LIBRARY.decode([token_id], skip_special_tokens=False) == written[begin:end]
            )


async def test_tokenize_and_detokenize(folder: str) -> None:
    text = f"a 🦊{END}"
    ids = LIBRARY.encode(text).ids
    async with answering(gateway__tokenizer=folder) as app:
        answer = await _said(app, "/tokenize", prompt=text, return_token_strs=True)
        assert (answer["count"], answer["tokens"]) == (len(ids), ids)
        assert answer["token_strs"] == list(map(LIBRARY.id_to_token, ids))
        chat = f"<user>hello 🦊{END}"
        for begins, written in ((True, f"{chat}<assistant>"), (False, chat)):
            expected = LIBRARY.encode(written).ids
            answer = await _said(app, "/tokenize", messages=CHAT, add_generation_prompt=begins)
            assert answer == {"count": len(expected), "max_model_len": None, "tokens": expected, "token_strs": None}
        custom = await _said(app, "/tokenize", messages=[{"role": "ipython", "content": "4"}])
        assert custom["tokens"] == LIBRARY.encode(f"<ipython>4{END}<assistant>").ids
        assert await _said(app, "/detokenize", tokens=ids) == {"prompt": text}
        found = (await app.bus.until(app.client().get("/tokenizer_info"))).json()
        assert (found["tokenizer_class"], found["eos_token"]) == ("PreTrainedTokenizerFast", END)
        assert (found["model_max_length"], found["chat_template"]) == (10**30, TEMPLATE)
        wrong: tuple[tuple[dict[str, Any], str, int], ...] = (
            ({"prompt": "a", "messages": CHAT}, "prompt", 400),
            ({}, "prompt", 400),
            ({"messages": CHAT, "continue_final_message": True}, "continue_final_message", 400),
            ({"prompt": "a", "model": "another"}, "model", 404),
        )
        for body, param, status in wrong:
            assert (await _said(app, "/tokenize", status, **body))["param"] == param


async def test_what_a_template_reads_beside_messages(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", byte_level(), TOOLS_TEMPLATE)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 7}'}}
    chat: dict[str, Any] = {
        "messages": [*CHAT, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "r"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "documents": [{"title": "d"}],
        "chat_template_kwargs": {"mood": "m"},
    }
    tools = '[{"type": "function", "function": {"name": "f", "description": null, "parameters": {"type": "object"}}}]'
    text = f"{tools}dm<user>hello 🦊<assistant>7<tool>r"
    async with answering(gateway__tokenizer=str(folder)) as app:
        reader = app.gateway.reader  # with variables the route would leave it to an encoder's process
        for fields, expected in (
            ({}, f"{text}<assistant>"),
            ({"add_generation_prompt": False}, text),
            ({"add_generation_prompt": False, "continue_final_message": True}, text),
        ):
            asked = reader.chat(chat | fields | {"model": "tokenbus"})
            assert asked.prompts == [LIBRARY.encode(expected, add_special_tokens=False).ids]


def test_what_a_template_relies_on_is_not_replaced(folder: str) -> None:
    reader = Reader(settings(), vocabulary_of(folder))
    for name in (
        *("eos_token", "bos_token", "image_token", "additional_special_tokens", "messages", "tools", "documents"),
        *("add_generation_prompt", "raise_exception", "strftime_now", "range", "namespace", "chat_template"),
    ):
        with pytest.raises(ApiError) as raised:
            reader.tokenization({"messages": CHAT, "chat_template_kwargs": {name: "x"}})
        assert raised.value.param == f"chat_template_kwargs.{name}"


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
    tmp_path: Path, template: str | None, chosen: str, line: str | None
) -> None:
    folder = str(write_model(tmp_path / "model", byte_level(), template))
    async with answering(gateway__tokenizer=folder, gateway__chat_template=chosen) as app:
        answer = await _said(app, "/v1/chat/completions", 200 if line is None else 400, messages=CHAT, max_tokens=1)
    assert line in (None, answer.get("message"))


async def _add_worker(app: App, model: str) -> None:
    app.bus.settings = replace(app.bus.settings, worker=replace(app.bus.settings.worker, model=model))
    await app.bus.add_worker()
    await app.bus.advance(1)


async def test_models_are_those_of_the_workers() -> None:
    async with answering(workers=0) as app, app.client() as client:
        body: dict[str, Any] = {"prompt": "a", "max_tokens": 1}
        assert (await _said(app, "/v1/completions", 404, model="qwen", **body))["message"] == (
            "model: one of tokenbus, got 'qwen'"
        )
        for name in ("qwen", "org/llama"):
            await _add_worker(app, name)
            assert (await _said(app, "/v1/completions", model=name, **body))["model"] == name
        assert [each["id"] for each in (await client.get("/v1/models")).json()["data"]] == ["org/llama", "qwen"]
        assert (await _said(app, "/v1/completions", model="tokenbus", **body))["model"] == "tokenbus"
        assert (await client.get("/v1/models/org/llama")).json()["id"] == "org/llama"
        assert (await _said(app, "/v1/completions", 404, model="mistral", **body))["message"] == (
            "model: one of org/llama, qwen, got 'mistral'"
        )


async def test_models_of_the_settings_need_no_processor() -> None:
    async with answering(workers=0, gateway__models="qwen", gateway__bus_timeout_ms=10) as app:
        await app.bus.lose_processor()
        refused = await app.client().post("/v1/completions", json={"model": "llama", "prompt": "a"})
    assert error_of(refused.text)["message"] == "model: one of qwen, got 'llama'"


async def test_gateway_whose_tokenizer_is_not_the_workers(folder: str) -> None:
    async with answering(NgramEngine(), gateway__tokenizer="ngram") as app, app.client() as client:
        (known,) = (await client.get("/v1/models")).json()["data"]
        assert (known["id"], known["max_model_len"]) == ("tokenbus", 2048)
        assert (await _said(app, "/tokenize", model="tokenbus", prompt="The bus"))["max_model_len"] == 2048
        assert (await client.get("/readyz")).status_code == 200
    async with answering(NgramEngine(), gateway__tokenizer=folder) as app, app.client() as client:
        (problem,) = (await client.get("/readyz")).json()["problems"]
        differs = "; worker worker-0 makes other tokens of '5': if both name the same folder, AutoTokenizer."
        assert problem.startswith(f"no worker has the tokenizer that gateway.tokenizer names{differs}")
        refused = await _said(app, "/v1/completions", 503, prompt="hello")
        assert refused["message"].startswith("tokenizer_digest: the digest of a worker's tokenizer (worker-0 has ")
        assert differs in refused["message"]
