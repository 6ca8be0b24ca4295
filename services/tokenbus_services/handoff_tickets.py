"""Hand-off tickets: what a processor gives a prefill worker for one request, and a decode worker checks.

A ticket is something random, what stands for the prefill worker's key, and a MAC over both, the request and the prefill
worker's id. The MAC's key is the secret in the decode worker's hello: any processor can make tickets, and the decode
worker can check them after that processor has gone.
"""

import hmac
import secrets
from hashlib import blake2b
from struct import pack

from tokenbus_contracts.generated.request_pb2 import Generate
from tokenbus_services.bus import Identity

KEY_BYTES = 32
_RANDOM_BYTES = 16
_HOLDER_BYTES = 16
_HEAD_BYTES = _RANDOM_BYTES + _HOLDER_BYTES
_MAC_BYTES = 32


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
    """Return a hash of a peer's key, or of the name that a NATS server vouches for, behind which of the two it is."""
    how, proved = (b"k", identity.key) if identity.key else (b"n", identity.name)
    if not proved:
        return bytes(_HOLDER_BYTES)
    return how + blake2b(proved.encode(), digest_size=_HOLDER_BYTES - 1).digest()


def _is_same(holder: bytes, shown: bytes) -> bool:
    """Tell whether two are one peer; a key and a name, as over tcp here and NATS there, cannot be compared."""
    return holder[:1] != shown[:1] or holder == shown
