"""LLM.chat: what of a call the model's template reads, and which names it keeps to itself."""

import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support.model_folder import END, byte_level, write_model
from tokenbus_contracts import ContractError
from tokenbus_contracts.generated.request_pb2 import Generate
from tokenbus_engines.synthetic import SyntheticEngine
from tokenbus_services.model_files import ModelTokenizer
from tokenbus_services.offline import LLM
from tokenbus_services.settings import Settings
from tokenbus_services.worker import EngineKind

CHAT = [{"role": "user", "content": "hi"}]
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if enable_thinking %}think {{ budget.most }} {% endif %}"
    "{% if not image_token is defined and range(1) %}<assistant>{% endif %}"
)


class Hearing(SyntheticEngine):
    """An engine that keeps the prompts that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts: list[list[int]] = []

    def admit(self, generate: Generate, state: bytes | None = None) -> int:
        self.prompts.append(list(generate.tokens.token_ids))
        return super().admit(generate, state)


ENGINE = Hearing()
KIND = EngineKind("hears", lambda _parser: None, lambda _options, _settings: ENGINE, reads_model=True)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Return the folder of a model whose template reads variables, beside the entry point of an engine that hears."""
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patched:
        described = Path(name, "hears-1.dist-info")
        described.mkdir()
        (described / "METADATA").write_text("Metadata-Version: 2.1\nName: hears\nVersion: 1\n")
        (described / "entry_points.txt").write_text(f"[tokenbus.engines]\nhears = {__name__}:KIND\n")
        patched.setattr(sys, "path", [*sys.path, name])
        yield write_model(Path(name, "model"), byte_level(), TEMPLATE)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    settings = Settings.load(environment={}, overrides={})
    with LLM(folder, engine="hears", settings=settings) as made:
        yield made


def test_template_reads_the_keywords_of_a_call(llm: LLM, folder: Path) -> None:
    ENGINE.prompts.clear()
    llm.chat([CHAT, CHAT], max_tokens=1, chat_template_kwargs={"enable_thinking": True, "budget": {"most": 7}})
    llm.chat(CHAT, max_tokens=1)
    written = [ModelTokenizer(folder).decode(prompt) for prompt in ENGINE.prompts]
    plain = f"<user>hi{END}<assistant>"
    assert written == [f"<user>hi{END}think 7 <assistant>"] * 2 + [plain]


@pytest.mark.parametrize(
    "name", ["messages", "tools", "eos_token", "bos_token", "image_token", "extra_tokens", "range", "raise_exception"]
)
def test_keyword_that_replaces_what_the_template_relies_on_is_refused(llm: LLM, name: str) -> None:
    ENGINE.prompts.clear()
    with pytest.raises(ContractError) as refused:
        llm.chat(CHAT, max_tokens=1, chat_template_kwargs={"enable_thinking": True, name: "x"})
    assert str(refused.value) == f"chat_template_kwargs.{name}: no name that the template relies on, got one"
    assert ENGINE.prompts == []
