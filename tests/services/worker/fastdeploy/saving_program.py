"""A process of the engine that saves steps and ends, as the engine does, without a word to the bus.

Its environment says where; it is told the seed, how many steps, and whether another process is forked off for them.
"""

import os
import sys

from tests.services.worker.fastdeploy.bus import Getter, save
from tests.services.worker.fastdeploy.engine import Steps


def _main(seed: int, count: int, *, forks: bool) -> None:
    if forks:
        Getter("get_output").get(wait=False)
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            sys.exit(os.waitstatus_to_exitcode(status))
        os.environ["INFERENCE_MSG_QUEUE_ID"] = os.environ["SAVING_QUEUE_ID"]
    steps = Steps(seed)
    for _ in range(count):
        save("speculate_save_output_topk", steps.speculated(16, 6))


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), forks="forks" in sys.argv)
