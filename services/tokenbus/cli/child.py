"""One service as a child process: `python -m tokenbus.cli.child SECONDS FOLDER COMMAND ...`, a pipe as input.

The parent holds the pipe's other end and never writes. However the parent ends, the pipe ends with it. Then this
process removes the system's folder and gets a SIGTERM, and a SIGKILL if it has not left after so many seconds.
"""

import os
import shutil
import signal
import sys
import threading
import time

from tokenbus.cli import main


def _leave_with_the_parent(seconds: float, folder: str) -> None:
    # A thread, not PR_SET_PDEATHSIG: that is Linux's alone, and means the thread that started us, not the process.
    os.read(0, 1)
    shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    given = float(sys.argv[1]), sys.argv[2]
    threading.Thread(target=_leave_with_the_parent, args=given, name="lifeline", daemon=True).start()
    sys.exit(main(sys.argv[3:]))
