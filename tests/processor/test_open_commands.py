"""OpenCommands: operators' commands through the processor, to one worker each, and what became of them back."""

from typing import Any

import pytest

from tests.in_process.bench import Bench, BenchClient, BenchWorker
from tests.processor.test_ownership import client_of
from tokenbus.bus import Role
from tokenbus_contracts.generated.client_pb2 import ClientFrame
from tokenbus_contracts.generated.control_pb2 import Control, ControlAnswer, DescribeEngine, EngineState
from tokenbus_contracts.generated.request_pb2 import RequestEvent
from tokenbus_contracts.generated.stream_pb2 import Goodbye, GoodbyeReason, WorkerFrame


def give(client: BenchClient, key: int, worker_id: str = "worker-0", **command: Any) -> None:  # noqa: ANN401
    control = Control(control_key=key, worker_id=worker_id, **(command or {"describe": DescribeEngine()}))
    client.say(ClientFrame(control=control))


def answer(worker: BenchWorker, key: int, error: str = "", state: EngineState | None = None) -> None:
    made = ControlAnswer(control_key=key, error=error, state=state)
    worker._event(RequestEvent(sequence=worker.sequence + 1, control_answer=made))


def commands(worker: BenchWorker) -> list[int]:
    return [frame.control.control_key for frame in worker.heard() if frame.HasField("control")]


def answers(client: BenchClient) -> dict[int, str]:
    return {
        heard.frame.control_answer.control_key: heard.frame.control_answer.error
        for heard in client.heard()
        if heard.body == "control_answer"
    }


def test_command_goes_to_its_worker_and_the_answer_to_who_gave_it() -> None:
    bench = Bench()
    first, second = bench.worker(takes_control=True), bench.worker("worker-1", takes_control=True)
    operator, other = bench.client(), bench.client(6)
    give(operator, 3, "worker-1")
    assert (commands(first), commands(second)) == ([], [3])
    answer(first, 3)  # of another worker's command
    assert answers(operator) == {}
    answer(second, 3, "no room")
    answer(second, 3, "twice")
    assert (answers(operator), answers(other)) == ({3: "no room"}, {})
    assert bench.core.clients.commands.answers == {("describe", "refused"): 1}
    assert bench.core.clients.commands._open == {}


def test_command_is_sent_again_until_it_is_answered() -> None:
    """Its worker knows those that it had; a client that asks again in the same life is answered once."""
    bench = Bench()
    worker, operator = bench.worker(takes_control=True), bench.client()
    give(operator, 3)
    give(operator, 3)
    assert commands(worker) == [3]
    worker.say_hello(takes_control=True)
    assert commands(worker) == [3]
    answer(worker, 3)
    worker.say_hello(takes_control=True, first_sequence=2, next_sequence=2)
    assert commands(worker) == []
    assert answers(operator) == {3: ""}


def test_lost_worker_and_client() -> None:
    bench = Bench()
    worker, operator, gone = bench.worker(takes_control=True), bench.client(), bench.client(6)
    give(operator, 3)
    give(gone, 4)
    gone.say(ClientFrame(goodbye=Goodbye(reason=GoodbyeReason.GOODBYE_REASON_STOPPED)))
    worker.say(WorkerFrame(goodbye=Goodbye(reason=GoodbyeReason.GOODBYE_REASON_STOPPED, message="stopped")))
    assert answers(operator) == {3: "worker worker-0 is gone, and may or may not have executed it: stopped"}
    assert len(bench.core.clients.commands) == 0


def test_what_cannot_be_passed_on_is_answered() -> None:
    bench = Bench()
    bench.worker(takes_control=True)
    bench.worker("worker-1")
    operator, other = bench.client(), bench.client(6)
    give(operator, 3, "nobody")
    assert answers(operator) == {3: "worker_id: a worker of this processor, got 'nobody'"}
    give(operator, 3, "worker-1")
    assert answers(operator) == {3: "worker worker-1: its engine must take commands, but it takes none"}
    for key in range(1, 65):
        give(operator, key)
    give(operator, 65)
    assert answers(operator) == {65: "commands that worker worker-0 has not answered: at most 64, got one more"}
    give(other, 64)
    assert answers(other) == {64: "control_key: one that is not in use, got another client's"}


def test_without_keys_commands_are_given_where_the_settings_say_so() -> None:
    bench = Bench({"gateway.control": False})
    worker, client = bench.worker(takes_control=True), bench.client()
    give(client, 3)
    assert answers(client) == {3: "commands not granted to a peer without a key, as gateway.control is false"}
    assert commands(worker) == []


@pytest.mark.parametrize("role", [Role.CLIENT, Role.OBSERVER, Role.OPERATOR])
def test_operators_alone_give_commands(role: Role) -> None:
    bench = Bench()
    worker = bench.worker(takes_control=True)
    client = client_of(bench, 5, "client", roles=frozenset({role}))
    client.heard()
    give(client, 3)
    may = role is Role.OPERATOR
    assert answers(client) == ({} if may else {3: "role operator: not granted to this key"})
    assert commands(worker) == ([3] if may else [])
    assert bench.core.clients.refusals == ({} if may else {"not_authorized": 1})
