"""Save and get in processes of their own, which know of each other what the engine's environment says."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services.worker.fastdeploy import model
from tests.services.worker.fastdeploy.bus import Getter
from tests.services.worker.fastdeploy.engine import Steps
from tokenbus_services.worker import fastdeploy

ROOT = Path(__file__).resolve().parents[4]
MOST_SECONDS = 60


@pytest.fixture
def environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The engine's environment, with queue 5 and a folder for temporary files of its own; both sides end with it."""
    for name in [name for name in os.environ if name.startswith(("TOKENBUS_", "INFERENCE_MSG"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("INFERENCE_MSG_QUEUE_ID", "5")
    monkeypatch.setenv("INFERENCE_MSG_ID", "1")
    monkeypatch.chdir(folder)
    yield os.environ | {"TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    fastdeploy.close()


def start(environment: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    """Start the engine's process."""
    command = [sys.executable, "-m", "tests.services.worker.fastdeploy.saving_program", *arguments]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def test_other_process_saves_and_ends(environment: dict[str, str]) -> None:
    """Every step that a process saved arrives, also those of the moment before it ended, in order and whole."""
    steps, getter = Steps(21), Getter("speculate_get_output_topk")
    with start(environment, "21", "30") as saving:
        for _ in range(30):
            getter.check(model.speculate_save_output_topk(steps.speculated(16, 6)))
        getter.get(wait=False)
        assert getter.arrays()[0][0, 0] == -2
        _, errors = saving.communicate(timeout=MOST_SECONDS)
        assert saving.returncode == 0, errors
        assert "Traceback" not in errors


def test_process_that_comes_again_goes_on(environment: dict[str, str]) -> None:
    """A process of the engine that was started anew is read by who reads already (case 19)."""
    getter = Getter("speculate_get_output_topk")
    for seed in (1, 2):
        steps = Steps(seed)
        with start(environment, str(seed), "5") as saving:
            for _ in range(5):
                getter.check(model.speculate_save_output_topk(steps.speculated(16, 6)))
            saving.communicate(timeout=MOST_SECONDS)


def test_forked_process_has_a_bus_of_its_own(environment: dict[str, str]) -> None:
    """What a process had begun is not used by one that was forked off: that begins its own, and ends it."""
    steps, getter = Steps(3), Getter("speculate_get_output_topk")
    with start(environment | {"INFERENCE_MSG_QUEUE_ID": "6", "SAVING_QUEUE_ID": "5"}, "3", "4", "forks") as saving:
        for _ in range(4):
            getter.check(model.speculate_save_output_topk(steps.speculated(16, 6)))
        _, errors = saving.communicate(timeout=MOST_SECONDS)
        assert saving.returncode == 0, errors


def test_importing_costs_no_framework_and_no_thread() -> None:
    """What is imported starts nothing, and loads neither a GPU framework nor the processor."""
    program = (
        "import sys, threading; from tokenbus_services.worker import fastdeploy; "
        "names = {'paddle', 'torch', 'cupy', 'tokenbus_services.processor'}; "
        "print(sorted(names & set(sys.modules)), threading.active_count())"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[] 1"
