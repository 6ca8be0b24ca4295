"""Engines and tokenizers by entry points: another distribution's run by name; a broken one does no harm to others."""

from pathlib import Path

import pytest

from tests.cli.helpers import Service, addresses, generate
from tokenbus.cli import main
from tokenbus.client import Client
from tokenbus.gateway.vocabulary import vocabulary_of
from tokenbus.plugins import ENGINES, TOKENIZERS, PluginError, load, load_tokenizer, names
from tokenbus.settings import Settings, SettingsError
from tokenbus.worker import EngineKind

PLUGIN = '''
"""An engine of another distribution: its request gets the number of its row in every step, up to a limit."""

from tokenbus_contracts import RowStatus
from tokenbus.worker import EngineKind, StepArrays


class Counting:
    vocabulary_size = 1000

    def __init__(self, begin):
        self.begin, self.requests = begin, {}

    @property
    def has_work(self):
        return bool(self.requests)

    def admit(self, generate, state=None):
        self.requests[generate.request_key] = [0, generate.sampling.max_tokens]
        return len(generate.tokens.token_ids)

    def abort(self, key):
        pass

    def step(self):
        (key, (place, end)), = self.requests.items()
        self.requests = {} if place + 1 == end else {key: [place + 1, end]}
        status = RowStatus.ACTIVE if self.requests else RowStatus.FINISHED_LENGTH
        return [StepArrays(request_keys=[key], positions=[place], token_counts=[1], token_ids=[self.begin + place],
                           statuses=[status])]

    def close(self):
        self.requests.clear()


class Letters:
    vocabulary_size = 26

    def encode(self, text):
        return [ord(letter) - 97 for letter in text]

    def token_bytes(self, token_id):
        return bytes([97 + token_id])



def declare(parser):
    parser.add_argument("--begin", type=int, default=0, help="the first token")


KIND = EngineKind("counts", declare, lambda options, settings: Counting(options.begin), tokenizer="letters")
CLASHING = EngineKind("has the command's own option", lambda parser: parser.add_argument("--id"), KIND.make)
FOLDER = EngineKind(
    "reads a model", declare,
    lambda options, settings: print(options.model, settings.worker.model, options.rest) or __import__("no_such_module"),
    reads_model=True, takes_rest=True,
)
NEEDY = EngineKind("needs what is not there", declare, lambda options, settings: __import__("no_such_module"))
SOMETHING = object()
'''
POINTS = """
[tokenbus.engines]
counting = counting_engine:KIND
clashing = counting_engine:CLASHING
needy = counting_engine:NEEDY
folder = counting_engine:FOLDER
absent = no_such_module:KIND
something = counting_engine:SOMETHING
[tokenbus.tokenizers]
letters = counting_engine:Letters
something = counting_engine:SOMETHING
absent = no_such_module:Letters
"""


def distribution(folder: Path, name: str, points: str) -> None:
    """Install a distribution that has these entry points into a folder."""
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(points)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install another distribution for this process and those that it starts, and return its folder."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "counting_engine.py").write_text(PLUGIN)
    distribution(folder, "counting-engine", POINTS)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.mark.usefixtures("installed")
async def test_engine_of_another_distribution_runs_by_its_name(tmp_path: Path) -> None:
    own = ["--engine", "counting", "--begin", "40"]
    with (
        Service("processor", *addresses(tmp_path), "--metrics-address", "") as processor,
        Service("worker", *addresses(tmp_path)[:2], *own) as worker,
    ):
        processor.logged("listening")
        assert worker.logged("worker started")["engine"] == "counting"
        worker.logged("connected")
        async with Client(
            Settings.load(environment={}, overrides={"bus.clients_address": f"ipc://{tmp_path}/c"})
        ) as client:
            assert [token.id async for token in client.generate(generate(3))] == [40, 41, 42]


@pytest.mark.usefixtures("installed")
def test_help_lists_engines_and_says_which_are_broken(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["worker", "--help"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "counting: counts" in lines
    assert any(line.startswith("ngram: a language model of n-grams") for line in lines)
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
        (["--engine", "needy"], 1, "tokenbus: No module named 'no_such_module'"),
        (["--engine", "counting", "--begin", "x"], 2, "error: argument --begin: invalid int value: 'x'"),
        (["--begin", "4"], 2, "error: unrecognized arguments: --begin 4"),
        (["--engine"], 2, "error: argument --engine: expected one argument"),
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
        (["--model", "/models/qwen/"], "/models/qwen qwen []"),
        (["--set", "worker.model=q", "--model", "models/qwen", "--", "--begin", "x"], "models/qwen q ['--begin', 'x']"),
        (["--", "a", "--", "-b"], "None  ['a', '--', '-b']"),
    ],
)
def test_engine_that_reads_a_model(given: list[str], seen: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["worker", "--log-level", "error", "--engine", "folder", *given]) == 1
    assert capsys.readouterr().out.strip() == seen


def test_name_that_two_distributions_bring_is_refused(installed: Path) -> None:
    """Which of two engines of one name is meant cannot be known, so neither runs; the others do."""
    distribution(installed, "other-engine", "[tokenbus.engines]\ncounting = elsewhere:KIND\n")
    with pytest.raises(PluginError, match="'counting' is brought by more than one distribution: counting_eng"):
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
