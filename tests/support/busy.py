"""Run a command beside busy loops, as a slow machine would: `python -m tests.support.busy 20 -- COMMAND`.

The loops end with the command, and all ends with this process. The exit status is the command's.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support import orphans


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main(count: str, separator: str, *command: str) -> int:
    assert separator == "--", __doc__
    orphans.end_with_this_process()
    with busy_loops(int(count)):
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
