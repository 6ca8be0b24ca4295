"""Progress of long work."""

import io

import pytest

from tokenbus.cli.terminal import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_shows_progress_now_and_then() -> None:
    stream, time = Terminal(), [0.0]
    progress = Progress(stream, lambda: time[0])
    for number in range(8, 12):
        progress.show(f"{number} items")
        time[0] += 0.06
    progress.clear()
    progress.clear()
    assert stream.getvalue() == "\r\x1b[K8 items\r\x1b[K10 items\r\x1b[K"


def test_nothing_is_shown_elsewhere() -> None:
    stream = io.StringIO()
    progress = Progress(stream)
    progress.show("8 items")
    progress.clear()
    assert stream.getvalue() == ""


def test_line_is_no_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    stream = Terminal()
    Progress(stream).show("0123456789" * 3)
    assert stream.getvalue() == "\r\x1b[K0123456789012345678"
