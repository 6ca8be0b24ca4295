"""The first examples that a reader meets, in the README and on the pages it leads to, run as they are written."""

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import tokenbus
from schema_tools.api import public_names
from tests.pages import ROOT, blocks
from tests.shell import Shell, command_lines, variables
from tests.support.processes import start
from tests.system.deployment import COMMAND
from tests.system.programs import Program
from tokenbus.engines.synthetic import SyntheticEngine, true_tokens
from tokenbus.settings import Settings
from tokenbus_contracts.generated.request_pb2 import Generate, SamplingParameters, TokenPrompt

(BATCH,) = [block.text for block in blocks("python", of="docs/contract.md")]
(EMBEDDED,) = [block.text for block in blocks("python", of="docs/extending.md") if "def engine_loop" in block.text]

(WORDS,) = [block.text for block in blocks("python", of="docs/extending.md") if "class WordEngine" in block.text]
RUN_ENGINE = "from tokenbus.engines.synthetic import SyntheticEngine as MyEngine\n" + next(
    each.sections["Example"] for _, names in public_names() for each in names if each.name == "run_engine"
)


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory(prefix="tb") as folder:
        yield os.environ | {
            "TOKENBUS_BUS_WORKERS_ADDRESS": f"ipc://{folder}/w",
            "TOKENBUS_BUS_CLIENTS_ADDRESS": f"ipc://{folder}/c",
            "TOKENBUS_PROCESSOR_METRICS_ADDRESS": "",
        }


@contextmanager
def _beside_a_processor(command: list[str], environment: dict[str, str]) -> Iterator[Program]:
    processor = Program("processor", start([COMMAND, "processor"], environment, is_merged=True))
    with processor, Program("worker", start(command, environment, is_merged=True)) as worker:
        worker.wait_for("connected")
        yield worker


def test_batch_example() -> None:
    run = subprocess.run([sys.executable, "-c", BATCH], check=True, capture_output=True, text=True)
    assert run.stdout == "11 0 [0] [-0.01]\n10 7 [11 12] [-0.25 -1.5 ]\n"


def test_readme_as_its_reader_follows_it(environment: dict[str, str], tmp_path: Path) -> None:
    """The README's lines and programs as they stand: a client, a processor that is killed, an engine of one's own."""
    for block in blocks("python", of="README.md"):
        (tmp_path / block.text[3:].split(":")[0]).write_text(block.text)
    processor, worker, ask, client, kill, engine, again = [
        each.command for each in command_lines("README.md") if not each.command.startswith(("make", ". "))
    ]
    steps = (
        *(processor, worker, f"{ask} > asked", f"{client.removesuffix(' &')} > text &"),
        *("until [ $(wc -l < text) -ge 9 ]; do sleep 0.1; done", kill, "wait %3", engine, "wait"),
    )
    given = environment | variables(tmp_path)
    with Shell("\n".join(steps), tmp_path, given) as shell:
        shell.line('"engine":"engine"')
        shell.line('"connected"')
        with Shell(f"{again} > parrot", tmp_path, given) as second:
            assert second.wait() == 0
    text, parrot = (
        [line.split(" ") for line in (tmp_path / name).read_text().splitlines() if line.endswith("))")]
        for name in ("text", "parrot")
    )
    assert [len(text), len(parrot)] == [100, 100], shell.output
    assert {"".join(line[:-5]).strip() for line in parrot} == {"In", *["the", "evening", "old", "man", "said"]}
    assert len({tuple(line[:-5]) for line in text}) > 40
    assert "from worker-0" in (tmp_path / "asked").read_text()


@pytest.mark.parametrize("program", [RUN_ENGINE, WORDS], ids=["docstring", "extending"])
async def test_program_of_a_worker(program: str, environment: dict[str, str]) -> None:
    """The example of `run_engine` and the program of docs/extending.md answer, and SIGTERM ends them well."""
    with _beside_a_processor([sys.executable, "-c", program], environment) as worker:
        async with tokenbus.connect(environment["TOKENBUS_BUS_CLIENTS_ADDRESS"]) as client:
            tokens = [token async for token in client.generate([5, 3], max_tokens=40, top_logprobs=2)]
        assert await asyncio.to_thread(worker.terminate) == 0
    assert [token.position for token in tokens] == list(range(40))
    if program is WORDS:  # which takes the most probable word
        assert all(token.alternatives[0] == (token.id, token.logprob) for token in tokens)
        names: dict[str, Any] = {"__name__": "words"}
        exec(WORDS, names)  # noqa: S102 - it is our own page
        following = [3, *(token.id for token in tokens)]
        assert following[1:] == names["TARGET"].argmax(axis=1)[following[:-1]].tolist()


async def test_embedded_example(environment: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(EMBEDDED, names)  # noqa: S102 - it is our own page
    settings = Settings.load(environment=environment)
    engine = SyntheticEngine()
    generate = Generate(request_id=7, tokens=TokenPrompt(token_ids=[1]), sampling=SamplingParameters(max_tokens=6))
    engine.admit(generate)
    consumer = asyncio.create_task(names["consume"](settings))
    thread = threading.Thread(target=names["engine_loop"], args=(engine, settings))
    thread.start()
    await asyncio.to_thread(thread.join)  # it leaves when all is acknowledged, so taken
    consumer.cancel()
    await asyncio.gather(consumer, return_exceptions=True)
    ids = true_tokens(7, 0, 6).ids
    assert capsys.readouterr().out == f"1 {ids[:3]} None\n2 {ids[3:]} None\n"


def test_readme_shows_the_measured_figures() -> None:
    page = (ROOT / "docs" / "benchmarks" / "codec.md").read_text()
    found = re.findall(r"^\| ([^|]+?) +((?:\| +[\d,.]+ +){3})\|", page.partition("times Tokenbus")[0], re.MULTILINE)
    us = {peer: [float(cell.replace(",", "")) for cell in cells.split("|")[1:]] for peer, cells in found}
    ours, theirs = us["Tokenbus + ZeroMQ"], us["FastDeploy SysV struct"]
    ratios = sorted(round(their / our) for their, our in zip(theirs, ours, strict=True))
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"{ours[0]:.0f} to {ours[2]:.0f} microseconds" in readme
    assert f"{ratios[0]} to {ratios[2]} times as long" in readme
