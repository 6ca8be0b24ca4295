"""What the state machines of `test_state_machine.py` found, each in as few steps as show it."""

from dataclasses import replace

from tests.in_process.world import Shape, Wish, World
from tokenbus_contracts import RowStatus
from tokenbus_contracts.generated.request_pb2 import ErrorCode

_WISH = Wish(client=0, max_tokens=7, top_logprobs=2, drafts=True)


def world_of(shape: Shape | None = None, **settings: object) -> World:
    chosen = shape or Shape()
    keys = {name.replace("__", "."): value for name, value in settings.items()}
    world = World(replace(chosen, settings=keys))
    world.flush()
    return world


def assert_all_well(world: World) -> None:
    world.settle()
    world.check_ends()
    assert [(asked.key, asked.status, asked.error) for asked in world.asked] == [
        (asked.key, RowStatus.FINISHED_LENGTH, None) for asked in world.asked
    ]


def test_a_worker_forgets_a_request_that_ended_for_want_of_room() -> None:
    world = world_of(worker__policy="fail", worker__retention_items=3)
    world.ask(Wish(client=0, max_tokens=3, top_logprobs=None, drafts=False))
    world.ask(Wish(client=0, max_tokens=9, top_logprobs=None, drafts=False))
    world.flush()
    world.workers[0].turn()
    world.settle()
    assert not world.workers[0].publisher.session.requests
    assert {asked.error and asked.error.code for asked in world.asked} == {ErrorCode.ERROR_CODE_GAP}


def test_a_request_that_waits_for_a_worker_gets_the_first_free_place() -> None:
    """After a restart a request may find every worker full: it waits for one to be free, not for one to come."""
    world = World(Shape({"worker.max_requests": 1}))
    for _ in range(2):
        world.ask(_WISH)
    assert_all_well(world)


def test_a_request_that_was_asked_for_before_a_restart_goes_to_one_worker() -> None:
    world = world_of(Shape(workers=2))
    world.ask(_WISH)
    world.flush()
    holder = next(worker for worker in world.workers if len(worker.publisher.incoming))
    holder.is_paused = True
    world.restart_processor(keeps_unsent=False)
    world.pass_time(1.5, carries=True)
    other = next(worker for worker in world.workers if worker is not holder)
    assert len(other.publisher.incoming) == 0
    assert_all_well(world)


def test_rows_of_a_request_that_ended_unclaimed_hold_nothing_back() -> None:
    world = world_of(processor__pending_items=6)
    world.ask(Wish(client=0, max_tokens=40, top_logprobs=None, drafts=False))
    world.flush()
    world.turn(0)
    world.flush()
    world.pass_time(0.5, carries=True)
    world.restart_processor(keeps_unsent=False)
    world.clients[0].node.is_paused = True
    for _ in range(20):
        world.turn(0)
        world.flush()
    world.settle()
    assert world.unsettled() == []


def test_credit_and_acknowledgements_that_were_lost_come_again() -> None:
    world = world_of(processor__credit_items=4, worker__retention_items=6, bus__heartbeat_timeout_ms=60_000)
    world.ask(Wish(client=0, max_tokens=30, top_logprobs=None, drafts=False))
    world.flush()
    worker = world.workers[0]
    for _ in range(6):
        world.turn(0)
        while world.deliver_up(worker) or world.deliver_up(world.clients[0].node) or world.clients[0].node.receive():
            worker.wire.down.clear()
    assert_all_well(world)


def test_a_resume_that_was_lost_with_its_connection_is_repeated() -> None:
    """A processor that knows a session again may have missed its resume: the client repeats it until it is answered."""
    world = world_of()
    world.ask(_WISH)
    world.work(1)
    world.flush()
    world.restart_processor(keeps_unsent=False)
    client = world.clients[0]
    world.pass_time(1.2, carries=False)
    while client.node.wire.down or client.node.wire.up:  # up to the welcome, and what the client says then is lost
        world.deliver_up(client.node)
        client.node.receive()
        if client.node.session.handshakes == 2:
            break
    client.node.reconnect(keeps_unsent=False)
    assert_all_well(world)


def test_two_lives_of_a_client_resume_at_once() -> None:
    """The later one gets all that is on its way, whichever of the earlier ones it was on its way to."""
    world = world_of(client__window_frames=1)
    world.ask(_WISH)
    world.work(1)
    world.flush()
    world.stir(carries_up=True)
    world.restart_client(0)
    first = world.clients[0]
    world.deliver_up(first.node)  # its hello
    first.node.receive()
    while world.deliver_up(first.node):  # its resume, which waits for the event loop's next turn
        pass
    world.restart_client(0)
    second = world.clients[0]
    world.deliver_up(second.node)
    second.node.receive()
    while world.deliver_up(second.node):
        pass
    assert_all_well(world)


def test_a_step_that_waits_for_its_draft_is_given_up_in_time() -> None:
    """Steps that wait for what was dropped end by time, even where they are all that may be held."""
    world = world_of(Shape(drafts=True), processor__pending_items=2, worker__policy="fail", worker__retention_items=3)
    world.ask(Wish(client=0, max_tokens=9, top_logprobs=None, drafts=False))
    world.flush()
    world.workers[0].turn()  # the event, the target, and no room for the draft
    world.settle()
    assert world.unsettled() == []
