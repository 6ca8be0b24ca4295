"""The decoder under fire: whatever the bytes, a batch or a ContractError, within bounded memory, in a real process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.campaigns import many
from tokenbus_contracts import Rule

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.fuzz


@pytest.mark.parametrize(
    ("seed", "messages", "pure_python"),
    [
        (1, 1000, ""),
        pytest.param(2, many(100_000, 10_000), "", marks=pytest.mark.nightly),
        pytest.param(3, many(100_000, 10_000), "1", marks=pytest.mark.nightly),
    ],
)
def test_no_message_does_anything_but_decode_or_be_refused(seed: int, messages: int, pure_python: str) -> None:
    """Damaged messages, and those built to cost much, are decoded or refused, with little memory beyond their own."""
    command = [sys.executable, "-W", "error", "-m", "tests.contracts.fuzz", "--messages", str(messages)]
    environment = os.environ | {"TOKENBUS_PURE_PYTHON": pure_python}
    ended = subprocess.run(
        [*command, "--seed", str(seed)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    verdicts = json.loads(ended.stdout)
    # So that the campaign cannot come to feed only noise, or only what is valid, without a failing test.
    assert messages * 0.2 < verdicts.pop("accepted") < messages * 0.6
    assert verdicts["malformed"] < messages * 0.5
    assert messages < 10_000 or set(verdicts) == set(Rule) - {Rule.TYPE}
