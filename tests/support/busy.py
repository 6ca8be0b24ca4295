"""Run a command beside busy loops, as a slow machine would: `python -m tests.support.busy 20 -- COMMAND`.

The loops end with the command, and all ends with this process. The exit status is the command's.
"""

import subprocess
import sys

from tests.support import orphans


def main(count: str, separator: str, *command: str) -> int:
    assert separator == "--", __doc__
    orphans.end_with_this_process()
    loops = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(int(count))]
    try:
        return subprocess.run(command, check=False).returncode
    finally:
        for loop in loops:
            loop.kill()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
