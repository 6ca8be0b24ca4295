"""A model's folder whose tokenizer.json transformers loads as another tokenizer, as that of qwen2 models."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.engines.vllm.real.runs import SHARED, arguments
from tests.engines.vllm.tiny_model import WORDS, make
from tests.system import programs
from tests.system.deployment import COMMAND, Deployment
from tests.system.programs import Program
from tests.system.serving import error_of
from tokenbus.engines.vllm.configuration import tokenizer_of

MOST = 400.0
NUMBERS = "1 5 5 12 12 a 5 b 12 "
"""Teaches tokens of digits with a space before, which the other tokenizer does not make."""


@pytest.fixture(scope="module")
def folder(is_installed: None, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: ARG001 - first
    model = make(tmp_path_factory.mktemp("models") / "two-ways", texts=[WORDS, NUMBERS] * 20)
    path = model / "tokenizer.json"
    described = json.loads(path.read_text())
    described["pre_tokenizer"] = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True
    }  # fmt: skip
    path.write_text(json.dumps(described))
    return model


@pytest.fixture
def up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Program]:
    monkeypatch.setattr(programs, "MOST", MOST)
    with tempfile.TemporaryDirectory(prefix="tb-") as runtime:
        deployment = Deployment(Path(runtime), {"gateway.address": "127.0.0.1:0"})
        command = [COMMAND, "up", "--engine", "vllm", "--model", str(folder), "--json", "--"]
        yield deployment.start("up", command + arguments({**SHARED, "dtype": "float32"}))
        deployment.close()


def test_requests_are_refused_by_the_text_that_differs(up: Program) -> None:
    warned = json.loads(up.wait_for("vLLM does not use the tokenizer of the model's folder"))
    assert (warned["event"], warned["line"]["text"]) == ("log", "12345678")
    url = json.loads(up.wait_for('"event": "up"'))["gateway"]
    with httpx.Client(base_url=url, timeout=MOST) as client:
        refused = client.post("/v1/completions", json={"prompt": "a 5", "max_tokens": 1})
        problems = client.get("/readyz").json()["problems"]
    assert (refused.status_code, error_of(refused.text)["code"]) == (503, "no_worker")
    for said in (error_of(refused.text)["message"], *problems):
        assert "makes other tokens of '12345678'" in said
        assert "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)" in said


def test_what_the_line_says_mends_it(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer  # noqa: PLC0415 - only where vLLM is

    theirs = AutoTokenizer.from_pretrained(folder)
    differing = tokenizer_of(folder, theirs)
    theirs.save_pretrained(tmp_path)
    mended = tokenizer_of(tmp_path, None)
    assert mended == tokenizer_of(tmp_path, AutoTokenizer.from_pretrained(tmp_path))
    assert mended[1] == differing[1] != tokenizer_of(folder, None)[1]
