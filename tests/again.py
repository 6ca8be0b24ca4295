"""Run pytest, and run the tests that failed once more, alone: `python -m tests.again ARGUMENTS OF PYTEST`.

A test that then passes is flaky. It is named at the end, and to mend it is the first task of the next change. A test
that fails twice fails the run.
"""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

_FAILED = Path(".pytest_cache/v/cache/lastfailed")
_GROUP = re.compile(r"@[^\]@]*$")
_ONCE_MORE = ("--last-failed", "--last-failed-no-failures", "none")
_IN_ONE_PROCESS = ("-n", "0", "--dist", "no")


def main(arguments: Sequence[str]) -> int:
    """Run the tests, those that failed once more, and return pytest's exit status."""
    _FAILED.unlink(missing_ok=True)
    status = _pytest(arguments)
    if status != pytest.ExitCode.TESTS_FAILED:
        return status
    once = _failed()
    print(f"==> once more, alone: {len(once)} that failed", flush=True)
    alone = _IN_ONE_PROCESS if "-n" in arguments else ()  # else pytest-xdist may not be there, and is not needed
    status = _pytest([*arguments, *alone, *_ONCE_MORE])
    twice = _failed()
    for name in sorted(once - twice):
        print(f"FLAKY {name}: it failed, and passed alone; to mend it is the next change's first task")
    for name in sorted(twice):
        print(f"FAILED TWICE {name}")
    return status


def _pytest(arguments: Sequence[str]) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], check=False).returncode


def _failed() -> set[str]:
    """Return the tests that failed, without the group that pytest-xdist writes behind a name, and write them so."""
    if not _FAILED.exists():
        return set()
    names = {_GROUP.sub("", name): True for name in json.loads(_FAILED.read_text())}
    _FAILED.write_text(json.dumps(names))
    return set(names)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
