"""Watchers: clients are shown streams as they are, as far as their windows allow."""

from zlib import crc32

from tests.in_process.bench import Bench, BenchClient
from tests.in_process.builders import BATCH, EVENT, encoded
from tests.processor.serving import serving
from tokenbus.testing import row_shapes
from tokenbus_contracts.generated.client_pb2 import ClientFrame, Watch


def watching(bench: Bench, worker_id: str = "", session: int = 6, **hello: int) -> BenchClient:
    client = bench.client(session, **hello)
    client.say(ClientFrame(watch=Watch(worker_id=worker_id)))
    return client


def seen(client: BenchClient) -> list[str]:
    found = []
    for heard in client.heard():
        if heard.body == "watched_stream":
            found.append(f"{heard.frame.watched_stream.hello.worker_id}/{heard.frame.watched_stream.epoch}")
        elif heard.body == "watched_item":
            found.append(str(heard.frame.watched_item.sequence))
    return found


def test_items_are_shown_as_they_came() -> None:
    bench, worker, client = serving(1)
    watcher = watching(bench)
    data = encoded(row_shapes([1]), 1)
    worker.item(data, 1)
    worker.admit(1)
    worker.item(b"new", 3, 77)
    messages = [parts for parts in bench.sent[watcher.peer] if len(parts) == 2]
    assert messages[0][1] == data
    items = [heard.frame.watched_item for heard in watcher.heard() if heard.body == "watched_item"]
    assert [(item.sequence, item.payload_kind) for item in items] == [(1, BATCH), (2, EVENT), (3, 77)]
    assert (items[0].payload_bytes, items[0].payload_crc32) == (len(data), crc32(data))
    assert len(client.outputs()) == 1


def test_streams_are_announced_without_secrets() -> None:
    bench = Bench()
    bench.worker(proof=b"p", request_ids=[4], model="m")
    watcher = bench.client(6)
    watcher.say(ClientFrame(watch=Watch()))
    (hello,) = [heard.frame.watched_stream.hello for heard in watcher.heard() if heard.body == "watched_stream"]
    assert (hello.proof, list(hello.request_ids), hello.model) == (b"", [], "m")


def test_only_what_is_watched_is_shown() -> None:
    bench = Bench()
    first = bench.worker("a")
    one, every = watching(bench, "a"), watching(bench, session=7)
    second = bench.worker("b")
    for worker in (second, first):
        worker.publish(row_shapes([1]))
    assert seen(one) == ["a/7", "1"]
    assert seen(every) == ["a/7", "b/7", "1", "a/7", "1"]
    first.say_hello(next_sequence=2)
    assert seen(one) == ["a/7"]
    assert seen(watching(bench, "b", session=8)) == ["b/7"]


def test_what_does_not_fit_into_the_window_is_left_out() -> None:
    """A watcher that does not ack misses items, as their sequences show, and delays no acknowledgement (case 20)."""
    bench = Bench()
    worker = bench.worker()
    watcher = watching(bench, window_frames=2)
    for _ in range(3):
        worker.admit(1)
    assert seen(watcher) == ["worker-0/7", "1"]
    assert bench.core.clients.watchers.skipped_items == 2
    watcher.ack()
    worker.admit(1)
    assert seen(watcher) == ["4"]
    bench.advance(0.0)
    assert worker.known.acknowledged == 4


def test_items_that_come_together_are_shown_while_frames_are_gathered() -> None:
    bench = Bench()
    worker = bench.worker()
    watcher = watching(bench)
    bench.core.clients.gather(bench.clock.now())
    for _ in range(3):
        worker.admit(1)
    bench.core.clients.send_gathered()
    assert seen(watcher) == ["worker-0/7", "1", "2", "3"]
    assert bench.core.clients.watchers.skipped_items == 0


def test_watchers_acknowledge_independently() -> None:
    """The frame that announces a stream to several watchers has a number of its own in each of their connections."""
    bench = Bench()
    worker = bench.worker()
    first, second = watching(bench, window_frames=2), watching(bench, session=7)
    worker.admit(1)
    seen(first)
    first.ack()
    first.reconnect(window_frames=2)
    worker.say_hello(next_sequence=2)
    for sequence in ("2", "3"):
        seen(first)
        first.ack()
        worker.admit(1)
        assert seen(first) == [sequence]
    assert seen(second) == ["worker-0/7", "1", "worker-0/7", "2", "3"]
