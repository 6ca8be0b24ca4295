"""tokenbus processor and tokenbus worker: what signals do to them, and how a worker drains."""

import asyncio
import threading
from importlib.util import find_spec
from pathlib import Path
from signal import SIGTERM

import pytest

from tests.cli.helpers import Service, addresses, generate
from tests.support.settings import settings_of
from tests.support.waiting import MOST
from tokenbus.cli import main
from tokenbus.client import Client
from tokenbus.engines.synthetic import SyntheticEngine
from tokenbus.settings import Settings
from tokenbus.worker import EngineBrokenError, StepArrays
from tokenbus.worker.run import Pace, run_engine

QUIET = ["--metrics-address", ""]


async def test_second_signal_ends_at_once(tmp_path: Path) -> None:
    with (
        Service("processor", *addresses(tmp_path), *QUIET, processor__drain_timeout_ms=3_600_000) as processor,
        Service("worker", *addresses(tmp_path)[:2], "--steps-per-second", "20", "--engine", "synthetic") as worker,
    ):
        await asyncio.to_thread(worker.logged, "connected")
        own = {"bus.clients_address": f"ipc://{tmp_path}/c", "client.drain_timeout_ms": 0}
        async with Client(settings_of(own)) as client:
            tokens = client.generate(generate(1_000_000))
            await asyncio.wait_for(anext(tokens), MOST)
            processor.signal(SIGTERM)
            await asyncio.to_thread(processor.logged, "stopping; a second signal ends it at once")
            processor.signal(SIGTERM)
            status, _, _ = await asyncio.to_thread(processor.end)
    assert status == -SIGTERM


def test_engine_that_breaks_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(_: SyntheticEngine) -> list[StepArrays]:
        raise EngineBrokenError("no device")

    monkeypatch.setattr(SyntheticEngine, "has_work", True)
    monkeypatch.setattr(SyntheticEngine, "step", fail)
    own = ["--engine", "synthetic", "--metrics-address", "", "--set", "worker.drain_timeout_ms=1"]
    assert main(["worker", "--log-level", "error", *own]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "tokenbus: the engine's loop failed: EngineBrokenError: no device"


def test_run_engine_in_a_thread_until_an_event() -> None:
    """run_engine blocks until the caller's event is set, in a thread that can have no signal handlers, and drains."""
    settings = Settings.load(
        environment={}, overrides={"bus.workers_address": "tcp://127.0.0.1:1", "worker.metrics_address": ""}
    )
    stop, engine = threading.Event(), Closing()
    thread = threading.Thread(target=run_engine, args=(engine, settings), kwargs={"stop": stop})
    thread.start()
    assert engine.asked.wait(MOST)
    stop.set()
    thread.join(MOST)
    assert not thread.is_alive()
    assert engine.is_closed


class Closing(SyntheticEngine):
    """An engine without requests that notes that its loop runs, and that it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()
        self.is_closed = False

    @property
    def has_work(self) -> bool:
        self.asked.set()
        return False

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--engine", "synthetic", "--tokens-per-step", "9"], "tokenbus: --tokens-per-step: 1 to 8, got 9"),
        (["--engine", "paddle", "--model", "x"], "to name the model for clients, use --set worker.model=NAME"),
        (["--weights", "x"], "error: unrecognized arguments: --weights x"),
        (["--engine", "paddle", "--drafts"], "error: unrecognized arguments: --drafts"),
        (["--engine", "paddle", "--slice-steps", "-1"], "tokenbus: slice_steps: 0 to 2147483647, got -1"),
        (["--engine", "synthetic", "--parts", "0"], "tokenbus: --parts: 1 to 64, got 0"),
        (["--speculate", "8"], "tokenbus: --speculate: 0 to 7 (limits.max_tokens_per_row is 8), got 8"),
        (["--max-running", "0"], "tokenbus: max_running: 1 to 1024, got 0"),
        (["--engine", "paddle", "--context", "1"], "tokenbus: context: 2 to 65536, got 1"),
        (["--steps-per-second", "-1"], "argument --steps-per-second: a whole number of at least 0, got '-1'"),
        (["--steps-per-second", "nan"], "argument --steps-per-second: a whole number of at least 0, got 'nan'"),
        (["--engine", "steam"], "invalid choice: 'steam' (choose from 'ngram', 'paddle', 'synthetic', 'vllm')"),
    ],
)
def test_engine_that_cannot_be(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An engine's options are held against their bounds, and another engine's are refused, with status 2."""
    assert main(["worker", "--log-level", "error", *arguments]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(line)


@pytest.mark.parametrize(
    ("contents", "line"),
    [(None, "No such file or directory"), (b"garbage", "damaged, or no safetensors file")],
    ids=["missing", "damaged"],
)
@pytest.mark.skipif(find_spec("safetensors") is None, reason="safetensors is not installed")
@pytest.mark.xdist_group("paddle")
def test_weights_that_cannot_be_used(
    contents: bytes | None, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tmp_path / "weights.safetensors"
    if contents is not None:
        weights.write_bytes(contents)
    assert main(["worker", "--log-level", "error", "--engine", "paddle", "--weights", str(weights)]) == 1
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith(f"tokenbus: weights {weights}: ")
    assert line in told


def test_pace_spreads_steps() -> None:
    """Steps begin a period apart; a late one is made up for, and a pause is not."""
    time = [100.0]

    def wait(seconds: float) -> None:
        time[0] += seconds

    begun = []
    pace = Pace(10, lambda: time[0], wait)
    for spent in (0.0, 0.05, 0.12, 0.0, 5.0, 0.0, 0.0):
        pace()
        begun.append(round(time[0] - 100, 6))
        time[0] += spent
    assert begun == [0, 0.1, 0.2, 0.32, 0.4, 5.4, 5.4]
