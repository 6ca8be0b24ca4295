"""Tickets: which hand-offs a decode worker accepts, each once."""

import secrets
from collections import OrderedDict
from dataclasses import dataclass

from tokenbus_contracts import ContractError, Rule
from tokenbus_contracts.generated.handoff_pb2 import Handoff
from tokenbus_services.bus import Identity
from tokenbus_services.clock import Clock
from tokenbus_services.handoff_tickets import KEY_BYTES, is_ticket_for

_MOST_USES = 32_768
_CLOCKS_DIFFER_MS = 10_000
"""How far the processor's clock may be behind this one's."""


@dataclass(slots=True)
class Use:
    """What became of a ticket."""

    number: int
    """The hand-off that used it; zero: none, it is void."""
    answer: str | None = None
    """The answer to that; None: the engine has not given it."""


class Tickets:
    """The tickets for one life of a decode worker: they end with it, as its key is drawn anew in each."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.key = secrets.token_bytes(KEY_BYTES)
        self.of_this_life = secrets.token_bytes(KEY_BYTES)
        """One ticket for all requests: a processor of 0.1 gives it to its prefill workers, a later one to none."""
        self._uses: OrderedDict[bytes, Use] = OrderedDict()

    def check(self, handoff: Handoff, identity: Identity) -> None:
        """Raise ContractError for a hand-off whose ticket was not made for it, or has expired with its request."""
        ticket, generate = handoff.ticket, handoff.generate
        if secrets.compare_digest(ticket, self.of_this_life):
            return
        if not is_ticket_for(ticket, self.key, generate, handoff.worker_id, identity):
            raise ContractError("handoff.ticket", "the one for this request and prefill worker", "another")
        oldest = self._clock.unix_ms() - _CLOCKS_DIFFER_MS
        if generate.deadline_unix_ms < oldest:
            raise ContractError("generate.deadline_unix_ms", oldest, generate.deadline_unix_ms, rule=Rule.MIN)

    def use_of(self, handoff: Handoff) -> Use | None:
        """Return what became of a hand-off's ticket before; None: nothing yet."""
        return self._uses.get(self._name(handoff))

    def use(self, handoff: Handoff) -> Use:
        """Note that a hand-off uses its ticket, and return where its answer goes."""
        return self._keep(self._name(handoff), Use(handoff.number))

    def void(self, ticket: bytes) -> None:
        """Accept no hand-off with a ticket any more; one that has used it stays."""
        self._keep(ticket, Use(0))

    def _keep(self, name: bytes, use: Use) -> Use:
        kept = self._uses.setdefault(name, use)
        # Where that many came after it, a ticket can be used again for its request; its processor then ends that.
        while len(self._uses) > _MOST_USES:
            self._uses.popitem(last=False)
        return kept

    def _name(self, handoff: Handoff) -> bytes:
        """Return what a use is remembered under: the ticket, with the hand-off's number if it is the one for all."""
        is_for_all = handoff.ticket == self.of_this_life
        return handoff.ticket + (handoff.number.to_bytes(8, "little") if is_for_all else b"")
