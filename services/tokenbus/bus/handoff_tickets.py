"""Hand-off tickets: a processor gives a prefill worker one for each request, and a decode worker takes each once.

A ticket is something random, what stands for the prefill worker's key, and a MAC over both, the request and the prefill
worker's id. The MAC's key is the secret in the decode worker's hello: any processor can make tickets, and the decode
worker can check them after that processor has gone.
"""

import hmac
import secrets
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from struct import pack

from tokenbus.bus import Identity
from tokenbus.clock import Clock
from tokenbus_contracts import ContractError, Rule
from tokenbus_contracts.generated.handoff_pb2 import Handoff
from tokenbus_contracts.generated.request_pb2 import Generate

KEY_BYTES = 32
_RANDOM_BYTES = 16
_HOLDER_BYTES = 16
_NO_KEY = bytes(_HOLDER_BYTES)
_HEAD_BYTES = _RANDOM_BYTES + _HOLDER_BYTES
_MAC_BYTES = 32
_MOST_USES = 32_768
_CLOCKS_DIFFER_MS = 10_000
"""How far the processor's clock may be behind this one's."""


def new_ticket(key: bytes, generate: Generate, worker_id: str, identity: Identity) -> bytes:
    """Return a ticket for a request, for the prefill worker that it is given to and what that worker proved."""
    return _sealed(key, secrets.token_bytes(_RANDOM_BYTES) + _holder(identity), generate, worker_id)


def is_ticket_for(ticket: bytes, key: bytes, generate: Generate, worker_id: str, identity: Identity) -> bool:
    """Tell whether a ticket was made with a key, for this request and this prefill worker."""
    head = ticket[:_HEAD_BYTES]
    is_genuine = hmac.compare_digest(ticket, _sealed(key, head, generate, worker_id))
    return is_genuine and _is_same(head[_RANDOM_BYTES:], _holder(identity))


def _sealed(key: bytes, head: bytes, generate: Generate, worker_id: str) -> bytes:
    request = pack("<QQQ", generate.request_key, generate.owner, generate.deadline_unix_ms)
    return head + blake2b(head + request + worker_id.encode(), key=key, digest_size=_MAC_BYTES).digest()


def _holder(identity: Identity) -> bytes:
    """Return a hash of a peer's key, or `_NO_KEY`."""
    return blake2b(identity.key.encode(), digest_size=_HOLDER_BYTES).digest() if identity.key else _NO_KEY


def _is_same(holder: bytes, shown: bytes) -> bool:
    """Tell whether two are one peer; one that has a key over tcp here may have none over ipc there."""
    return holder == shown or _NO_KEY in (holder, shown)


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
        self._uses: OrderedDict[bytes, Use] = OrderedDict()

    def check(self, handoff: Handoff, identity: Identity) -> None:
        """Raise ContractError for a hand-off whose ticket was not made for it, or has expired with its request."""
        generate = handoff.generate
        if not is_ticket_for(handoff.ticket, self.key, generate, handoff.worker_id, identity):
            raise ContractError("handoff.ticket", "the one for this request and prefill worker", "another")
        oldest = self._clock.unix_ms() - _CLOCKS_DIFFER_MS
        if generate.deadline_unix_ms < oldest:
            raise ContractError("generate.deadline_unix_ms", oldest, generate.deadline_unix_ms, rule=Rule.MIN)

    def use_of(self, handoff: Handoff) -> Use | None:
        """Return what became of a hand-off's ticket before; None: nothing yet."""
        return self._uses.get(handoff.ticket)

    def use(self, handoff: Handoff) -> Use:
        """Note that a hand-off uses its ticket, and return where its answer goes."""
        return self._keep(handoff.ticket, Use(handoff.number))

    def void(self, ticket: bytes) -> None:
        """Accept no hand-off with a ticket any more; one that has used it stays."""
        self._keep(ticket, Use(0))

    def _keep(self, ticket: bytes, use: Use) -> Use:
        kept = self._uses.setdefault(ticket, use)
        # Where that many came after it, a ticket can be used again for its request; its processor then ends that.
        while len(self._uses) > _MOST_USES:
            self._uses.popitem(last=False)
        return kept
