"""Logs: one line for an event, whatever its values hold, and a deduplicated one, however often it happens."""

import io
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from enum import IntEnum
from typing import Any, Literal

import numpy as np
import pytest

from tests.support.clock import ManualClock
from tokenbus_services.logs import DeduplicatedLog, configure, logger
from tokenbus_services.logs.output import unconfigure
from tokenbus_services.settings import LogSettings


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Heard:
    """What a deduplicated log logged."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, event: str, **values: object) -> None:
        self.events.append((event, values))

    @property
    def names(self) -> list[str]:
        return [event for event, _ in self.events]


@pytest.fixture(autouse=True)
def _unconfigured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    unconfigure()
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    yield
    unconfigure()


def json_of(**values: object) -> dict[str, Any]:
    stream = io.StringIO()
    configure(LogSettings(format="json"), stream)
    logger("part").info("happened", **values)
    (line,) = stream.getvalue().splitlines()
    read: dict[str, Any] = json.loads(line)
    return read


def test_line_of_json() -> None:
    before = datetime.now(UTC)
    line = json_of(worker="w0", items=3, share=0.5, on=True, nothing=None)
    assert before <= datetime.fromisoformat(line.pop("timestamp")) <= datetime.now(UTC)
    assert [line.pop(name) for name in ("level", "event", "logger")] == ["info", "happened", "part"]
    assert line == {"worker": "w0", "items": 3, "share": 0.5, "on": True, "nothing": None}


def test_request_keys_are_hexadecimal() -> None:
    """A request's key is 16 hexadecimal digits wherever it stands, from numpy too: no reader of JSON rounds it."""
    line = json_of(request=0xC0FFEE, request_key=np.uint64(2**64 - 1), requests=[1, np.uint64(2)], request_keys=(3,))
    assert line["request"] == "0000000000c0ffee"
    assert line["request_key"] == "f" * 16
    assert line["requests"] == ["0000000000000001", "0000000000000002"]
    assert line["request_keys"] == ["0000000000000003"]


def test_numbers_that_json_readers_break() -> None:
    line = json_of(exact=2**53, epoch=2**53 + 1, nan=float("nan"), low=float("-inf"), huge=10**5000, f=np.float32(0.5))
    assert line["exact"] == 2**53
    assert line["epoch"] == str(2**53 + 1)
    assert (line["nan"], line["low"], line["f"]) == ("nan", "-inf", 0.5)
    assert line["huge"] == "(int that cannot be shown: ValueError)"


class _Broken:
    def __str__(self) -> str:
        raise RuntimeError("no")


class _Code(IntEnum):
    GAP = 7


def test_values_of_any_kind() -> None:
    line = json_of(error=OSError("gone"), data=b"a\xff\n", code=_Code.GAP, broken=_Broken(), nested={"a": {1: [b"b"]}})
    assert line["error"] == "OSError: gone"
    assert line["data"] == "a\\xff\\n"
    assert line["code"] == "GAP"
    assert line["broken"] == "(_Broken that cannot be shown: RuntimeError)"
    assert line["nested"] == {"a": {"1": ["b"]}}


def test_long_values_are_cut() -> None:
    line = json_of(text="x" * 301, fits="x" * 300, items=[*range(17)], pairs=dict.fromkeys(range(17)), deep=[[[[1]]]])
    assert line["text"] == "x" * 300 + "..."
    assert line["fits"] == "x" * 300
    assert line["items"] == [*range(16), "1 more"]
    assert len(line["pairs"]) == 17
    assert line["pairs"]["..."] == "1 more"
    assert line["deep"] == [[["[1]"]]]


def test_secret_is_hidden() -> None:
    assert json_of(secret="hunter2")["secret"] == "(hidden)"  # noqa: S105, S106 - it is one


@pytest.mark.parametrize("text", ["a\nb", "\x1b[31mred", "\r", "\u2028", "\x85", "\udcff", "\u202e"])
def test_no_value_breaks_the_line(text: str) -> None:
    stream = io.StringIO()
    configure(LogSettings(format="console"), stream)
    logger("part").info(text, value=text, items=[text], error=ValueError(text))
    line = stream.getvalue()
    assert line.endswith("\n")
    assert line[:-1].isprintable()


def test_traceback_cannot_pass_for_a_line() -> None:
    """An error's traceback follows its line, indented, also where the error's own text has line breaks."""
    stream = io.StringIO()
    configure(LogSettings(format="console"), stream)
    try:
        int("x\n2026-01-01T00:00:00Z [info] forged\x1b[0m")
    except ValueError as error:
        error.add_note("and\nmore")
        logger("part").exception("failed")
    first, *rest = stream.getvalue().splitlines()
    assert re.search(r"\[error +\] failed", first)
    assert rest[0] == "    Traceback (most recent call last):"
    assert all(line.startswith("    ") and line.isprintable() for line in rest)


def test_traceback_in_json() -> None:
    error = ValueError("why")
    assert json_of(exc_info=error)["exception"] == "    ValueError: why"
    assert json_of(exc_info=(ValueError, error, None))["exception"] == "    ValueError: why"
    assert "exception" not in json_of(exc_info=True)


@pytest.mark.parametrize(
    ("style", "terminal", "no_color", "expected"),
    [
        ("auto", True, "", "colours"),
        ("auto", True, "1", "plain"),
        ("auto", False, "", "json"),
        ("console", True, "", "colours"),
        ("console", False, "", "plain"),
        ("json", True, "", "json"),
    ],
)
def test_format(
    style: Literal["auto", "json", "console"],
    expected: str,
    no_color: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    terminal: bool,
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    stream = Terminal() if terminal else io.StringIO()
    configure(LogSettings(format=style), stream)
    logger("part").info("happened")
    line = stream.getvalue()
    found = "json" if line.startswith("{") else "colours" if "\x1b[" in line else "plain"
    assert found == expected


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_level(level: Literal["debug", "info", "warning", "error"]) -> None:
    stream = io.StringIO()
    configure(LogSettings(format="json", level=level), stream)
    log = logger("part")
    for method in (log.debug, log.info, log.warning, log.error, log.critical):
        method("happened")
    names = ["debug", "info", "warning", "error", "critical"]
    assert [json.loads(line)["level"] for line in stream.getvalue().splitlines()] == names[names.index(level) :]


def test_loggers_follow_a_later_configuration() -> None:
    log = logger("part").bind(worker="w0")
    for _ in range(2):
        stream = io.StringIO()
        configure(LogSettings(format="json"), stream)
        log.info("happened")
        assert json.loads(stream.getvalue())["worker"] == "w0"


def test_standard_error_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    configure(LogSettings(format="json"))
    logger("part").info("happened")
    captured = capsys.readouterr()
    assert json.loads(captured.err)["event"] == "happened"
    assert not captured.out


def test_stream_that_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    configure(LogSettings(format="json"), closed)
    closed.close()
    logger("part").info("happened")
    monkeypatch.setattr(sys, "stderr", None)
    configure(LogSettings())
    logger("part").info("happened")
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    configure(LogSettings(format="console"), narrow)
    logger("part").info("happened", name="é")
    narrow.seek(0)
    assert "name=\\xe9" in narrow.read()


def test_library_without_configuration(caplog: pytest.LogCaptureFixture) -> None:
    """Until it is configured, Tokenbus speaks through Python's logging, whose owner decides, and values stay safe."""
    with caplog.at_level(logging.INFO):
        logger("part").info("happened\n%s", request=5, why="\x1b[0m")
        logger("part").debug("not asked for")
        logger("part").error("failed", exc_info=ValueError("why"))
    assert [record.name for record in caplog.records] == ["tokenbus.part"] * 2
    assert caplog.messages[0] == 'happened\\n%s request="0000000000000005" why="\\\\x1b[0m"'
    assert caplog.messages[1] == "failed\n    ValueError: why"


@pytest.mark.process
def test_import_and_quiet_use_print_nothing() -> None:
    """Importing the package, making a logger and an event of little weight print nothing, and leave structlog alone."""
    code = (
        "import structlog; from tokenbus_services.logs import logger; logger('x').info('quiet');"
        "assert not structlog.is_configured()"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert (run.stdout, run.stderr) == (b"", b"")


def test_episode_is_logged_once() -> None:
    """The first of a kind is logged, the rest is counted, and the end says how many and for how long."""
    clock, heard = ManualClock(0.0), Heard()
    episodes = DeduplicatedLog(quiet_ms=1000, most=4, now=clock.now)
    logged = []
    for moment in range(5):
        clock.set(moment / 2)
        logged.append(episodes.begin("w0", heard, "slow", worker="w0", moment=moment))
    assert logged == [True, False, False, False, False]
    episodes.end("w0")
    episodes.end("w0")
    assert heard.events == [
        ("slow", {"worker": "w0", "moment": 0}),
        ("slow: over", {"worker": "w0", "moment": 0, "count": 5, "lasted_ms": 2000}),
    ]
    assert len(episodes) == 0


def test_kinds_and_keys_are_apart() -> None:
    heard = Heard()
    episodes = DeduplicatedLog(quiet_ms=1000, most=4, now=ManualClock().now)
    for key, event in [("w0", "slow"), ("w0", "gap"), ("w1", "slow"), ("w0", "slow"), ("w0", "gap")]:
        episodes.begin(key, heard, event)
    assert heard.names == ["slow", "gap", "slow"]
    episodes.end("w0")
    assert heard.names[3:] == ["slow: over", "gap: over"]
    assert len(episodes) == 1


def test_episode_ends_in_quiet() -> None:
    clock, heard = ManualClock(0.0), Heard()
    episodes = DeduplicatedLog(quiet_ms=1000, most=4, now=clock.now)
    episodes.begin("w0", heard, "slow")
    episodes.begin("w0", heard, "slow")
    episodes.begin("w1", heard, "once")
    clock.set(0.999)
    episodes.expire()
    assert heard.names == ["slow", "once"]
    clock.set(1.0)
    episodes.expire()
    episodes.expire()
    assert heard.names == ["slow", "once", "slow: over"]
    assert len(episodes) == 0
    assert episodes.begin("w0", heard, "slow")


def test_quiet_ends_an_episode_without_being_asked() -> None:
    clock, heard = ManualClock(0.0), Heard()
    episodes = DeduplicatedLog(quiet_ms=1000, most=4, now=clock.now)
    for moment in (0.0, 0.75, 1.5, 2.5):
        clock.set(moment)
        episodes.begin("w0", heard, "slow")
    assert heard.names == ["slow", "slow: over", "slow"]
    assert heard.events[1][1] == {"count": 3, "lasted_ms": 1500}


def test_keys_are_bounded() -> None:
    """Keys beyond the most are counted together, so that made-up keys fill neither memory nor the log."""
    clock, heard = ManualClock(0.0), Heard()
    episodes = DeduplicatedLog(quiet_ms=1000, most=2, now=clock.now)
    for key in range(100):
        episodes.begin(key, heard, "refused", client=key)
    assert (len(episodes), episodes.peak) == (2, 2)
    assert [values["client"] for _, values in heard.events] == [0, 1, 2]
    assert heard.events[2][1]["counted_together"] is True
    clock.set(1.0)
    episodes.begin(100, heard, "refused", client=100)
    event, values = heard.events[3]
    assert (event, values["count"]) == ("refused: over", 98)
    assert heard.events[4:] == [("refused", {"client": 100})]
    assert episodes.peak == 2


def test_close_sums_up_all() -> None:
    heard = Heard()
    episodes = DeduplicatedLog(quiet_ms=1000, most=1, now=ManualClock().now)
    for key in ("w0", "w0", "w1", "w1", "w1"):
        episodes.begin(key, heard, "slow")
    episodes.close()
    episodes.close()
    assert [values["count"] for event, values in heard.events if event == "slow: over"] == [2, 3]


def test_episode_holds_on_to_nothing_large() -> None:
    episodes = DeduplicatedLog(quiet_ms=1000, most=1, now=ManualClock().now)
    heard = Heard()
    episodes.begin("w0", heard, "slow", error=ValueError("why"), data=b"x" * 10_000, request=5)
    episodes.end("w0")
    values = heard.events[1][1]
    assert (values["error"], values["request"]) == ("ValueError: why", "0000000000000005")
    assert len(values["data"]) < 400
