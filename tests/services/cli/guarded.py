"""A process that no test leaves behind."""

import threading
from collections.abc import Mapping, Sequence
from signal import Signals
from types import TracebackType
from typing import TypeVar

from tests.support.processes import start

_Self = TypeVar("_Self", bound="Guarded")


class Guarded:
    def __init__(self, command: Sequence[str], seconds: float, variables: Mapping[str, str] | None = None) -> None:
        """Start it; it lives at most so many seconds, so that a line that never comes does not hang the tests."""
        self.process = start(command, variables)
        self._guard = threading.Timer(seconds, self.process.kill)
        self._guard.start()

    def __enter__(self: _Self) -> _Self:  # noqa: PYI019 Self is not in Python 3.10
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._guard.cancel()
        self.process.kill()
        self.process.communicate()

    def signal(self, number: Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[int, str, str]:
        """Wait for its end; return its exit status, and what was left of its output and of its complaints or log."""
        output, complaints = self.process.communicate()
        return self.process.wait(), output, complaints
