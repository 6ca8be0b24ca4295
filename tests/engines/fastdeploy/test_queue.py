"""The queue's two sides by themselves: what they do when sockets are full, broken, or another program's."""

import contextlib
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engines.fastdeploy.bus import MOST_SECONDS, settings_in
from tests.support.waiting import wait_until
from tokenbus_engines.fastdeploy.message import HEADER, Kind, Message, unpacked
from tokenbus_engines.fastdeploy.queue import QueueFullError, QueueReceiver, QueueSender, Source

SECONDS = 0.01


def message(number: int, slots: int = 2, each: int = 1, columns: int = 1) -> Message:
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


def packed(given: Message, sequence: int, stamp: int, **changes: int) -> bytes:
    """Return a message's bytes, with changes in its header."""
    counts = given.counts if given.kind is not Kind.SINGLE else given.counts[:0]
    arrays = b"".join(array.tobytes() for array in (counts, given.tokens, given.scores, given.ranks))
    entries, columns = given.tokens.shape
    header = np.zeros((), HEADER)
    fields = {"magic": 0x51464254, "size": HEADER.itemsize + len(arrays), "kind": given.kind, "flag": given.flag}
    fields |= {"columns": columns, "stop_flag": given.stop_flag, "slots": given.slots, "entries": entries}
    for name, value in (fields | {"sequence": sequence, "stamp": stamp} | changes).items():
        header[name] = value
    return header.tobytes() + arrays


def bytes_of(source: Source) -> bytes:
    return bytes(source.data)


def sender_in(folder: Path, **overrides: object) -> QueueSender:
    """Return a save side in a folder."""
    return QueueSender(str(folder / "q"), settings_in(folder, **overrides).worker, SECONDS)


def send(sender: QueueSender, given: Message, stamp: int) -> None:
    sender.send(lambda _, sequence: (packed(given, sequence, stamp), 0))


def numbers(receiver: QueueReceiver, count: int) -> list[int]:
    found = []
    for _ in range(count):
        data = receiver.get(MOST_SECONDS, bytes_of)
        assert data is not None
        got = unpacked(data)
        found.append(int(got.tokens[0, 0]))
        assert np.array_equal(got.tokens.reshape(-1), found[-1] + np.arange(got.tokens.size))
        assert np.array_equal(got.scores, got.tokens)
    return found


def test_more_than_a_socket_holds(folder: Path) -> None:
    receiver, sender = QueueReceiver(str(folder / "q")), sender_in(folder)
    try:
        for number in range(40):
            send(sender, message(number, 512, 6, 21), number)
        assert sender.waiting[0] == 40
        assert numbers(receiver, 40) == list(range(40))
        assert receiver.get(0.0, bytes_of) is None
    finally:
        sender.close(0)
        receiver.close()


def test_what_is_saved_first_waits_for_a_get_side(folder: Path) -> None:
    sender = sender_in(folder)
    try:
        for number in range(3):
            send(sender, message(number), number)
        first = QueueReceiver(str(folder / "q"))
        assert numbers(first, 2) == [0, 1]
        first.close()
        second = QueueReceiver(str(folder / "q"))
        assert numbers(second, 1) == [2]
        send(sender, message(7), 3)
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
            send(sender, message(number), number)
        first = QueueReceiver(str(folder / "q"))
        assert numbers(first, 1000) == list(range(1000))
        first.close()
        second = QueueReceiver(str(folder / "q"))
        send(sender, message(5), 1)
        assert numbers(second, 1) == [5]
        second.close()
    finally:
        sender.close(0)


@pytest.mark.parametrize("closes", [True, False])
def test_acknowledgement_that_finds_no_room_follows(closes: bool, folder: Path) -> None:  # noqa: FBT001 - a parameter
    """A process that saves and stands still has the last acknowledgement when it goes on: nothing is got twice."""
    count = 2000
    receiver = QueueReceiver(str(folder / "q"))
    with socket.socket(socket.AF_UNIX) as saving:
        saving.connect(str(folder / "q"))
        for number in range(count):
            saving.sendall(packed(message(number), number + 1, number))
            assert numbers(receiver, 1) == [number]
        found: list[int] = []
        acknowledged = threading.Thread(target=lambda: found.append(_last_acknowledgement(saving, count)))
        acknowledged.start()
        if closes:
            receiver.close()
        else:
            wait_until(lambda: receiver.get(0.0, bytes_of) is None and not acknowledged.is_alive())
        acknowledged.join(MOST_SECONDS)
        assert found == [count]
    if not closes:
        receiver.close()


def _last_acknowledgement(connection: socket.socket, wanted: int) -> int:
    """Return the last sequence that is acknowledged, or the one that is waited for."""
    connection.settimeout(MOST_SECONDS)
    last = 0
    while last != wanted and (found := connection.recv(4096)):
        last = int.from_bytes(found[-8:], sys.byteorder)
    return last


def test_program_that_speaks_something_else(folder: Path) -> None:
    receiver, sender = QueueReceiver(str(folder / "q")), sender_in(folder)
    try:
        with socket.socket(socket.AF_UNIX) as other:
            other.connect(str(folder / "q"))
            other.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 4)
            send(sender, message(4), 1)
            assert numbers(receiver, 1) == [4]
            other.settimeout(MOST_SECONDS)
            with pytest.raises(ConnectionResetError):  # with bytes that were not read, it is a reset
                other.recv(1)
    finally:
        sender.close(0)
        receiver.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"magic": 1},
        {"kind": 0},
        {"kind": 9},
        {"size": 41},
        {"size": 2**32 - 1},
        {"slots": 513},
        {"entries": 4000},
        {"columns": 22},
        {"columns": 0},
        {"columns": 65_535},
    ],
)
def test_header_that_contradicts_itself(changes: dict[str, Any], folder: Path) -> None:
    """A header is held against what a message can be before more is read: its connection ends (case 26)."""
    receiver, sender = QueueReceiver(str(folder / "q")), sender_in(folder)
    try:
        with socket.socket(socket.AF_UNIX) as other:
            other.connect(str(folder / "q"))
            other.sendall(packed(message(1, 2, 2), 1, 1, **changes))
            send(sender, message(4), 1)
            assert numbers(receiver, 1) == [4]
            other.settimeout(MOST_SECONDS)
            with pytest.raises(ConnectionResetError):  # its bytes were not read
                other.recv(1)
    finally:
        sender.close(0)
        receiver.close()


@pytest.mark.parametrize(
    ("kind", "counts", "tokens"),
    [
        (Kind.SPECULATED_SCORED, [7, 1], 8),
        (Kind.SPECULATED_SCORED, [2, 2], 3),
        (Kind.SPECULATED, [6, 6], 2),
        (Kind.SPECULATED, [100_000, 1], 2),
        (Kind.SPECULATED, [-3, 1], 2),
        (Kind.SINGLE_SCORED, [1, 1], 1),
        (Kind.SINGLE, [1, 1], 1),
    ],
)
def test_counts_that_contradict_the_header(kind: Kind, counts: list[int], tokens: int, folder: Path) -> None:
    given = message(1, tokens)
    given.kind, given.counts = kind, np.array(counts, np.int32)
    if not kind.is_scored:
        given.scores, given.ranks = given.scores[:0], given.ranks[:0]
    receiver, sender = QueueReceiver(str(folder / "q")), sender_in(folder)
    try:
        with socket.socket(socket.AF_UNIX) as other:
            other.connect(str(folder / "q"))
            other.sendall(packed(given, 1, 1))
            send(sender, message(4), 2)
            assert numbers(receiver, 1) == [4]
            other.settimeout(MOST_SECONDS)
            with contextlib.suppress(ConnectionResetError):  # where its bytes were not all read
                assert other.recv(1) == b""
    finally:
        sender.close(0)
        receiver.close()


def test_get_that_waits_ends_with_the_get_side(folder: Path) -> None:
    receiver = QueueReceiver(str(folder / "q"))
    ended: list[str] = []

    def wait() -> None:
        try:
            receiver.get(None, bytes_of)
        except RuntimeError as error:
            ended.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    receiver.close()
    waiting.join(MOST_SECONDS)
    assert ended == ["the get side was closed"]


def test_save_that_waits_ends_with_the_save_side(folder: Path) -> None:
    sender = sender_in(folder, worker__retention_items=2, worker__block_timeout_ms=3_600_000)
    for number in range(2):
        send(sender, message(number), number)
    ended: list[str] = []

    def wait() -> None:
        try:
            send(sender, message(2), 2)
        except QueueFullError as error:
            ended.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    wait_until(lambda: sender.counts.blocked)
    sender.close(0)
    waiting.join(MOST_SECONDS)
    assert "closed" in ended[0]


def test_save_to_a_side_that_was_closed(folder: Path) -> None:
    sender = sender_in(folder)
    sender.close(0)
    with pytest.raises(QueueFullError, match="closed"):
        send(sender, message(0), 0)


def test_oldest_of_several_is_next(folder: Path) -> None:
    receiver, one, other = QueueReceiver(str(folder / "q")), sender_in(folder), sender_in(folder)
    try:
        for stamp, sender in enumerate((one, other, other, one, other)):
            send(sender, message(stamp), stamp)
        assert numbers(receiver, 5) == [0, 1, 2, 3, 4]
    finally:
        one.close(0)
        other.close(0)
        receiver.close()


def test_oldest_of_several_that_waited_is_next(folder: Path) -> None:
    receiver = QueueReceiver(str(folder / "q"))
    connections = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    try:
        for stamp, connection in reversed([*enumerate(connections)]):
            connection.connect(str(folder / "q"))
            connection.sendall(packed(message(stamp), 1, stamp))
        assert numbers(receiver, 3) == [0, 1, 2]
    finally:
        for connection in connections:
            connection.close()
        receiver.close()


def test_connection_that_breaks_is_not_tried_again_at_once(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "q"))
        listener.listen()
        sender = QueueSender(str(folder / "q"), settings_in(folder).worker, 3600)
        try:
            send(sender, message(0), 0)
            listener.accept()[0].close()
            for number in range(1, 4):
                send(sender, message(number, 512, 6, 21), number)
            assert sender.counts.connections == 1
        finally:
            sender.close(0)


def test_queue_that_nothing_gets_from_is_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    sender = sender_in(folder)
    try:
        for number in range(200):
            send(sender, message(number), number)
        wait_until(lambda: "no process gets from the queue" in caplog.text)
    finally:
        sender.close(0)


def test_path_that_cannot_be_connected_to_is_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "q").symlink_to("q")
    sender = sender_in(folder)
    try:
        send(sender, message(0), 0)
        wait_until(lambda: "queue cannot be reached" in caplog.text)
    finally:
        sender.close(0)
