"""Progress of long work."""

import fcntl
import io
import os
import struct
import termios

from tokenbus.cli.terminal import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_shows_progress_now_and_then() -> None:
    """On a terminal one line is written over, ten times a second at most, and taken away at the end."""
    stream, time = Terminal(), [0.0]
    progress = Progress(stream, lambda: time[0])
    for number in range(8, 12):
        progress.show(f"{number} items".__str__)
        time[0] += 0.06
    progress.clear()
    progress.clear()
    assert stream.getvalue() == "\r8 items\r10 items\r        \r"


def test_nothing_is_shown_elsewhere() -> None:
    """In a file or a pipe there is no progress, and its text is not even made."""
    stream = io.StringIO()
    progress = Progress(stream)
    progress.show(lambda: str(1 / 0))
    progress.clear()
    assert stream.getvalue() == ""


def test_line_is_no_wider_than_the_terminal() -> None:
    """A line that would go on in the next row, where nothing can write over it, is cut off."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 20, 0, 0))
    with os.fdopen(theirs, "w") as stream:
        progress = Progress(stream)
        progress.show(("0123456789" * 3).__str__)
        progress.clear()
        expected = b"\r0123456789012345678\r" + b" " * 19 + b"\r"
        shown = b""
        while len(shown) < len(expected):  # a terminal hands over what it has
            shown += os.read(ours, 100)
        assert shown == expected
    os.close(ours)
