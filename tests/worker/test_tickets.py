"""Tickets for hand-offs: each is for one request and one prefill worker, until the request's deadline."""

import pytest

from tests.in_process.builders import generate_of
from tokenbus.bus import Identity, Role, handoff_tickets
from tokenbus.bus.handoff_tickets import Tickets, new_ticket
from tokenbus.bus.transport import ANONYMOUS
from tokenbus.testing import ManualClock
from tokenbus_contracts import ContractError
from tokenbus_contracts.generated.handoff_pb2 import Handoff
from tokenbus_contracts.generated.request_pb2 import Generate

OWNER, LASTS_MS = 3, 60_000
ROLES = frozenset({Role.HANDOFF})
KEYED, OTHER_KEY = (Identity("gpu", ROLES, key=key) for key in ("a" * 40, "b" * 40))


def given(clock: ManualClock, key: int = 1, **fields: int) -> Generate:
    return generate_of(key, owner=OWNER, deadline_unix_ms=clock.unix_ms() + LASTS_MS, **fields)


def shown(mine: Tickets, clock: ManualClock, identity: Identity = ANONYMOUS) -> Handoff:
    """Return the hand-off of a request, with the ticket that was made for it and for the worker `prefill-0`."""
    generate = given(clock)
    ticket = new_ticket(mine.key, generate, "prefill-0", identity)
    return Handoff(worker_id="prefill-0", generate=generate, ticket=ticket, number=5)


def test_ticket_for_the_request_and_the_worker_is_good() -> None:
    """A hand-off shows the ticket that was made for it, as often as it is sent; two tickets of a request differ."""
    clock = ManualClock()
    mine = Tickets(clock)
    handoff = shown(mine, clock)
    for _ in range(2):
        mine.check(handoff, ANONYMOUS)
    assert len(handoff.ticket) <= 64
    assert shown(mine, clock).ticket != handoff.ticket


@pytest.mark.parametrize(
    "changed",
    [
        {"request_key": 2}, {"owner": 4}, {"deadline_unix_ms": 9_000_000_000_000}, {"worker_id": "prefill-1"},
        {"ticket": "none"}, {"ticket": "shorter"}, {"ticket": "head alone"}, {"ticket": "another bit"},
        {"ticket": "another life"}, {"ticket": "made without the key"},
    ],
    ids=str,
)  # fmt: skip
def test_ticket_for_anything_else_is_refused(changed: dict[str, object]) -> None:
    clock = ManualClock()
    mine = Tickets(clock)
    handoff = shown(mine, clock)
    ticket = handoff.ticket
    forged = {
        "none": b"",
        "shorter": ticket[:-1],
        "head alone": ticket[:32],
        "another bit": bytes([ticket[0] ^ 1]) + ticket[1:],
        "another life": shown(Tickets(clock), clock).ticket,
        "made without the key": new_ticket(b"", handoff.generate, "prefill-0", ANONYMOUS),
    }
    for name, value in changed.items():
        if name == "ticket":
            handoff.ticket = forged[str(value)]
        else:
            setattr(handoff if name == "worker_id" else handoff.generate, name, value)
    with pytest.raises(
        ContractError, match=r"^handoff\.ticket: the one for this request and prefill worker, got another$"
    ):
        mine.check(handoff, ANONYMOUS)


@pytest.mark.parametrize(
    ("made_for", "by", "is_good"),
    [
        (KEYED, KEYED, True),
        (KEYED, OTHER_KEY, False),
        (KEYED, ANONYMOUS, True),
        (ANONYMOUS, KEYED, True),
    ],
)
def test_ticket_is_bound_to_what_its_worker_proved(made_for: Identity, by: Identity, is_good: bool) -> None:  # noqa: FBT001
    clock = ManualClock()
    mine = Tickets(clock)
    handoff = shown(mine, clock, made_for)
    if is_good:
        mine.check(handoff, by)
        return
    with pytest.raises(ContractError, match=r"^handoff\.ticket"):
        mine.check(handoff, by)


def test_ticket_ends_with_its_request() -> None:
    """A ticket is refused after the request's deadline; clocks may differ by some seconds."""
    clock = ManualClock()
    mine = Tickets(clock)
    handoff = shown(mine, clock)
    clock.advance(LASTS_MS / 1000 + 10)
    mine.check(handoff, ANONYMOUS)
    clock.advance(0.01)
    with pytest.raises(ContractError, match=r"^generate\.deadline_unix_ms: at least \d+, got \d+$"):
        mine.check(handoff, ANONYMOUS)


def test_what_is_remembered_of_tickets_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses and voids are remembered up to a number; a use that is voided later stays, and keeps its answer."""
    monkeypatch.setattr(handoff_tickets, "_MOST_USES", 3)
    clock = ManualClock()
    mine = Tickets(clock)
    handoffs = [shown(mine, clock) for _ in range(4)]
    used = mine.use(handoffs[0])
    mine.void(handoffs[0].ticket)
    assert mine.use_of(handoffs[0]) is used
    for handoff in handoffs[1:]:
        mine.void(handoff.ticket)
    known = [mine.use_of(handoff) for handoff in handoffs]
    assert [use and use.number for use in known] == [None, 0, 0, 0]
