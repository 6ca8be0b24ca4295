"""Events go from a step's columns to their sockets as HTTP has them; what a socket has no room for is given back."""

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import uvicorn
from starlette.applications import Starlette
from uvicorn.server import ServerState

from tests.in_process.builders import settings
from tokenbus.gateway import native
from tokenbus.gateway.completion_request import CompletionRequest
from tokenbus.gateway.connection import Connection
from tokenbus.gateway.event_writer import EventStream, EventWriter, Left, Rows
from tokenbus.gateway.openai_format import Envelope
from tokenbus.gateway.rendered_step import RenderedStep
from tokenbus.gateway.vocabulary import vocabulary_of
from tokenbus.testing import RowShape, batch
from tokenbus_contracts import LogprobBatch, RowStatus

pytestmark = pytest.mark.skipif(not native.available(), reason="there was no C compiler when this was installed")
VOCABULARY = vocabulary_of("ngram")
WORDS = np.uint32(1000)
KEYS = (3, 4)


@pytest.fixture(autouse=True)
def _same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.5)


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def _stream() -> EventStream:
    asked = CompletionRequest(model="m", prompts=[[1]], top_logprobs=2, is_streamed=True)
    return Envelope(asked, 0xA).stream(0)


def _writer(*keys: int) -> tuple[EventWriter, list[EventStream]]:
    writer, streams = EventWriter(VOCABULARY, 8), [_stream() for _ in keys]
    for key, stream in zip(keys, streams, strict=True):
        writer.open(key, stream)
    return writer, streams


def _view(*rows: RowShape, step: int = 1) -> RenderedStep:
    made = batch(rows, step=step)
    ids = {name: made.columns[name] % WORDS for name in ("token_ids", "alternative_token_ids")}
    return RenderedStep(LogprobBatch.of_views(made.header, made.columns | ids), VOCABULARY)


def _views(*positions: int, tokens: int = 2) -> list[RenderedStep]:
    rows = [[RowShape(key, position, tokens, top_k=2) for key in KEYS] for position in positions]
    return [_view(*each, step=step) for step, each in enumerate(rows, 1)]


def _left(rows: Rows) -> dict[int, list[Left]]:
    return dict(rows.write(0, len(rows)))


def _events(steps: Sequence[RenderedStep]) -> bytes:
    writer, _ = _writer(KEYS[0])
    return b"".join(each.events or b"" for each in _left(Rows(writer, steps))[KEYS[0]])


def test_rows_of_several_steps_are_one_chunk(sockets: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = sockets
    writer, (stream, other) = _writer(*KEYS)
    stream.socket = ours.fileno()
    steps = _views(0, 2, 4)
    rows = Rows(writer, steps)
    left = _left(rows)
    events = _events(steps)
    assert events.count(b"data: ") == 3
    assert theirs.recv(2**20) == b"%x\r\n%b\r\n" % (len(events), events)
    assert list(left) == [KEYS[1]]
    assert [each.row for each in left[KEYS[1]]] == [1, 1, 1]
    assert (stream.tokens, other.tokens) == (6, 6)
    assert rows.seconds().size == 3


def test_what_a_full_socket_has_no_room_for_is_given_back(sockets: tuple[socket.socket, socket.socket]) -> None:
    ours, _ = sockets
    ours.setblocking(False)  # noqa: FBT003 - a name of the standard library's
    with suppress(BlockingIOError):
        while True:
            ours.send(bytes(2**16))
    writer, (stream, _) = _writer(*KEYS)
    stream.socket = ours.fileno()
    steps = _views(0, 2)
    left = _left(Rows(writer, steps))[KEYS[0]]
    assert b"".join(each.events or b"" for each in left) == _events(steps)
    assert not any(each.is_rest for each in left)
    assert (stream.socket, stream.tokens) == (-1, 4)


def test_rest_of_what_a_socket_took_in_part_is_given_back() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        theirs, _ = server.accept()
        with theirs:
            writer, (stream, _) = _writer(*KEYS)
            stream.socket = ours.fileno()
            steps = _views(*range(0, 40_000, 200), tokens=200)
            left = _left(Rows(writer, steps))[KEYS[0]]
            ours.shutdown(socket.SHUT_WR)
            received = b"".join(iter(lambda: theirs.recv(2**20), b""))
    events = _events(steps)
    ((rest, is_rest),) = [(each.events or b"", each.is_rest) for each in left]
    assert is_rest
    assert received + rest == b"%x\r\n%b\r\n" % (len(events), events)
    assert stream.socket == -1


def test_rows_that_end_a_stream_and_rows_after_them_are_left(sockets: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = sockets
    writer, (stream, _) = _writer(*KEYS)
    stream.socket = ours.fileno()
    before, after = _views(0, 4)
    end = _view(RowShape(KEYS[0], 2, 2, RowStatus.FINISHED_LENGTH, top_k=2), step=2)
    left = _left(Rows(writer, [before, end, after]))[KEYS[0]]
    assert [(each.step, each.events) for each in left] == [(end, None), (after, None)]
    assert theirs.recv(2**20).count(b"data: ") == 1
    assert stream.tokens == 2


def test_slot_of_an_ended_request_takes_no_rows_of_it(sockets: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = sockets
    writer, _ = _writer(KEYS[0])
    rows = Rows(writer, _views(0))
    writer.close(KEYS[0])
    stream = _stream()
    writer.open(7, stream)
    stream.socket = ours.fileno()
    assert [each.events for each in _left(rows)[KEYS[0]]] == [None]
    theirs.setblocking(False)  # noqa: FBT003 - as above
    with pytest.raises(BlockingIOError):
        theirs.recv(1)


def test_a_stream_keeps_its_count_when_it_is_closed() -> None:
    writer, (stream, _) = _writer(*KEYS)
    _left(Rows(writer, _views(0)))
    characters = stream.characters
    writer.close(KEYS[0])
    writer.open(7, _stream())
    assert (stream.tokens, stream.characters) == (2, characters)
    assert characters


async def test_a_socket_that_is_lost_is_written_to_no_more() -> None:
    """Its number may be another connection's as soon as it is closed, which is after the protocol has heard of it."""
    gateway: Any = SimpleNamespace(settings=settings(), counts=None)
    connection = Connection(gateway, uvicorn.Config(Starlette(), lifespan="off"), ServerState(), {})
    connection.stream = stream = _stream()
    stream.socket = 99
    connection.connections.add(connection)
    with suppress(AttributeError):  # it has no transport here
        connection.connection_lost(None)
    assert stream.socket == -1


def test_ids_without_a_text_and_streams_beyond_the_bound_are_left() -> None:
    writer, _ = _writer(*range(10, 17), *KEYS)  # one more than the table has room for
    (view,) = _views(0)
    assert [each.events is None for each in _left(Rows(writer, [view]))[KEYS[1]]] == [True]
    ids = view.batch.token_ids.copy()
    ids[0] = VOCABULARY.size
    unknown = type(view.batch).of_views(view.batch.header, view.batch.columns | {"token_ids": ids.astype(np.uint32)})
    assert [each.events for each in _left(Rows(writer, [RenderedStep(unknown, VOCABULARY)]))[KEYS[0]]] == [None]
