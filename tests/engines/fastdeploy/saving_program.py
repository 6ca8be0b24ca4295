"""A process of the engine that saves steps and ends, as the engine does, without a word to the queue.

Its environment says where; its arguments are the seed, how many steps, and how it goes on: `forks` has another process
forked off for them, `stays` leaves it there until it is killed, `gets` has it get so many instead of saving them, and
`shows` has request 77 go on in each step, and then another process forked off that stays until its input ends.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.engines.fastdeploy.bus import Getter, save
from tests.engines.fastdeploy.engine import TOPK, Steps, whole
from tokenbus.engines import fastdeploy

ROOT = Path(__file__).resolve().parents[3]
MOST_SECONDS = 60


def start(environment: dict[str, str], seed: int, count: int, how: str = "ends") -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.engines.fastdeploy.saving_program", str(seed), str(count), how]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def wait_until_done(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "done\n", process.stderr.read() if process.stderr else ""


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=MOST_SECONDS)


def _main(seed: int, count: int, how: str) -> None:
    if how == "forks":
        Getter("get_output").get(wait=False)
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            sys.exit(os.waitstatus_to_exitcode(status))
        os.environ["INFERENCE_MSG_QUEUE_ID"] = os.environ["SAVING_QUEUE_ID"]
    if how == "gets":
        getter = Getter("speculate_get_output_topk")
        for _ in range(count):
            getter.get()
    elif how == "shows":
        fastdeploy.assign(0, 77)
        given = whole(TOPK, 3)
        for _ in range(count):
            given["seq_lens_decoder"] += 3
            save(TOPK, given)
        if not os.fork():
            sys.stdin.read()
            os._exit(0)
    else:
        steps = Steps(seed)
        for _ in range(count):
            save("speculate_save_output_topk", steps.drawn(TOPK, 16, 6))
    if how in {"stays", "gets", "shows"}:
        sys.stdout.write("done\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
