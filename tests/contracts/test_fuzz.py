"""The decoder under fire: whatever the bytes, a batch or a ContractError, within bounded memory."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.bombs import BOMBS
from tests.support.campaigns import many
from tokenbus_contracts import Rule

ROOT = Path(__file__).resolve().parents[2]
MESSAGES = many(100_000, 8_000)

pytestmark = pytest.mark.fuzz


def fuzzed(messages: int, seed: int, pure_python: str = "") -> dict[str, Any]:
    """Return the report of a campaign; a campaign that found something fails the test with what it was."""
    arguments = ["--messages", str(messages), "--seed", str(seed), "--json"]
    command = [sys.executable, "-W", "error", "-m", "tests.contracts.fuzz", *arguments]
    environment = os.environ | {"TOKENBUS_PURE_PYTHON": pure_python}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert ended.returncode == 0, ended.stderr
    report: dict[str, Any] = json.loads(ended.stdout)
    return report


@pytest.mark.parametrize(("seed", "pure_python"), [(1, ""), (3, "1")])
def test_no_message_does_anything_but_decode_or_be_refused(seed: int, pure_python: str) -> None:
    """Thousands of damaged messages each decode and come back the same, or are a ContractError, in bounded memory."""
    report = fuzzed(MESSAGES, seed, pure_python)
    refused = report["refused"]
    assert report["accepted"] + sum(refused.values()) == MESSAGES
    # So that the campaign cannot come to feed only noise, or only what is valid, without a failing test.
    assert MESSAGES * 0.2 < report["accepted"] < MESSAGES * 0.6
    assert set(refused) == set(Rule) - {Rule.TYPE}
    assert refused[Rule.MALFORMED] < MESSAGES * 0.5


@pytest.mark.parametrize("pure_python", ["", "1"])
def test_no_message_costs_more_memory_than_its_size_allows(pure_python: str) -> None:
    """Messages built to cost much get the verdict that is due to them, with little more memory than they have."""
    assert fuzzed(0, 0, pure_python)["bombs"] == {bomb.name: bomb.verdict for bomb in BOMBS}
