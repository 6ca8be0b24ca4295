"""Engines and tokenizers by entry points: another distribution's come by name; a broken one does no harm to others."""

from argparse import ArgumentParser
from pathlib import Path

import pytest

from tests.pages import blocks
from tokenbus.cli import main
from tokenbus.gateway.vocabulary import vocabulary_of
from tokenbus.plugins import ENGINES, TOKENIZERS, PluginError, load, load_tokenizer, names
from tokenbus.settings import Settings, SettingsError
from tokenbus.worker import EngineKind
from tokenbus_contracts.generated.request_pb2 import Generate

PLUGIN = '''
"""Engines and a tokenizer of another distribution."""

from tokenbus.worker import EngineKind


class Letters:
    vocabulary_size = 26

    def encode(self, text):
        return [ord(letter) - 97 for letter in text]

    def token_bytes(self, token_id):
        return bytes([97 + token_id])



def declare(parser):
    parser.add_argument("--begin", type=int, default=0, help="the first token")


def make(options, settings):
    print(options.begin, options.model, settings.worker.model, options.rest)
    import no_such_module


KIND = EngineKind("counts", declare, make, reads_model=True, takes_rest=True, tokenizer="letters")
CLASHING = EngineKind("has the command's own option", lambda parser: parser.add_argument("--id"), make)
SOMETHING = object()
'''
POINTS = """
[tokenbus.engines]
counting = counting_engine:KIND
clashing = counting_engine:CLASHING
absent = no_such_module:KIND
something = counting_engine:SOMETHING
[tokenbus.tokenizers]
letters = counting_engine:Letters
something = counting_engine:SOMETHING
absent = no_such_module:Letters
"""


def distribution(folder: Path, name: str, points: str) -> None:
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(points)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "counting_engine.py").write_text(PLUGIN)
    distribution(folder, "counting-engine", POINTS)
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.mark.usefixtures("installed")
def test_help_lists_engines_and_says_which_are_broken(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["worker", "--help"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "counting: counts" in lines
    assert any(line.startswith("ngram: an n-gram language model") for line in lines)
    assert any(line.startswith("paddle: a small transformer") for line in lines)
    assert any(
        line.startswith("absent: (tokenbus.engines: 'absent' cannot be imported: ModuleNotFound") for line in lines
    )
    assert "something: (tokenbus.engines: 'something' must be an EngineKind, got object)" in lines


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("arguments", "status", "line"),
    [
        (["--engine", "absent"], 1, "tokenbus: tokenbus.engines: 'absent' cannot be imported: ModuleNotFoundError: "),
        (["--engine", "something"], 1, "tokenbus: tokenbus.engines: 'something' must be an EngineKind, got object"),
        (["--engine", "clashing"], 1, "tokenbus: engine clashing: its options cannot be declared: argument --id: "),
        (["--engine", "counting"], 1, "tokenbus: No module named 'no_such_module'"),
        (["--engine", "counting", "--begin", "x"], 2, "error: argument --begin: invalid int value: 'x'"),
    ],
)
def test_engine_that_cannot_be_used_is_one_line(
    arguments: list[str], status: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["worker", "--log-level", "error", *arguments]) == status
    error = capsys.readouterr().err
    assert line in error.splitlines()[-1]
    assert "Traceback" not in error


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("given", "seen"),
    [
        (["--begin", "40", "--model", "/models/qwen/"], "40 /models/qwen qwen []"),
        (["--set", "worker.model=q", "--model", "a/qwen", "--", "--begin", "x"], "0 a/qwen q ['--begin', 'x']"),
        (["--", "a", "--", "-b"], "0 None  ['a', '--', '-b']"),
    ],
)
def test_engine_of_another_distribution_is_made_by_its_name(
    given: list[str], seen: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["worker", "--log-level", "error", "--engine", "counting", *given]) == 1
    assert capsys.readouterr().out.strip() == seen


def test_page_of_a_new_engine_is_a_package(installed: Path) -> None:
    """The engine, the kind and the entry point of docs/extending.md together are an engine with an option."""
    (folder := installed / "my_package").mkdir()
    page = blocks("python", of="docs/extending.md")
    for name, begins in (("engine", "class WordEngine"), ("kind", "WORDS = EngineKind")):
        (code,) = (block.text for block in page if begins in block.text)
        (folder / f"{name}.py").write_text(code)
    (points,) = (block.text for block in blocks("toml", of="docs/extending.md"))
    distribution(installed, "my-package", points.replace("project.entry-points.", "").replace('"', ""))
    kind, parser = load(ENGINES, "words", EngineKind), ArgumentParser()
    kind.declare(parser)
    for count in (1, 5):
        engine = kind.make(parser.parse_args(["--drafts", str(count)]), Settings())
        assert engine.admit(Generate(request_id=7, tokens={"token_ids": [3]}, sampling={"max_tokens": 9})) == 1
        (step,) = engine.step()
        assert step.draft_token_counts == [count]


def test_name_that_two_distributions_bring_is_refused(installed: Path) -> None:
    """Which of two engines of one name is meant cannot be known, so neither runs; the others do."""
    distribution(installed, "other-engine", "[tokenbus.engines]\ncounting = elsewhere:KIND\n")
    with pytest.raises(PluginError, match="'counting' is installed by more than one distribution: counting_eng"):
        load(ENGINES, "counting", EngineKind)
    assert load(ENGINES, "synthetic", EngineKind).tokenizer == "numbers"


@pytest.mark.usefixtures("installed")
def test_tokenizers_come_by_their_names() -> None:
    assert {"bytes", "letters", "ngram"} <= set(names(TOKENIZERS))
    assert vocabulary_of("letters").pieces[2] == b"c"
    with pytest.raises(PluginError, match="'something' must give a Tokenizer, got object"):
        load_tokenizer("something")
    with pytest.raises(SettingsError, match=r"gateway\.tokenizer: a tokenizer that can be .*'absent' cannot be imp"):
        vocabulary_of("absent")
    with pytest.raises(
        SettingsError, match=r"gateway\.tokenizer: one of .*letters.*numbers, or the path .*, got 'none'"
    ):
        vocabulary_of("none")


@pytest.mark.parametrize("name", ["ngram", "paddle", "synthetic", "vllm"])
def test_engines_of_this_distribution_are_installed(name: str) -> None:
    kind = load(ENGINES, name, EngineKind)
    assert kind.summary
    assert vocabulary_of(kind.tokenizer).digest >= 0
