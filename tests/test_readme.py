"""The README's examples run as they are written."""

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tokenbus_contracts.generated.request_pb2 import Generate, SamplingParameters, TokenPrompt
from tokenbus_engines.synthetic import SyntheticEngine
from tokenbus_engines.synthetic_tokens import true_tokens
from tokenbus_services.settings import Settings

ROOT = Path(__file__).resolve().parents[1]
BATCH, REQUEST, EMBEDDED = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """Settings of a bus of this test's own."""
    with tempfile.TemporaryDirectory(prefix="tb") as folder:
        yield os.environ | {
            "TOKENBUS_BUS_WORKERS_ADDRESS": f"ipc://{folder}/w",
            "TOKENBUS_BUS_CLIENTS_ADDRESS": f"ipc://{folder}/c",
            "TOKENBUS_METRICS_ADDRESS": "",
            "TOKENBUS_DEAD_LETTERS_DIRECTORY": f"{folder}/letters",
        }


def test_batch_example() -> None:
    """The first example prints both rows in batch order."""
    run = subprocess.run([sys.executable, "-c", BATCH], check=True, capture_output=True, text=True)
    assert run.stdout == "11 0 [0] [-0.01]\n10 7 [11 12] [-0.25 -1.5 ]\n"


def test_request_example_with_the_commands_above_it(environment: dict[str, str]) -> None:
    """Beside `tokenbus processor` and `tokenbus worker`, the second example prints a request's eight tokens."""
    tokenbus = str(Path(sys.executable).with_name("tokenbus"))
    commands = [[tokenbus, "processor"], [tokenbus, "worker"]]
    started = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) for command in commands]
    try:
        for process, ready in zip(started, (b"listening", b"connected"), strict=True):
            assert process.stderr is not None
            assert any(ready in line for line in process.stderr)
        example = [sys.executable, "-c", REQUEST]
        run = subprocess.run(example, env=environment, check=True, capture_output=True, text=True)
    finally:
        for process in reversed(started):
            process.terminate()
            process.communicate()
    lines = [line.split(" ", 4) for line in run.stdout.splitlines()]
    assert [int(position) for position, *_ in lines] == list(range(8))
    assert all(float(logprob) <= 0 and int(rank) >= 1 for _, _, logprob, rank, _ in lines)
    assert all(alternatives.count("(") == 3 for *_, alternatives in lines)


async def test_embedded_example(environment: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """The third example's engine loop publishes to its processor's steps, which print each of them."""
    names: dict[str, Any] = {}
    exec(EMBEDDED, names)  # noqa: S102 - it is our own README
    settings = Settings.load(environment=environment)
    engine = SyntheticEngine()
    generate = Generate(request_key=7, tokens=TokenPrompt(token_ids=[1]), sampling=SamplingParameters(max_tokens=6))
    engine.admit(generate)
    consumer = asyncio.create_task(names["consume"](settings))
    thread = threading.Thread(target=names["engine_loop"], args=(engine, settings))
    thread.start()
    await asyncio.to_thread(thread.join)  # it leaves when all is acknowledged, so taken
    consumer.cancel()
    await asyncio.gather(consumer, return_exceptions=True)
    ids = true_tokens(7, 0, 6).ids
    assert capsys.readouterr().out == f"1 {ids[:3]} None\n2 {ids[3:]} None\n"
