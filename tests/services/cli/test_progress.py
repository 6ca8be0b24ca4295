"""Progress of long work."""

import io

from tokenbus_services.cli.progress import Progress


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """Return that it is."""
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


def test_shorter_line_leaves_nothing_of_the_longer() -> None:
    """What a shorter line does not cover is blanked."""
    stream, time = Terminal(), [0.0]
    progress = Progress(stream, lambda: time[0])
    for text in ("long line", "short"):
        progress.show(text.__str__)
        time[0] += 1
    assert stream.getvalue() == "\rlong line\rshort    "


def test_nothing_is_shown_elsewhere() -> None:
    """In a file or a pipe there is no progress, and its text is not even made."""
    stream = io.StringIO()
    progress = Progress(stream)
    progress.show(lambda: str(1 / 0))
    progress.clear()
    assert stream.getvalue() == ""
