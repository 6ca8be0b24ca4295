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
from typing import Any

import pytest

import tokenbus
from schema_tools.api import public_names
from tests.pages import ROOT, blocks
from tests.support.processes import start
from tests.system.deployment import COMMAND
from tests.system.programs import Program
from tokenbus.engines.synthetic import SyntheticEngine, true_tokens
from tokenbus.settings import Settings
from tokenbus_contracts.generated.request_pb2 import Generate, SamplingParameters, TokenPrompt

REQUEST, ENGINE = [block.text for block in blocks("python", of="README.md")]
(BATCH,) = [block.text for block in blocks("python", of="docs/contract.md")]
(EMBEDDED,) = [block.text for block in blocks("python", of="docs/extending.md") if "def engine_loop" in block.text]

(WORDS,) = [block.text for block in blocks("python", of="docs/extending.md") if "class WordEngine" in block.text]
RUN_ENGINE = "from tokenbus.engines.synthetic import SyntheticEngine as MyEngine\n" + next(
    each.sections["Example"] for _, names in public_names() for each in names if each.name == "run_engine"
)


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """Settings of a bus of this test's own."""
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
    """The contract's example prints both rows in batch order."""
    run = subprocess.run([sys.executable, "-c", BATCH], check=True, capture_output=True, text=True)
    assert run.stdout == "11 0 [0] [-0.01]\n10 7 [11 12] [-0.25 -1.5 ]\n"


def test_request_example_with_the_commands_above_it(environment: dict[str, str]) -> None:
    """Beside `tokenbus processor` and `tokenbus worker`, the README's client prints a request's eight tokens."""
    with _beside_a_processor([COMMAND, "worker"], environment):
        example = [sys.executable, "-c", REQUEST]
        run = subprocess.run(example, env=environment, check=True, capture_output=True, text=True)
    lines = [line.split(" ", 4) for line in run.stdout.splitlines()]
    assert [int(position) for position, *_ in lines] == list(range(8))
    assert all(float(logprob) <= 0 and int(rank) >= 1 for _, _, logprob, rank, _ in lines)
    assert all(alternatives.count("(") == 3 for *_, alternatives in lines)


async def test_engine_example(environment: dict[str, str]) -> None:
    """The README's engine, run as a program beside a processor, answers with the prompt's last token until SIGTERM."""
    with _beside_a_processor([sys.executable, "-c", ENGINE], environment) as worker:
        async with tokenbus.connect(environment["TOKENBUS_BUS_CLIENTS_ADDRESS"]) as client:
            assert [token.id async for token in client.generate([5, 6, 7])] == [7]
        assert await asyncio.to_thread(worker.terminate) == 0


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
    """The engine loop of docs/extending.md publishes to its processor's steps, which print each of them."""
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
    """The comparison in the README and in docs/contract.md has the figures of docs/benchmarks/codec.md."""
    page = (ROOT / "docs" / "benchmarks" / "codec.md").read_text()
    found = re.findall(r"^\| ([^|]+?) +((?:\| +[\d,.]+ +){3})\|", page.partition("times Tokenbus")[0], re.MULTILINE)
    us = {peer: [float(cell.replace(",", "")) for cell in cells.split("|")[1:]] for peer, cells in found}
    ours = us["Tokenbus"]
    readme, contract = (ROOT / "README.md").read_text(), (ROOT / "docs" / "contract.md").read_text()
    for text in (readme, contract):
        assert f"{ours[0]:.0f} to {ours[2]:.0f} microseconds" in text
    for peer, least, most in (("FastDeploy SysV struct", 16, 18), ("vLLM", 19, 27)):
        assert all(least <= round(theirs / own) <= most for theirs, own in zip(us[peer], ours, strict=True))
        assert all(f"{least} to {most} times" in text for text in (readme, contract))
