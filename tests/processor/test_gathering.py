"""Gathering: frames of several steps leave together, soon, and none later than the bounds on what waits allow."""

from tests.in_process.bench import Bench, BenchClient, BenchWorker
from tests.in_process.builders import generate_of
from tests.processor.serving import places, serving
from tokenbus.testing import row_shapes
from tokenbus_contracts.generated.request_pb2 import ErrorCode


def gathering(**overrides: object) -> tuple[Bench, BenchWorker, BenchClient, BenchClient]:
    """Return a worker with a request of each of two clients, whose frames are gathered from now on."""
    bench, worker, client = serving(1, **overrides)
    other = bench.client(6, name="other")
    other.ask(generate_of(2))
    for peer in (client, other):
        peer.heard()
    bench.core.clients.gather(bench.clock.now())
    return bench, worker, client, other


def test_frames_of_several_steps_leave_together() -> None:
    bench, worker, client, other = gathering()
    for position in range(3):
        worker.publish(row_shapes([1, 2], position=position))
    assert not client.heard()
    assert not other.heard()
    bench.core.clients.send_gathered()
    assert places(client) == [(1, position, 1) for position in range(3)]
    assert places(other) == [(2, position, 1) for position in range(3)]
    worker.publish(row_shapes([1, 2], position=3))
    assert places(client) == [(1, 3, 1)], "gathered, though gather was not called"


def test_frames_are_gathered_for_a_millisecond() -> None:
    bench, worker, client, _ = gathering()
    worker.publish(row_shapes([1, 2]))
    bench.clock.advance(0.0009)
    bench.core.clients.gather(bench.clock.now())
    assert not client.heard()
    bench.clock.advance(0.0002)
    bench.core.clients.gather(bench.clock.now())
    assert places(client) == [(1, 0, 1)]


def test_too_much_is_seen_at_once() -> None:
    bench, worker, client, _ = gathering(clients__send_queue_frames=16)
    for position in range(17):
        assert not bench.core.clients.evicted
        worker.publish(row_shapes([1], position=position))
    assert bench.core.clients.evicted == 1
    assert client.errors() == {1: ErrorCode.ERROR_CODE_SLOW_CLIENT}
