"""Ownership: requests and sessions belong to the client that began them and to its next life, not to other clients."""

import pytest

from tests.in_process.bench import Bench, BenchClient
from tests.in_process.builders import client_hello, generate_of
from tests.processor.serving import places, resume, serving
from tokenbus.bus import Identity, Outcome, Role
from tokenbus.processor.client_connections import owner_of
from tokenbus.testing import RowShape, row_shapes
from tokenbus_contracts import BatchKind, RowStatus
from tokenbus_contracts.generated.client_pb2 import ClientFrame, Ended, Watch
from tokenbus_contracts.generated.request_pb2 import Abort, ErrorCode, RequestError
from tokenbus_contracts.generated.stream_pb2 import RefusalReason

FINISHED = RowStatus.FINISHED_LENGTH
UNKNOWN = ErrorCode.ERROR_CODE_UNKNOWN_REQUEST
TAKEN_UP = ErrorCode.ERROR_CODE_TAKEN_UP
ALL = frozenset(Role)
UNPROVEN = Identity("", ALL)


def client_of(bench: Bench, session: int, key: str, name: str = "client", roles: frozenset[Role] = ALL) -> BenchClient:
    client = BenchClient(bench, session)
    bench.peers.identities[client.peer] = Identity(key, roles)
    client.say_hello(name=name)
    return client


@pytest.mark.parametrize("name", ["client", "other"])
def test_request_of_a_live_client_cannot_be_taken_without_a_key(name: str) -> None:
    bench, worker, client = serving(1)
    thief = bench.client(6, name=name)
    resume(thief, 1, 0)
    bench.clock.advance(0.1)
    client.beat()
    bench.advance(0.1)
    assert thief.errors() == {1: UNKNOWN}
    worker.publish(row_shapes([1]))
    assert places(client) == [(1, 0, 1)]
    assert places(thief) == []
    assert bench.core.registry.counts.refused_resumes == 1


def test_next_life_takes_up_what_a_silent_one_left() -> None:
    bench, worker, client = serving(1)
    worker.publish(row_shapes([1]))
    bench.clock.advance(0.5)
    again = bench.client(6)
    resume(again, 1, 0)
    assert again.outputs() == []
    bench.pass_time(3.0, worker, again, most=0.5)
    assert places(again) == [(1, 0, 1)]
    client.reconnect()
    assert client.errors() == {1: TAKEN_UP}


def test_request_that_ends_while_its_next_life_waits_is_given_once() -> None:
    bench, worker, client = serving(1)
    again = bench.client(6)
    resume(again, 1, 0)
    worker.publish([RowShape(1, 0, 1, FINISHED)])
    bench.pass_time(1.0, worker, client, again, most=0.1)
    assert places(again) == [(1, 0, 1)]


def test_other_name_never_has_it() -> None:
    bench, worker, client = serving(1)
    bench.outcomes[client.peer] = Outcome.GONE
    thief = bench.client(6, name="other")
    resume(thief, 1, 0)
    assert thief.errors() == {1: UNKNOWN}
    worker.publish(row_shapes([1]))
    assert places(thief) == []


def test_key_proves_whose_a_request_is() -> None:
    bench = Bench()
    worker = bench.worker()
    first = client_of(bench, 5, "team-a", name="x")
    first.ask(generate_of(1))
    thief = client_of(bench, 6, "team-b", name="x")
    resume(thief, 1, 0)
    assert thief.errors() == {1: UNKNOWN}
    second = client_of(bench, 7, "team-a", name="y")
    worker.publish(row_shapes([1]))
    resume(second, 1, 0)
    assert places(second) == [(1, 0, 1)]
    assert first.errors() == {1: TAKEN_UP}


@pytest.mark.parametrize(
    ("owner", "other", "is_aborted"),
    [
        (("team-a", "x"), ("team-a", "y"), True),
        (("team-a", "x"), ("team-b", "x"), False),
        (("", "x"), ("", "x"), True),
        (("", "x"), ("", "y"), False),
        (("", "x"), ("x", "x"), False),
    ],
)
def test_request_is_aborted_by_any_session_of_its_owner(
    owner: tuple[str, str],
    other: tuple[str, str],
    is_aborted: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    """Owner is who has the key, or without keys who has the name; it hears of the end where it asked."""
    bench = Bench()
    worker = bench.worker()
    first = client_of(bench, 5, *owner)
    first.ask(generate_of(1))
    worker.heard()
    client_of(bench, 6, *other).say(ClientFrame(abort=Abort(request_id=1)))
    assert worker.heard_bodies() == (["abort"] if is_aborted else [])
    worker.publish([RowShape(1, 0, 0, RowStatus.ABORTED)])
    assert places(first) == [(1, 0, 0)]


@pytest.mark.parametrize("thief_first", [False, True])
def test_restarted_processor_knows_owners_from_workers(*, thief_first: bool) -> None:
    bench = Bench()
    owner, thief = bench.client(5, name="owner"), bench.client(6, name="thief")
    if thief_first:
        resume(thief, 1, 0)
        resume(owner, 1, 0)
    worker = bench.worker(request_ids=[1], request_owners=[owner_of(UNPROVEN, "owner")])
    if not thief_first:
        resume(thief, 1, 0)
        resume(owner, 1, 0)
    bench.advance(0.1)
    worker.publish(row_shapes([1]))
    assert thief.errors() == {1: UNKNOWN}
    assert places(owner) == [(1, 0, 1)]


@pytest.mark.parametrize("thief_first", [False, True])
def test_request_of_another_has_not_ended_because_a_client_says_so(*, thief_first: bool) -> None:
    bench = Bench()
    owner, thief = bench.client(5, name="owner"), bench.client(6, name="thief")
    if thief_first:
        thief.say(ClientFrame(ended=Ended(request_ids=[1])))
    worker = bench.worker(request_ids=[1], request_owners=[owner_of(UNPROVEN, "owner")], next_sequence=2)
    worker.sequence = 0  # it sends again what it retained
    if not thief_first:
        thief.say(ClientFrame(ended=Ended(request_ids=[1])))
    worker.publish(row_shapes([1]))
    thief.say(ClientFrame(ended=Ended(request_ids=[1])))
    assert "abort" not in worker.heard_bodies()
    resume(owner, 1, 0)
    assert places(owner) == [(1, 0, 1)]


def test_request_that_is_read_has_not_ended_because_another_session_says_so() -> None:
    bench = Bench()
    worker, reader, other = bench.worker(), bench.client(5, name="app"), bench.client(6, name="app")
    reader.ask(generate_of(1))
    worker.publish(row_shapes([1]))
    worker.heard()
    other.say(ClientFrame(ended=Ended(request_ids=[1])))
    assert "abort" not in worker.heard_bodies()
    worker.publish(row_shapes([1], position=1))
    assert places(reader) == [(1, 0, 1), (1, 1, 1)]


def test_worker_ends_a_request_that_has_ended_at_its_client() -> None:
    """After a restart it may still generate for it, as where the client closed it while no processor was there."""
    bench = Bench()
    client = bench.client(5, name="owner")
    client.say(ClientFrame(ended=Ended(request_ids=[1])))
    mine = owner_of(UNPROVEN, "owner")
    worker = bench.worker(request_ids=[1, 2], request_owners=[mine, mine])
    for _ in range(2):
        client.say(ClientFrame(ended=Ended(request_ids=[1, 2])))
    assert [frame.abort.request_id for frame in worker.heard() if frame.HasField("abort")] == [1, 2]


def test_request_that_no_worker_has_is_unknown_once_all_are_back() -> None:
    bench = Bench({"processor.replay_timeout_ms": 60_000})
    worker, client = bench.worker(request_ids=[1], first_sequence=3, next_sequence=5), bench.client()
    for key in (1, 2, 3):
        resume(client, key, 0)
    bench.pass_time(4.0, worker, client)
    assert client.errors() == {}
    worker.sequence = 2
    worker.publish([RowShape(3, 0, 1, FINISHED)])
    worker.publish([RowShape(1, 0, 1)])
    bench.pass_time(0.2, worker, client)
    assert client.errors() == {2: UNKNOWN}
    client.ask(generate_of(2))
    assert "generate" in worker.heard_bodies()


def test_resumed_request_whose_last_row_waits_for_its_draft_is_not_unknown() -> None:
    bench = Bench({"processor.replay_timeout_ms": 60_000, "processor.step_timeout_ms": 60_000})
    worker, client = bench.worker(next_sequence=2), bench.client()
    worker.sequence = 0
    for key in (1, 2):
        resume(client, key, 0)
    worker.publish([RowShape(1, 0, 1, FINISHED)], step=1, draft_follows=True)
    worker.publish([RowShape(3, 0, 1)], step=2)
    bench.pass_time(4.0, worker, client)
    assert client.errors() == {2: UNKNOWN}
    worker.publish([RowShape(1, 0, 1)], step=1, kind=BatchKind.DRAFT)
    assert places(client) == [(1, 0, 1)]


def test_workers_are_given_the_owner() -> None:
    bench, worker, client = serving()
    client.ask(generate_of(1, owner=7, deadline_ms=2000))
    (generate,) = [frame.generate for frame in worker.heard() if frame.HasField("generate")]
    assert generate.owner == owner_of(UNPROVEN, "client")
    assert generate.deadline_unix_ms == bench.clock.unix_ms() + 2000


@pytest.mark.parametrize("proof", [b"", b"guessed"])
def test_session_number_is_no_credential(proof: bytes) -> None:
    bench, worker, client = serving(1)
    for is_away in (False, True):
        if is_away:
            bench.pass_time(3.5, worker)
        thief = BenchClient(bench, 5)
        thief.peer = b"thief"
        thief.say(ClientFrame(hello=client_hello(5, proof=proof)))
        assert thief.heard()[0].frame.refusal.reason == RefusalReason.REFUSAL_REASON_SESSION_TAKEN
    client.reconnect()
    worker.publish(row_shapes([1]))
    assert places(client) == [(1, 0, 1)]


def test_roles_are_asked_for() -> None:
    bench = Bench()
    worker = bench.worker()
    observer = client_of(bench, 5, "grafana", roles=frozenset({Role.OBSERVER}))
    asker = client_of(bench, 6, "app", roles=frozenset({Role.CLIENT}))
    worker.heard()
    for client in (observer, asker):
        client.heard()
    observer.ask(generate_of(1))
    resume(observer, 2, 0)
    observer.say(ClientFrame(ended=Ended(request_ids=[3])))
    assert not bench.core.registry.table.knows(3)
    asker.say(ClientFrame(watch=Watch()))
    for client in (observer, asker):
        assert {heard.frame.refusal.reason for heard in client.heard()} == {RefusalReason.REFUSAL_REASON_NOT_AUTHORIZED}
    assert worker.heard_bodies() == []
    assert len(bench.core.clients.watchers) == 0
    other = client_of(bench, 7, "worker-key", roles=frozenset({Role.WORKER}))
    assert other.heard()[0].frame.refusal.message == "key worker-key may not be client client"


def test_observer_may_have_any_name() -> None:
    bench = Bench()
    client = BenchClient(bench, 5)
    bench.peers.identities[client.peer] = Identity("grafana", frozenset({Role.OBSERVER}), ("grafana",))
    client.say_hello(name="client")
    client.say(ClientFrame(watch=Watch()))
    assert [heard.body for heard in client.heard()] == ["welcome"]
    assert len(bench.core.clients.watchers) == 1


def test_connection_is_one_session() -> None:
    bench = Bench()
    client = bench.client(5)
    client.heard()
    client.say(ClientFrame(hello=client_hello(6)))
    assert client.heard()[0].frame.refusal.message == "hello.session: one session for each connection"
    assert set(bench.core.clients.sessions) == {5}


def test_deadline_survives_a_restart() -> None:
    bench = Bench()
    worker = bench.worker(request_ids=[1], request_owners=[owner_of(UNPROVEN, "client")])
    client = bench.client()
    resume(client, 1, 0, deadline_unix_ms=bench.clock.unix_ms() + 4000)
    bench.pass_time(3.5, worker, client)
    assert client.errors() == {}
    bench.pass_time(1.0, worker, client)
    assert client.errors() == {1: ErrorCode.ERROR_CODE_DEADLINE}


@pytest.mark.parametrize("later", [0, 60_000])
def test_resume_moves_no_deadline(later: int) -> None:
    bench, worker, client = serving()
    client.ask(generate_of(1, deadline_unix_ms=bench.clock.unix_ms() + 2000))
    bench.outcomes[client.peer] = Outcome.GONE
    again = bench.client(6)
    resume(again, 1, 0, deadline_unix_ms=later and bench.clock.unix_ms() + later)
    bench.pass_time(1.9, worker, again, most=0.1)
    assert again.errors() == {}
    bench.pass_time(0.2, worker, again, most=0.1)
    assert again.errors() == {1: ErrorCode.ERROR_CODE_DEADLINE}


def test_admission_tells_the_deadline() -> None:
    bench, worker, client = serving(processor__request_timeout_ms=5000)
    client.ask(generate_of(1, deadline_unix_ms=2**64 - 1))
    worker.admit(1)
    (admitted,) = [heard.frame.admitted for heard in client.heard() if heard.body == "admitted"]
    assert admitted.deadline_unix_ms == bench.clock.unix_ms() + 5000


def test_proof_without_the_owners_key_takes_no_session() -> None:
    bench = Bench()
    owner = client_of(bench, 5, "team-a")
    owner.heard()
    for key, name in (("team-b", "client"), ("", "client"), ("", "other")):
        thief = BenchClient(bench, 5)
        thief.peer = f"thief {key} {name}".encode()
        bench.peers.identities[thief.peer] = Identity(key, ALL)
        thief.say_hello(name=name)
        assert [heard.frame.refusal.reason for heard in thief.heard()] == [RefusalReason.REFUSAL_REASON_SESSION_TAKEN]
    owner.say_hello()
    assert [heard.body for heard in owner.heard()] == ["welcome"]


@pytest.mark.parametrize("is_error", [False, True])
def test_how_a_request_ended_is_its_owners_alone(*, is_error: bool) -> None:
    bench, worker, client = serving(1, 2)
    thief = bench.client(6, name="other")
    resume(thief, 2, 0)
    (unknown,) = [heard.frame.error for heard in thief.heard() if heard.body == "error"]
    if is_error:
        error = RequestError(request_id=1, code=ErrorCode.ERROR_CODE_INTERNAL, message="it failed", emitted_tokens=0)
        worker.fail(error)
    else:
        worker.publish([RowShape(1, 0, 3, FINISHED)])
    assert client.heard()
    client.ack()
    resume(thief, 1, 0)
    (answer,) = [heard.frame.error for heard in thief.heard() if heard.body == "error"]
    unknown.request_id = 1
    assert answer == unknown
    resume(client, 1, 0)
    assert client.errors() == {1: ErrorCode.ERROR_CODE_INTERNAL if is_error else UNKNOWN}


def test_worker_spoils_no_request_of_another_worker() -> None:
    bench, worker, client = serving(1)
    client.heard()
    assert [frame.generate.request_id for frame in worker.heard() if frame.HasField("generate")] == [1]
    liar = bench.worker("worker-1")
    liar.publish(row_shapes([1]))
    liar.publish([RowShape(1, 0, 1, FINISHED)])
    liar.fail(RequestError(request_id=1, code=ErrorCode.ERROR_CODE_INTERNAL, message="forged"))
    assert client.heard() == []
    worker.publish([RowShape(1, 0, 2)])
    worker.publish([RowShape(1, 2, 1, FINISHED)])
    assert places(client) == [(1, 0, 2), (1, 2, 1)]
