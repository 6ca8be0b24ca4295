"""The compiled renderer writes the bytes that its twin in Python writes, and leaves to it what it cannot write."""

import ctypes
import json
import time
from typing import Any

import numpy as np
import orjson
import pytest

from tests.gateway.rendering import chunks, said
from tokenbus.gateway import native
from tokenbus.gateway.answer import Choice
from tokenbus.gateway.buffers import Backlog
from tokenbus.gateway.completion_request import CompletionRequest
from tokenbus.gateway.event_writer import EventStream
from tokenbus.gateway.logprob_writers import Drafted, Entries, Lists, Piece
from tokenbus.gateway.messages_format import MessagesFormat
from tokenbus.gateway.rendered_step import RenderedStep, WaitingRow
from tokenbus.gateway.vocabulary import Vocabulary, vocabulary_of
from tokenbus.testing import RowShape, batch
from tokenbus_contracts import LogprobBatch, RowStatus, Scoring

pytestmark = pytest.mark.skipif(not native.available(), reason="there was no C compiler when this was installed")


class _Words:
    """A tokenizer of a few tokens: words, quotes, parts of characters, and one without text."""

    vocabulary_size = 64
    _PIECES = (b"", b' "quoted"\n', b"\xe4", "\u00e9\U0001f600".encode(), b"a" * 300, b"\xef\xbf\xbd")

    def encode(self, text: str) -> list[int]:
        """Return nothing that matters here."""
        return [1] * len(text)

    def token_bytes(self, token_id: int) -> bytes:
        return self._PIECES[token_id] if token_id < len(self._PIECES) else b" word%d" % token_id


def _drawn(random: np.random.Generator, rows: int, most: int, scoring: Scoring = Scoring.FULL) -> LogprobBatch:
    wanted = [
        RowShape(
            key,
            tokens=int(random.integers(0 if key % 5 == 0 else 1, 9)),
            scoring=scoring,
            top_k=(0, 1, 5, 20)[key % 4] if scoring is Scoring.FULL else 0,
        )
        for key in range(1, rows + 1)
    ]
    wanted = [each if each.tokens else each._replace(status=RowStatus.IDLE) for each in wanted]
    made = batch(wanted)
    alternatives = made.alternative_token_ids.size
    columns = made.columns | {
        "token_ids": random.integers(0, most, made.token_ids.size).astype("u4"),
        "ranks": random.integers(1, 30, made.ranks.size).astype("u4"),
        "logprobs": _logprobs(random, made.logprobs.size),
        "alternative_token_ids": random.integers(0, most, alternatives).astype("u4"),
        "alternative_logprobs": _logprobs(random, alternatives),
    }
    return LogprobBatch.of_views(made.header, columns)


def _logprobs(random: np.random.Generator, count: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    spread = -(10 ** random.uniform(-19, 4, count))
    return np.where(random.random(count) < 0.1, random.choice([0.0, -9999.0, -1.0, -0.5], count), spread).astype("f4")


def _written(step: LogprobBatch, vocabulary: Vocabulary, *, is_chat: bool, waits: bool = False) -> list[bytes]:
    view = RenderedStep(step, vocabulary)
    if waits:
        Backlog().hold(WaitingRow(view, 0))
    part = Entries() if is_chat else Lists(EventStream())
    return [part.joined(part.take(view, place, view.counts[place])) for place in range(step.row_count)]


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_twins_write_the_same(seed: int, is_chat: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: FBT001
    """Rows of all sizes are the same bytes, which are JSON, with the renderer and without, and where they waited."""
    random = np.random.default_rng(seed)
    vocabulary, steps = Vocabulary(_Words()), [_drawn(random, rows, 64) for rows in (1, 32, 33, 70)]
    found = [_written(step, vocabulary, is_chat=is_chat) for step in steps]
    waited = [_written(step, vocabulary, is_chat=is_chat, waits=True) for step in steps]
    views = [RenderedStep(step, vocabulary) for step in steps]
    fragments = vocabulary.entry_fragments if is_chat else vocabulary.key_fragments
    assert all(view.rendered(0, fragments) is not None for view in views)
    monkeypatch.setattr(native, "_render", None)
    assert found == [_written(step, vocabulary, is_chat=is_chat) for step in steps]
    assert waited == found == [_written(step, vocabulary, is_chat=is_chat, waits=True) for step in steps]
    for each in found:
        assert all(isinstance(json.loads(row), dict) for row in each)


def _without_offsets(piece: Piece) -> Piece:
    return piece[:3]


@pytest.mark.parametrize("has_draft", [False, True])
def test_rows_of_a_step_of_which_few_wait_are_written_the_same(*, has_draft: bool) -> None:
    """The others are freed; what is counted is free again when none waits."""
    random, vocabulary, backlog = np.random.default_rng(3), Vocabulary(_Words()), Backlog()
    step = _drawn(random, 70, 64)
    whole, view = (RenderedStep(step, vocabulary, step if has_draft else None) for _ in range(2))
    rows = [WaitingRow(view, place) for place in range(0, 70, 7)]
    for row in rows:
        backlog.hold(row)
    before = backlog.size
    backlog.fit(view)
    assert backlog.size < before / 2
    for part in (Entries(), Lists(EventStream()), *([Drafted(Entries())] if has_draft else [])):
        for row in rows:
            found = part.take(row.step, row.row, row.step.counts[row.row])
            expected = part.take(whole, place := 7 * rows.index(row), whole.counts[place])
            assert _without_offsets(found) == _without_offsets(expected)
    for row in rows:
        backlog.free(row)
    assert backlog.size == 0


@pytest.mark.parametrize(("vocabulary", "most", "scoring"), [
    ("numbers", 64, Scoring.FULL), ("bytes", 100_000, Scoring.FULL), ("bytes", 64, Scoring.NONE),
])  # fmt: skip
def test_what_it_cannot_write_python_writes(vocabulary: str, most: int, scoring: Scoring) -> None:
    random = np.random.default_rng(1)
    step = _drawn(random, 9, most, scoring)
    for is_chat in (False, True):
        written = _written(step, vocabulary_of(vocabulary), is_chat=is_chat)
        assert len(written) == step.row_count
        assert all(map(json.loads, written))


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("fields", [
    {}, {"wants_ids": True, "wants_usage": True}, {"top_logprobs": 0}, {"top_logprobs": 20},
    {"top_logprobs": 0, "wants_ids": True}, {"top_logprobs": 1, "wants_columns": True}, {"sampling": {"stop": ["d1"]}},
])  # fmt: skip
async def test_streams_are_the_same_without_it(
    fields: dict[str, Any],
    is_chat: bool,  # noqa: FBT001 - a parameter of the test
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.5)
    random = np.random.default_rng(seed)
    steps = [
        (_drawn(random, 2, 6 if number < 20 else 70, Scoring.NONE if number % 7 == 6 else Scoring.FULL), None)
        for number in range(40)
    ]
    last = batch([RowShape(key, tokens=1, status=RowStatus.FINISHED_LENGTH, top_k=1) for key in (1, 2)])
    asked = CompletionRequest(model="m", prompts=[[1]], n=2, is_streamed=True, is_chat=is_chat, **fields)
    found = []
    for render in (native._render, None):
        monkeypatch.setattr(native, "_render", render)
        found.append(await said(asked, [*steps, (last, None)], Vocabulary(_Words())))
    assert found[0] == found[1]
    assert len(list(chunks(found[0]))) > len(steps) // 2


@pytest.mark.parametrize("stops", [(), ("d1",)])
async def test_messages_are_the_same_without_it(stops: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Anthropic's events are the same bytes; with it, Python writes only the rows of stops and split characters."""
    random = np.random.default_rng(4)
    steps = [(_drawn(random, 1, 20, Scoring.NONE), None) for _ in range(40)]
    last = batch([RowShape(1, tokens=1, status=RowStatus.FINISHED_LENGTH)])
    asked = CompletionRequest(
        model="m", prompts=[[1]], is_streamed=True, is_chat=True, sampling={"stop": stops} if stops else {}
    )  # fmt: skip
    written: list[str] = []
    chunk = MessagesFormat.chunk

    def counted(self: MessagesFormat, choice: Choice, text: str, pieces: Any) -> bytes:  # noqa: ANN401
        written.append(text)
        return chunk(self, choice, text, pieces)

    monkeypatch.setattr(MessagesFormat, "chunk", counted)
    found, counts = [], []
    for render in (native._render, None):
        monkeypatch.setattr(native, "_render", render)
        written.clear()
        found.append(await said(asked, [*steps, (last, None)], Vocabulary(_Words()), MessagesFormat))
        counts.append(len(written))
    assert found[0] == found[1]
    assert (counts[0] < counts[1]) is not bool(stops)


def _number(value: float) -> bytes:
    out = ctypes.create_string_buffer(32)
    size = native._library.tokenbus_number(ctypes.c_float(value), out)
    return out.raw[:size]


def test_numbers_are_those_of_orjson() -> None:
    random = np.random.default_rng(7)
    values = np.concatenate([
        -random.exponential(3, 20_000).astype("f4"),
        random.integers(0x1E800000, 0x4A000000, 40_000).astype("u4").view("f4"),
        np.float32(2.0) ** np.arange(-70, 24, dtype="f4"),
        np.array([float(f"{digits}e-{power}") for digits in range(1, 1000) for power in range(1, 22)], "f4"),
        np.array([0.0, -0.0, -9999.0, -433895.125, -1e-5, -9.9999e-6, 3e38, 1e-45], "f4"),
    ])  # fmt: skip
    expected = orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1].split(b",")
    found = [_number(value) for value in values.tolist()]
    left = [value for value, each in zip(values.tolist(), found, strict=True) if not each]
    assert all(abs(value) >= 2**20 or abs(value) < 1e-19 for value in left)
    assert all(each in (b"", wanted) for each, wanted in zip(found, expected, strict=True))
