"""The output of the logs. This module configures structlog only for Tokenbus, not for the whole process."""

import contextlib
import json
import logging
import os
import sys
import threading
from typing import NoReturn, TextIO

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

from tokenbus.logs.values import safe, safe_text, safe_traceback
from tokenbus.settings import LogSettings

_LEVELS = {name.lower(): getattr(logging, name) for name in ("CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG")}
_TIME = structlog.processors.TimeStamper(fmt="iso", utc=True)
_ONE_WRITE = threading.Lock()


class _Output:
    """The stream, the level and the renderer of all loggers."""

    stream: TextIO | None = None
    level = logging.DEBUG
    render: Processor | None = None
    """The renderer of log lines, or None before `configure` is called."""

    def write(self, line: str) -> None:
        """Write a line. Failures are ignored, because logging must not end the process."""
        stream = self.stream
        if stream is None:  # standard error is closed
            return
        with _ONE_WRITE, contextlib.suppress(OSError, ValueError):  # a closed stream raises ValueError
            encoding = getattr(stream, "encoding", None) or "utf-8"
            stream.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")
            stream.flush()

    debug = info = warning = error = critical = write
    """The methods that structlog calls for each level."""


_output = _Output()


def configure(settings: LogSettings, stream: TextIO | None = None) -> None:
    """Write all logs of Tokenbus, including those of existing loggers, to a stream or by default to standard error.

    The format `auto` writes readable lines on a terminal, and JSON elsewhere. NO_COLOR disables colours.
    """
    stream = sys.stderr if stream is None else stream
    terminal = stream is not None and stream.isatty()
    console = settings.format == "console" or (settings.format == "auto" and terminal)
    colours = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    _output.stream, _output.level = stream, _LEVELS[settings.level]
    _output.render = (
        structlog.dev.ConsoleRenderer(colors=colours, sort_keys=False)
        if console
        else structlog.processors.JSONRenderer(separators=(",", ":"))
    )


def unconfigure() -> None:
    """Undo `configure`, so that log lines go to Python's logging again."""
    _output.render = None


def logger(name: str) -> FilteringBoundLogger:
    """Return a logger, whose lines go to Python's logging until `configure` is called."""
    made = structlog.wrap_logger(
        _output,
        processors=[_process],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
        context_class=dict,
    )
    bound: FilteringBoundLogger = made.bind(logger=name)
    return bound


def _process(wrapped: WrappedLogger, method: str, event: EventDict) -> str:
    level, render = _LEVELS.get(method, logging.INFO), _output.render
    if render is None:
        _hand_to_python(level, event)
    if level < _output.level:
        raise structlog.DropEvent
    line = _TIME(wrapped, method, {"level": method})
    line.update(_safe_values(event))
    return str(render(wrapped, method, line))


def _safe_values(event: EventDict) -> dict[str, object]:
    event = structlog.processors.format_exc_info(None, "", event)
    trace = event.pop("exception", None)
    values: dict[str, object] = {"event": safe_text(str(event.pop("event", "")))}
    values |= {name: safe(name, value) for name, value in event.items() if name not in ("level", "timestamp")}
    return values | ({"exception": safe_traceback(trace)} if isinstance(trace, str) else {})


def _hand_to_python(level: int, event: EventDict) -> NoReturn:
    """Pass an event to the logging of an application that uses Tokenbus as a library."""
    to = logging.getLogger(f"tokenbus.{event.pop('logger', '')}".rstrip("."))
    if to.isEnabledFor(level):
        values = _safe_values(event)
        text, trace = values.pop("event"), values.pop("exception", None)
        pairs = "".join(f" {name}={json.dumps(value)}" for name, value in values.items())
        to.log(level, "%s%s%s", text, pairs, f"\n{trace}" if trace else "")
    raise structlog.DropEvent
