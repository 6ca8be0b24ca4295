"""The queue's two sides by themselves: what they do when sockets are full, broken, or another program's."""

import contextlib
import ctypes
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.engines.fastdeploy import engine
from tests.engines.fastdeploy.bus import MOST_SECONDS, settings_in
from tests.support.waiting import wait_until
from tokenbus.engines.fastdeploy.message import HEADER, Kind, Message, unpacked
from tokenbus.engines.fastdeploy.queue import QueueFullError, QueueReceiver, QueueSender, Source

SECONDS = 0.01


def message(number: int, slots: int = 2, each: int = 1, columns: int = 1) -> Message:
    tokens = number + np.arange(slots * each * columns, dtype=np.int32).reshape(-1, columns)
    ranks = np.zeros(len(tokens), np.int32)
    return engine.message(3, *[each] * slots, tokens=tokens, scores=tokens.astype(np.float32), ranks=ranks)


def packed(given: Message, sequence: int, stamp: int, **changes: int) -> bytes:
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
    return ctypes.string_at(source.address, source.reading.bytes)


def sender_in(folder: Path, **overrides: object) -> QueueSender:
    return QueueSender(str(folder / "q"), settings_in(folder, **overrides).worker, SECONDS)


@pytest.fixture
def sender(folder: Path) -> Iterator[QueueSender]:
    with sending(sender_in(folder)) as made:
        yield made


@contextmanager
def sending(sender: QueueSender) -> Iterator[QueueSender]:
    try:
        yield sender
    finally:
        sender.close(0)


@contextmanager
def getting(folder: Path) -> Iterator[QueueReceiver]:
    receiver = QueueReceiver(str(folder / "q"))
    try:
        yield receiver
    finally:
        receiver.close()


@pytest.fixture
def receiver(folder: Path) -> Iterator[QueueReceiver]:
    with getting(folder) as made:
        yield made


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


def test_more_than_a_socket_holds(receiver: QueueReceiver, sender: QueueSender) -> None:
    for number in range(40):
        send(sender, message(number, 512, 6, 21), number)
    assert sender.waiting[0] == 40
    assert numbers(receiver, 40) == list(range(40))
    assert receiver.get(0.0, bytes_of) is None


@pytest.mark.parametrize("count", [3, 1000])
def test_what_is_saved_waits_for_a_get_side_and_is_got_once(count: int, folder: Path, sender: QueueSender) -> None:
    """However many were got and acknowledged, none of them comes again to the next get side (case 17)."""
    for number in range(count):
        send(sender, message(number), number)
    with getting(folder) as first:
        assert numbers(first, count - 1) == list(range(count - 1))
    with getting(folder) as second:
        assert numbers(second, 1) == [count - 1]
        send(sender, message(7), count)
        assert numbers(second, 1) == [7]
        assert sender.counts.connections == 2


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


def with_counts(kind: Kind, counts: list[int], tokens: int) -> bytes:
    """Return a message whose counts do not name as many tokens as it has."""
    given = message(1, tokens)
    given.kind, given.counts = kind, np.array(counts, np.int32)
    if not kind.is_scored:
        given.scores, given.ranks = given.scores[:0], given.ranks[:0]
    return packed(given, 1, 1)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 4,
        *(
            packed(message(1, 2, 2), 1, 1, **{name: value})
            for name, value in (
                *(("magic", 1), ("kind", 0), ("kind", 9), ("size", 41), ("size", 2**32 - 1), ("slots", 513)),
                *(("entries", 4000), ("columns", 22), ("columns", 0), ("columns", 65_535)),
            )
        ),
        *(with_counts(Kind.SPECULATED_SCORED, *given) for given in (([7, 1], 8), ([2, 2], 3))),
        *(with_counts(Kind.SPECULATED, *given) for given in (([6, 6], 2), ([100_000, 1], 2), ([-3, 1], 2))),
        *(with_counts(kind, [1, 1], 1) for kind in (Kind.SINGLE_SCORED, Kind.SINGLE)),
    ],
)
def test_bytes_that_are_no_message_end_their_connection_alone(
    data: bytes, folder: Path, receiver: QueueReceiver, sender: QueueSender
) -> None:
    """A header, and the counts behind it, are held against what a message can be before more is read (case 26)."""
    with socket.socket(socket.AF_UNIX) as other:
        other.connect(str(folder / "q"))
        other.sendall(data)
        send(sender, message(4), 2)
        assert numbers(receiver, 1) == [4]
        other.settimeout(MOST_SECONDS)
        with contextlib.suppress(ConnectionResetError):  # where its bytes were not all read
            assert other.recv(1) == b""


def test_get_that_waits_ends_with_the_get_side(folder: Path) -> None:
    receiver = QueueReceiver(str(folder / "q"))
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(receiver.get, None, bytes_of)
        receiver.close()
        with pytest.raises(RuntimeError, match="the get side was closed"):
            waiting.result(MOST_SECONDS)


def test_save_ends_with_the_save_side_and_not_at_its_timeout(folder: Path) -> None:
    sender = sender_in(folder, worker__retention_items=2, worker__block_timeout_ms=3_600_000)
    for number in range(2):
        send(sender, message(number), number)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(send, sender, message(2), 2)
        wait_until(lambda: sender.counts.blocked)
        sender.close(0)
        with pytest.raises(QueueFullError, match="closed"):
            waiting.result(MOST_SECONDS)
    with pytest.raises(QueueFullError, match="closed"):  # as of another thread
        send(sender, message(0), 0)


def test_oldest_of_several_is_next(receiver: QueueReceiver, folder: Path, sender: QueueSender) -> None:
    """Also of those that waited for a get side."""
    with sending(sender_in(folder)) as other:
        for stamp, saving in enumerate((sender, other, other, sender, other)):
            send(saving, message(stamp), stamp)
        assert numbers(receiver, 5) == [0, 1, 2, 3, 4]
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(3)]
        for stamp, connection in reversed([*enumerate(connections)]):
            connection.connect(str(folder / "q"))
            connection.sendall(packed(message(stamp), 1, stamp))
        assert numbers(receiver, 3) == [0, 1, 2]


def test_connection_that_breaks_is_not_tried_again_at_once(folder: Path) -> None:
    """A get side that accepts and closes costs a connection for each `bus.reconnect_ms`, and not one for each save."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "q"))
        listener.listen()
        with sending(QueueSender(str(folder / "q"), settings_in(folder).worker, 3600)) as sender:
            send(sender, message(0), 0)
            listener.accept()[0].close()
            for number in range(1, 4):
                send(sender, message(number, 512, 6, 21), number)
            assert sender.counts.connections == 1


def test_queue_that_is_not_reached_is_named(
    folder: Path, sender: QueueSender, caplog: pytest.LogCaptureFixture
) -> None:
    """Where nothing gets from it, and where its path cannot be connected to."""
    for number in range(200):
        send(sender, message(number), number)
    wait_until(lambda: "no process gets from the queue" in caplog.text)
    (folder / "q").symlink_to("q")
    send(sender, message(0), 0)
    wait_until(lambda: "queue cannot be reached" in caplog.text)
