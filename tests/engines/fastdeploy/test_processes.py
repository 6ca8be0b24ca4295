"""Save and get in processes of their own, which know of each other what the engine's environment says."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.fastdeploy import kernel
from tests.engines.fastdeploy.bus import Beside, Getter, is_empty
from tests.engines.fastdeploy.engine import Steps
from tests.engines.fastdeploy.saving_program import MOST_SECONDS, kill, start, wait_until_done
from tokenbus.bus import AddressError
from tokenbus.engines.fastdeploy.queue import QueueReceiver

OP = "speculate_save_output_topk"


@pytest.fixture
def beside() -> Iterator[Beside]:
    with kernel.queue() as queue:
        yield Beside(queue)


def check(beside: Beside, steps: Steps, count: int) -> None:
    for _ in range(count):
        beside.kernel.save(OP, steps.drawn(OP, 16, 6))
        beside.get()


def test_killed_process_loses_nothing_that_it_saved(environment: dict[str, str], beside: Beside) -> None:
    """Every save that returned is got, though its process was killed with -9 right after (case 21)."""
    Getter("get_output").get(wait=False)
    with start(environment, 1, 7, "stays") as saving:
        wait_until_done(saving)
        kill(saving)
    check(beside, Steps(1), 7)
    assert is_empty()


def test_get_side_that_was_killed_comes_again(environment: dict[str, str], beside: Beside) -> None:
    """What was got is gone, as from the kernel's queue; what was not is got by the one that comes next (case 21)."""
    with start(environment, 8, 10, "stays") as saving, start(environment, 0, 4, "gets") as getting:
        wait_until_done(saving)
        wait_until_done(getting)
        kill(getting)
        steps = Steps(8)
        for _ in range(4):
            steps.drawn(OP, 16, 6)
        check(beside, steps, 6)
        assert is_empty()
        kill(saving)


def test_forked_process_has_a_queue_of_its_own(environment: dict[str, str], beside: Beside) -> None:
    with start(environment | {"INFERENCE_MSG_QUEUE_ID": "6", "SAVING_QUEUE_ID": "5"}, 3, 4, "forks") as saving:
        check(beside, Steps(3), 4)
        _, errors = saving.communicate(timeout=MOST_SECONDS)
        assert saving.returncode == 0, errors


def test_second_process_that_gets_is_refused(folder: Path) -> None:
    """One process gets from a queue; another one is refused, and one that was killed leaves the way free (case 8)."""
    path = str(folder / "q")
    first = QueueReceiver(path)
    with pytest.raises(AddressError, match="another process gets from it"):
        QueueReceiver(path)
    first.abandon()
    QueueReceiver(path).close()


def test_importing_costs_no_framework_and_no_thread() -> None:
    program = (
        "import sys, threading; from tokenbus.engines import fastdeploy; "
        "names = {'paddle', 'torch', 'cupy', 'tokenbus.processor'}; "
        "print(sorted(names & set(sys.modules)), threading.active_count())"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[] 1"
