"""Logs: one line for an event, whatever its values hold, and a deduplicated one, however often it happens."""

import io
import json
import logging
import re
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from enum import IntEnum
from typing import Any

import numpy as np
import pytest

from tokenbus.logs import DeduplicatedLog, configure, logger
from tokenbus.logs.output import unconfigure
from tokenbus.settings import LogSettings
from tokenbus.testing import ManualClock


class Terminal(io.StringIO):
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


def configured(stream: io.StringIO | None = None, **values: Any) -> io.StringIO:  # noqa: ANN401 - of any setting
    stream = stream or io.StringIO()
    configure(LogSettings(**values), stream)
    return stream


def json_of(**values: object) -> dict[str, Any]:
    stream = configured(format="json")
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


class _Broken:
    def __str__(self) -> str:
        raise RuntimeError("no")


class _Code(IntEnum):
    GAP = 7


_CANNOT_BE_SHOWN = {
    "huge": "(int that cannot be shown: ValueError)",
    "broken": "(_Broken that cannot be shown: RuntimeError)",
}
_1, _2 = f"{1:016x}", f"{2:016x}"


@pytest.mark.parametrize(
    ("given", "logged"),
    [
        # A request's key has 16 hexadecimal digits wherever it stands: no reader of JSON rounds it.
        ({"request": 0xC0FFEE, "requests": [1, np.uint64(2)]}, {"request": f"{0xC0FFEE:016x}", "requests": [_1, _2]}),
        ({"request_id": np.uint64(2**64 - 1), "request_ids": (1,)}, {"request_id": "f" * 16, "request_ids": [_1]}),
        # A number beyond 53 bits, or none that is finite, is text.
        ({"exact": 2**53, "epoch": 2**53 + 1}, {"exact": 2**53, "epoch": str(2**53 + 1)}),
        ({"a": float("nan"), "b": float("-inf"), "f": np.float32(0.5)}, {"a": "nan", "b": "-inf", "f": 0.5}),
        ({"huge": 10**5000, "broken": _Broken()}, _CANNOT_BE_SHOWN),
        ({"error": OSError("gone"), "data": b"a\xff\n"}, {"error": "OSError: gone", "data": "a\\xff\\n"}),
        ({"code": _Code.GAP, "nested": {"a": {1: [b"b"]}}}, {"code": "GAP", "nested": {"a": {"1": ["b"]}}}),
        # Text and lists from outside are cut, and say that they were.
        ({"text": "x" * 301, "fits": "x" * 300}, {"text": "x" * 300 + "...", "fits": "x" * 300}),
        ({"items": [*range(17)], "deep": [[[[1]]]]}, {"items": [*range(16), "1 more"], "deep": [[["[1]"]]]}),
        ({"a": dict.fromkeys(range(17))}, {"a": {**{str(key): None for key in range(16)}, "...": "1 more"}}),
        ({"secret": "hunter2", "proof": b"p"}, {"secret": "(hidden)", "proof": "(hidden)"}),
    ],
)
def test_values_of_any_kind(given: dict[str, object], logged: dict[str, object]) -> None:
    assert {name: value for name, value in json_of(**given).items() if name in given} == logged


@pytest.mark.parametrize("text", ["a\nb", "\x1b[31mred", "\r", "\u2028", "\x85", "\udcff", "\u202e"])
def test_no_value_breaks_the_line(text: str) -> None:
    stream = configured(format="console")
    logger("part").info(text, value=text, items=[text], error=ValueError(text))
    line = stream.getvalue()
    assert line.endswith("\n")
    assert line[:-1].isprintable()


def test_traceback_cannot_pass_for_a_line() -> None:
    stream = configured(format="console")
    try:
        int("x\n2026-01-01T00:00:00Z [info] forged\x1b[0m")
    except ValueError as error:
        error.add_note("and\nmore")
        logger("part").exception("failed")
    first, *rest = stream.getvalue().splitlines()
    assert re.search(r"\[error +\] failed", first)
    assert rest[0] == "    Traceback (most recent call last):"
    assert all(line.startswith("    ") and line.isprintable() for line in rest)


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
def test_format(style: str, expected: str, no_color: str, monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    stream = configured(Terminal() if terminal else io.StringIO(), format=style)
    logger("part").info("happened")
    line = stream.getvalue()
    found = "json" if line.startswith("{") else "colours" if "\x1b[" in line else "plain"
    assert found == expected


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_level(level: str) -> None:
    stream = configured(format="json", level=level)
    log = logger("part")
    for method in (log.debug, log.info, log.warning, log.error, log.critical):
        method("happened")
    names = ["debug", "info", "warning", "error", "critical"]
    assert [json.loads(line)["level"] for line in stream.getvalue().splitlines()] == names[names.index(level) :]


def test_stream_that_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    configured().close()
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


def deduplicated(most: int = 4) -> tuple[ManualClock, Heard, DeduplicatedLog]:
    clock = ManualClock(0.0)
    return clock, Heard(), DeduplicatedLog(quiet_ms=1000, most=most, now=clock.now)


def test_episode_is_logged_once() -> None:
    clock, heard, episodes = deduplicated()
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


def test_episode_ends_in_quiet() -> None:
    clock, heard, episodes = deduplicated()
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
    for moment in (1.75, 2.5, 3.5):  # quiet ends it without `expire` too
        clock.set(moment)
        episodes.begin("w0", heard, "slow")
    assert heard.names[3:] == ["slow", "slow: over", "slow"]
    assert heard.events[4][1] == {"count": 2, "lasted_ms": 750}


def test_keys_are_bounded() -> None:
    clock, heard, episodes = deduplicated(most=2)
    for key in range(100):
        episodes.begin(key, heard, "refused", client=key)
    assert len(episodes) == 2
    assert [values["client"] for _, values in heard.events] == [0, 1, 2]
    assert heard.events[2][1]["counted_together"] is True
    clock.set(1.0)
    episodes.begin(100, heard, "refused", client=100)
    event, values = heard.events[3]
    assert (event, values["count"]) == ("refused: over", 98)
    assert heard.events[4:] == [("refused", {"client": 100})]


def test_episode_holds_on_to_nothing_large() -> None:
    _, heard, episodes = deduplicated(most=1)
    episodes.begin("w0", heard, "slow", error=ValueError("why"), data=b"x" * 10_000, request=5)
    episodes.end("w0")
    values = heard.events[1][1]
    assert (values["error"], values["request"]) == ("ValueError: why", "0000000000000005")
    assert len(values["data"]) < 400
