"""Runs one service as a child process: `python -m tokenbus.cli.child SECONDS FOLDER COMMAND ...`.

Standard input is a pipe from the parent process, which closes whenever the parent ends, even if it is killed. This
process then removes FOLDER, sends itself SIGTERM, and after SECONDS SIGKILL.
"""

import os
import shutil
import signal
import sys
import threading
import time

from tokenbus.cli import main


def _leave_with_the_parent(seconds: float, folder: str) -> None:
    # PR_SET_PDEATHSIG would be no alternative: it exists only on Linux and follows the parent's thread.
    os.read(0, 1)
    shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    given = float(sys.argv[1]), sys.argv[2]
    threading.Thread(target=_leave_with_the_parent, args=given, name="lifeline", daemon=True).start()
    sys.exit(main(sys.argv[3:]))
