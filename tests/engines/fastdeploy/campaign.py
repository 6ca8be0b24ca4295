"""The differential run: random calls to the drop-in and to the kernel's queue, and the same tensors out.

`python -m tests.engines.fastdeploy.campaign --steps 100000` is the long form, which `make soak` runs.
"""

import argparse
import os
import secrets
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from tests.engines.fastdeploy import kernel
from tests.engines.fastdeploy.bus import Beside, settings_in
from tests.engines.fastdeploy.engine import Steps
from tests.engines.fastdeploy.kernel import GETS
from tokenbus_engines import fastdeploy

_QUEUES = (1, 2, 7)
_OPS = tuple(GETS)
_MOST_WAITING = 12


def run(beside: dict[int, Beside], steps: int, seed: int, *, most_slots: int = 512, forever: float = np.inf) -> int:
    """Do so many random steps to both, or as many as fit into some seconds; return how many."""
    draw, engine = np.random.default_rng(seed), Steps(seed)
    begin, done = time.monotonic(), 0
    while done < steps and time.monotonic() - begin < forever:
        queue = int(draw.choice(list(beside)))
        os.environ["INFERENCE_MSG_QUEUE_ID"] = str(queue)
        both = beside[queue]
        if len(both.kernel) and (len(both.kernel) >= _MOST_WAITING or draw.random() < 0.5):
            both.get()
            continue
        op = str(draw.choice(_OPS))
        slots = min(_slots(draw, most_slots), 256 if GETS[op] == "speculate_get_output" else 512)
        given = engine.any(op, slots, int(draw.integers(1, 22)))
        given["rank_id"] = int(draw.choice([0, 0, 0, 1, 3]))
        if "save_each_rank" in given:
            given["save_each_rank"] = bool(draw.random() < 0.5)
        if "preempted_idx" in given and draw.random() < 0.1:  # an older form
            del given["preempted_idx"]
            if op == "speculate_save_output_topk" and draw.random() < 0.5:
                for name in ("seq_lens_decoder", "prompt_lens", "save_each_rank"):
                    del given[name]
        if op == "mtp_save_first_token_with_topk" and "preempted_idx" not in given:
            continue
        both.save(op, given)
        done += 1
    for queue, both in beside.items():
        os.environ["INFERENCE_MSG_QUEUE_ID"] = str(queue)
        both.get_all()
    return done


def _slots(draw: np.random.Generator, most: int) -> int:
    """Return a number of slots, small mostly, and now and then as many as there may be."""
    return int(draw.choice([0, 1, 2, 3, int(draw.integers(1, 33)), int(draw.integers(1, most + 1)), most]))


def main() -> None:
    """Run, and say how it went."""
    parser = argparse.ArgumentParser(prog="python -m tests.engines.fastdeploy.campaign", description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=secrets.randbits(31))
    options = parser.parse_args()
    sys.stdout.write(f"seed {options.seed}\n")
    with tempfile.TemporaryDirectory(prefix="tb", dir="/tmp") as folder:
        fastdeploy.configure(fastdeploy.Options(settings=settings_in(Path(folder))))
        with kernel.queue() as one, kernel.queue() as two, kernel.queue() as three:
            beside = {number: Beside(queue) for number, queue in zip(_QUEUES, (one, two, three), strict=True)}
            for done in range(0, options.steps, 1000):
                run(beside, min(1000, options.steps - done), options.seed + done)
                if done % 10_000 == 0:
                    sys.stdout.write(f"{done + 1000} steps, no difference\n")
        fastdeploy.close()
    sys.stdout.write(f"{options.steps} steps, no difference; {one.why_not or 'the kernel had its own queue'}\n")


if __name__ == "__main__":
    main()
