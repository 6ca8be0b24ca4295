"""Whether the kernel permits its users what a test needs of namespaces."""

import shutil
import subprocess
from collections.abc import Sequence

from tests.support.waiting import MOST

_REFUSALS = ("not permitted", "denied", "not supported", "No space left")


def why_not_permitted(probe: Sequence[str], tools: Sequence[str], refusal: str) -> str:
    """Say why a command that tries it is refused, or which tool is missing; empty: neither. Other failures are raised.

    `refusal` is what the command itself says where the kernel lacks something.
    """
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    tried = subprocess.run(probe, check=False, capture_output=True, text=True, timeout=MOST)
    if tried.returncode == 0:
        return ""
    if any(each in tried.stderr for each in (*_REFUSALS, refusal)):
        return tried.stderr.strip()
    raise RuntimeError(tried.stderr)
