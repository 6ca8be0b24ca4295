"""What uvicorn says, in the gateway's own log: a line of another form could be read by nobody's tools."""

import contextlib
import logging
from collections.abc import Iterator

from tokenbus_services.logs import DeduplicatedLog, logger

_log = logger("gateway")


class _Handler(logging.Handler):
    """Hands lines on; what is said again and again is said once, and how often at the end."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.episodes = DeduplicatedLog()

    def emit(self, record: logging.LogRecord) -> None:
        """Hand a line on."""
        say = _log.error if record.levelno >= logging.ERROR else _log.warning
        self.episodes.begin(record.msg, say, "http server", message=record.getMessage(), exc_info=record.exc_info)


@contextlib.contextmanager
def taken_over() -> Iterator[None]:
    """Take uvicorn's lines for as long as `with` lasts."""
    source, handler = logging.getLogger("uvicorn.error"), _Handler()
    before, source.propagate = source.propagate, False
    source.addHandler(handler)
    try:
        yield
    finally:
        source.removeHandler(handler)
        source.propagate = before
        handler.episodes.close()
