"""Runs one service as a child process: `python -m tokenbus.cli.child SECONDS FOLDER COMMAND ...`.

Standard input is a pipe from the parent process, which closes whenever the parent ends, even if it is killed. This
process then removes FOLDER, sends itself SIGTERM, and sends itself SIGKILL after SECONDS.
"""

import os
import shutil
import signal
import sys
import threading
import time

from tokenbus.cli import main


def _leave_with_the_parent(seconds: float, folder: str) -> None:
    # PR_SET_PDEATHSIG is no alternative: it needs Linux, and sends its signal already when the parent's thread ends.
    os.read(0, 1)
    shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    given = float(sys.argv[1]), sys.argv[2]
    threading.Thread(target=_leave_with_the_parent, args=given, name="lifeline", daemon=True).start()
    sys.exit(main(sys.argv[3:]))
