"""The system's own programs, as the benchmarks start them and what they ask of them."""

import sys
from pathlib import Path

COMMAND = str(Path(sys.executable).with_name("tokenbus"))
PROMPT = "In the evening the old man said"
