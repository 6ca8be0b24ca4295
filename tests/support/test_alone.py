"""The tests' own rules: unit tests start no process, and the tables of those that do are true."""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.support.alone import LONG, PROCESS, TESTS, ProcessStartedError

STARTS: dict[str, Callable[[], object]] = {
    "subprocess": lambda: subprocess.run([sys.executable, "-c", ""], check=False),
    "os.system": lambda: os.system("true"),  # noqa: S605, S607 - it is refused
    "os.fork": os.fork,
    "multiprocessing": lambda: multiprocessing.get_context("spawn").Process(target=int).start(),
}


@pytest.mark.parametrize("way", STARTS)
def test_unit_test_is_refused_a_process(way: str, refused: list[str]) -> None:
    with pytest.raises(ProcessStartedError, match="mark the test `process`"):
        STARTS[way]()
    assert len(refused) == 1
    refused.clear()


@pytest.mark.parametrize("place", [*PROCESS, *LONG])
def test_place_exists(place: str) -> None:
    assert (TESTS / place).exists()
