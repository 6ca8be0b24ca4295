"""One service as a child process: `python -m tokenbus_services.cli.local SECONDS COMMAND ...`, a pipe as its input.

The parent holds the pipe's other end and never writes. However the parent ends, the pipe ends with it, and then this
process gets a SIGTERM, and a SIGKILL if it has not left after so many seconds.
"""

import os
import signal
import sys
import threading
import time

from tokenbus_services.cli import main


def _leave_with_the_parent(seconds: float) -> None:
    # A thread, not PR_SET_PDEATHSIG: that is Linux's alone, and means the thread that started us, not the process.
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_leave_with_the_parent, args=[float(sys.argv[1])], name="lifeline", daemon=True).start()
    sys.exit(main(sys.argv[2:]))
