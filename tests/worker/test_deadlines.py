"""What a worker sees to itself, whether a processor is there or not: a request's deadline, and whose tokens go on."""

from tests.in_process.builders import generate_of
from tests.worker.looped import Looped, batches
from tokenbus.engines.synthetic import SyntheticEngine
from tokenbus_contracts import RowStatus
from tokenbus_contracts.generated.request_pb2 import Continuation, ContinuationPolicy, ErrorCode, Generate

DEADLINE, INVALID = ErrorCode.ERROR_CODE_DEADLINE, ErrorCode.ERROR_CODE_INVALID_REQUEST
LONG = 100_000


class Worker(Looped[SyntheticEngine]):
    def __init__(self) -> None:
        super().__init__(SyntheticEngine())

    def asked(self, key: int, ms: int, max_tokens: int = LONG) -> Generate:
        return generate_of(key, max_tokens, deadline_unix_ms=self.clock.unix_ms() + ms)


def test_request_ends_at_its_moment_and_not_before() -> None:
    worker = Worker()
    worker.turn(worker.asked(1, 6000), worker.asked(2, 60_000), generate_of(3, LONG))
    worker.clock.advance(5.999)
    worker.turn()
    assert worker.errors() == {}
    worker.clock.advance(0.001)
    worker.turn()
    worker.turn()
    assert worker.errors() == {1: (DEADLINE, "its deadline came before its last token")}
    last = batches(worker.publisher)[-2:]
    statuses = {row.request_id: row.status for made in last for row in made.rows()}
    assert statuses == {1: RowStatus.UNRECOVERABLE, 2: RowStatus.ACTIVE, 3: RowStatus.ACTIVE}
    assert worker.publisher.session.requests.keys() == {2, 3}


def test_tokens_of_other_weights_are_not_continued() -> None:
    """The worker looks, too: its weights may change while a request is on its way to it."""
    worker = Looped(SyntheticEngine())
    worker.engine.weight_version = 2
    same = ContinuationPolicy.CONTINUATION_POLICY_SAME_WEIGHTS
    for key, version in ((1, 2), (2, 3)):
        continuation = Continuation(token_ids=[4], turn=1, weight_version=version)
        worker.turn(generate_of(key, 9, continuation_policy=same, continuation=continuation))
    assert worker.errors() == {2: (INVALID, "continuation.weight_version: the worker's, 2, got 3")}


def test_request_that_comes_too_late_does_not_begin() -> None:
    worker = Worker()
    late = worker.asked(1, 100)
    worker.clock.advance(0.25)
    worker.turn(late)
    assert worker.errors() == {1: (DEADLINE, "deadline_unix_ms: must be in the future, but it passed 150 ms ago")}
    assert not worker.engine.has_work
