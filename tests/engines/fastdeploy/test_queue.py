"""The queue's two sides by themselves: what they do when sockets are full, broken, or another program's."""

import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engines.fastdeploy.bus import MOST_SECONDS, settings_in
from tokenbus_contracts import ContractError
from tokenbus_engines.fastdeploy.message import HEADER_BYTES, Kind, Message, header_of, unpacked
from tokenbus_engines.fastdeploy.queue import QueueReceiver, QueueSender

SECONDS = 0.01


def message(number: int, slots: int = 2, each: int = 1, columns: int = 1) -> Message:
    """Return a message that differs from others."""
    tokens = number + np.arange(slots * each * columns, dtype=np.int32).reshape(-1, columns)
    return Message(
        kind=Kind.SPECULATED_SCORED,
        stop_flag=1,
        flag=3,
        counts=np.full(slots, each, np.int32),
        tokens=tokens,
        scores=tokens.astype(np.float32),
        ranks=np.zeros(len(tokens), np.int32),
    )


def sender_in(folder: Path, **overrides: object) -> QueueSender:
    """Return a save side in a folder."""
    return QueueSender(str(folder / "q"), settings_in(folder, **overrides).worker, SECONDS)


def numbers(receiver: QueueReceiver, count: int) -> list[int]:
    """Get as many messages, and return which they are."""
    found = []
    for _ in range(count):
        received = receiver.peek(MOST_SECONDS)
        assert received is not None
        got = unpacked(received.data)
        found.append(int(got.tokens[0, 0]))
        assert np.array_equal(got.tokens.reshape(-1), found[-1] + np.arange(got.tokens.size))
        assert np.array_equal(got.scores, got.tokens)
        receiver.pop()
    return found


def test_more_than_a_socket_holds(folder: Path) -> None:
    """Messages that find no room in the socket follow in pieces, in order and whole, and the save does not wait."""
    receiver, sender = QueueReceiver(str(folder / "q")), sender_in(folder)
    try:
        for number in range(40):
            sender.send(message(number, 512, 6, 21).packed(sender.next_sequence, number))
        assert sender.waiting[0] == 40
        assert numbers(receiver, 40) == list(range(40))
        assert receiver.peek(0.0) is None
    finally:
        sender.close(0)
        receiver.close()


def test_what_is_saved_first_waits_for_a_get_side(folder: Path) -> None:
    """A get side that comes later has all of it, and one after it nothing that was got."""
    sender = sender_in(folder)
    try:
        for number in range(3):
            sender.send(message(number).packed(sender.next_sequence, number))
        first = QueueReceiver(str(folder / "q"))
        assert numbers(first, 2) == [0, 1]
        first.close()
        second = QueueReceiver(str(folder / "q"))
        assert numbers(second, 1) == [2]
        sender.send(message(7).packed(sender.next_sequence, 3))
        assert numbers(second, 1) == [7]
        assert sender.counts.connections == 2
        second.close()
    finally:
        sender.close(0)


def test_many_acknowledgements_are_all_read(folder: Path) -> None:
    """However many messages wait, those that were got are let go of, and none of them comes again (case 17)."""
    sender = sender_in(folder)
    try:
        for number in range(1000):
            sender.send(message(number).packed(sender.next_sequence, number))
        first = QueueReceiver(str(folder / "q"))
        assert numbers(first, 1000) == list(range(1000))
        first.close()
        second = QueueReceiver(str(folder / "q"))
        sender.send(message(5).packed(sender.next_sequence, 1))
        assert numbers(second, 1) == [5]
        second.close()
    finally:
        sender.close(0)


def test_program_that_speaks_something_else(folder: Path) -> None:
    """Bytes that are no message end their connection, and nothing else."""
    receiver, sender = QueueReceiver(str(folder / "q")), sender_in(folder)
    try:
        with socket.socket(socket.AF_UNIX) as other:
            other.connect(str(folder / "q"))
            other.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 4)
            sender.send(message(4).packed(1, 1))
            assert numbers(receiver, 1) == [4]
            other.settimeout(MOST_SECONDS)
            with pytest.raises(ConnectionResetError):  # with bytes that were not read, it is a reset
                other.recv(1)
    finally:
        sender.close(0)
        receiver.close()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"magic": 1}, "message: one of the drop-in's, got something else"),
        ({"kind": 9}, "message: one of the drop-in's, got something else"),
        ({"size": 41}, "message: 96 bytes, as its counts say, got 41"),
        ({"slots": 513}, "got 96"),
        ({"entries": 4000}, "got 96"),
        ({"columns": 22}, "got 96"),
        ({"columns": 0}, "got 96"),
    ],
)
def test_header_that_contradicts_itself(changes: dict[str, Any], text: str) -> None:
    """What a header says is held against what a message can be before anything is made of that size (case 26)."""
    from tokenbus_engines.fastdeploy.message import _HEADER  # noqa: PLC0415 - to damage one

    data = message(1, 2, 2).packed(1, 1)
    header = header_of(data[:HEADER_BYTES])
    assert unpacked(data).tokens.tolist() == [[1], [2], [3], [4]]
    with pytest.raises(ContractError) as refused:
        header_of(_HEADER.pack(*header._replace(**changes)))
    assert text in str(refused.value)


def test_get_that_waits_ends_with_the_get_side(folder: Path) -> None:
    """A thread that waits for a message gets an error when the get side is closed."""
    receiver = QueueReceiver(str(folder / "q"))
    ended: list[str] = []

    def wait() -> None:
        try:
            receiver.peek(None)
        except RuntimeError as error:
            ended.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    receiver.close()
    waiting.join(MOST_SECONDS)
    assert ended == ["the get side was closed"]


def test_oldest_of_several_is_next(folder: Path) -> None:
    """Of what several processes saved, the next message is the one that was saved first."""
    receiver, one, other = QueueReceiver(str(folder / "q")), sender_in(folder), sender_in(folder)
    try:
        for stamp, sender in enumerate((one, other, other, one, other)):
            sender.send(message(stamp).packed(sender.next_sequence, stamp))
        assert numbers(receiver, 5) == [0, 1, 2, 3, 4]
    finally:
        one.close(0)
        other.close(0)
        receiver.close()
