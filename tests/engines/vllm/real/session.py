"""`tokenbus` in a session of its own, as `setsid` runs it, in a process that has the imports."""

import os
import sys

from tokenbus.cli import main

if __name__ == "__main__":
    os.setsid()
    sys.exit(main())
