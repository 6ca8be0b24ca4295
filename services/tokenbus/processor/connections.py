"""Common base of worker and client connections: handshakes, refusals, heartbeats, and limits for unknown peers."""

import hmac
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from tokenbus.bus import Listener, Outcome
from tokenbus.logs import DeduplicatedLog, logger
from tokenbus.processor.refused_messages import SHOWN_BYTES, RefusedMessages
from tokenbus.settings import Settings
from tokenbus_contracts import ContractError, Rule
from tokenbus_contracts.frames import body_of, write_frame
from tokenbus_contracts.generated.stream_pb2 import Goodbye, GoodbyeReason, Heartbeat, Refusal, RefusalReason
from tokenbus_contracts.schema import MINOR

_log = logger("processor")
_NS = 1_000_000_000
_MOST_UNKNOWN = 1024
_LARGE = 4096
"""Size in bytes above which a frame is large; smaller frames are so cheap to refuse that their rate needs no limit."""
_REFUSED_BYTES_A_SECOND = 8_388_608
"""Maximum bytes of large refused frames per second; reading them takes less than a tenth of the processor's time."""


class RefusedError(Exception):
    """The refusal of a peer, with a reason code and a message for people."""

    def __init__(self, reason: RefusalReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def protocol_error(message: str | ContractError) -> RefusedError:
    """Return the refusal for a peer that violates the protocol or the bounds of a frame."""
    is_version = isinstance(message, ContractError) and message.rule is Rule.VERSION
    reason = RefusalReason.REFUSAL_REASON_SCHEMA_VERSION if is_version else RefusalReason.REFUSAL_REASON_PROTOCOL
    return RefusedError(reason, str(message))


@dataclass(slots=True, eq=False, kw_only=True)
class KnownPeer:
    """One incarnation of a worker or client, across all of its connections."""

    name: str
    proof: bytes
    """Random token that identifies one incarnation of the peer."""
    log_fields: Mapping[str, object]
    """Log fields that name the peer."""
    peer: bytes | None = None
    """Id of the peer's current connection, or None while the peer is away."""
    last_heard: float = 0.0
    next_heartbeat: float = 0.0
    echo_ns: int = 0


P = TypeVar("P", bound=KnownPeer)


class Peers(Generic[P]):
    """The known peers at one listening address, by connection."""

    listener: Listener
    """The listener, which is set once the processor listens."""

    def __init__(self, frame_of: Callable[..., Message]) -> None:
        self.frame_of = frame_of
        self._by_connection: dict[bytes, P] = {}

    def at(self, connection: bytes) -> P | None:
        return self._by_connection.get(connection)

    def connect(self, known: P, connection: bytes) -> None:
        """Assign a connection to a peer, and close the peer's previous connection."""
        if known.peer not in {None, connection}:
            self.cut_off(known)
        self.disconnect(known)
        known.peer = connection
        self._by_connection[connection] = known
        self.listener.admit(connection)

    def disconnect(self, known: P) -> None:
        """Forget a peer's connection, so that the peer gets no frames until its next hello."""
        if known.peer is not None:
            self._by_connection.pop(known.peer, None)
            known.peer = None

    def cut_off(self, known: P) -> None:
        """Close a peer's connection, which would otherwise count against the connection limit forever."""
        if known.peer is not None:
            self.listener.disconnect(known.peer)
        self.disconnect(known)

    def send(self, known: P, frame: Message) -> Outcome:
        if known.peer is None:
            return Outcome.GONE
        return self.listener.send(known.peer, [write_frame(frame)])


class Connections(ABC, Generic[P]):
    """Handles the messages of the peers at one address; callers pass the time, so that tests need no clock."""

    def __init__(  # noqa: PLR0913, PLR0917 - the differences between workers and clients, and the shared parts
        self,
        kind: str,
        frames: type[Message],
        peers: Peers[P],
        known: Mapping[Any, P],
        settings: Settings,
        refused_messages: RefusedMessages,
    ) -> None:
        self._kind = kind
        self._known = known
        self._frames = frames
        self.peers = peers
        self._settings = settings
        self._refused_messages = refused_messages
        self._repeated_log = DeduplicatedLog()
        self._interval = settings.bus.heartbeat_interval_ms / 1000
        self._timeout = settings.bus.heartbeat_timeout_ms / 1000
        self._asked: OrderedDict[bytes, float] = OrderedDict()
        """For each unknown connection, the time when the peer was last asked for a hello."""
        self._reads_large_at = 0.0
        """Time until which large frames of unknown peers are not read; each refused large frame postpones this time.

        Without this limit, a peer could keep the processor busy by sending invalid frames on ever new connections.
        """
        self.is_draining = False
        self.refused = 0
        self.refusals: Counter[str] = Counter()
        """Number of refused peers by reason."""
        self.failed_ticks = 0

    @abstractmethod
    def _handle(self, peer: bytes, known: P | None, parts: list[bytes], now: float) -> None:
        """Handle one message; raises ContractError to refuse the frame, or RefusedError to refuse the peer."""

    @abstractmethod
    def _check(self, known: P, now: float) -> None:
        """Check the deadlines of one peer, and send due frames."""

    def receive(self, peer: bytes, parts: list[bytes], now: float) -> None:
        """Handle one message of a peer; an invalid message is refused and has no other effect."""
        known = self.peers.at(peer)
        frame = parts[0] if parts else b""  # the payload in the second part is not parsed yet
        # A closed connection can receive no answer, and its key is no longer proven.
        if known is None and not (self.peers.listener.is_connected(peer) and self._may_be_read(peer, frame, now)):
            return
        try:
            self._handle(peer, known, parts, now)
        except (RefusedError, ContractError) as error:
            if known is None and len(frame) > _LARGE:
                self._reads_large_at = max(self._reads_large_at, now) + len(frame) / _REFUSED_BYTES_A_SECOND
                self.peers.listener.disconnect(peer)
            if isinstance(error, RefusedError):
                self._refuse(peer, known, error)
            else:
                self._refuse_frame(peer, known, frame, error)

    def _may_be_read(self, peer: bytes, frame: bytes, now: float) -> bool:
        """Return whether to parse a frame of an unknown peer; a large frame is parsed only if it may be a hello.

        A large frame of another protocol is also parsed, at a limited rate, so that its peer learns why it is refused.
        """
        if len(frame) <= _LARGE:
            return True
        if body_of(self._frames, frame) not in {"hello", None}:
            self._ask_for_handshake(peer, now)
            return False
        if now < self._reads_large_at:
            self.peers.listener.disconnect(peer)
            return False
        return True

    def _refuse_frame(self, peer: bytes, known: P | None, frame: bytes, error: ContractError) -> None:
        self.refused += 1
        # A hello contains the secret proof, so the log must not show the frame's bytes.
        shown = 0 if body_of(self._frames, frame) == "hello" else SHOWN_BYTES
        self._refused_messages.add("frame refused", frame, error, known.log_fields if known else {}, shown=shown)
        if known is None:
            self._send_refusal(peer, protocol_error(error))

    def _ask_for_handshake(self, peer: bytes, now: float) -> None:
        """Ask an unknown peer, which may know only an earlier incarnation of the processor, for a hello."""
        asked_at = self._asked.pop(peer, -inf)
        is_due = now - asked_at >= self._interval
        self._asked[peer] = now if is_due else asked_at
        if len(self._asked) > _MOST_UNKNOWN:
            self._asked.popitem(last=False)
        if is_due:
            self._send_refusal(peer, RefusedError(RefusalReason.REFUSAL_REASON_HELLO_FIRST, "say hello first"))

    def _refuse(self, peer: bytes, known: P | None, refused: RefusedError) -> None:
        self._count_refused(known, refused)
        self._send_refusal(peer, refused)

    def _count_refused(self, known: P | None, refused: RefusedError) -> None:
        self.refused += 1
        self.refusals[RefusalReason.Name(refused.reason).removeprefix("REFUSAL_REASON_").lower()] += 1
        self._warn_once(("refused", str(refused)), f"{self._kind} refused", known, reason=str(refused))

    def _send_refusal(self, peer: bytes, refused: RefusedError) -> None:
        refusal = Refusal(reason=refused.reason, message=str(refused)[:1000])
        self.peers.listener.send(peer, [write_frame(self.peers.frame_of(refusal=refusal))])

    def _warn_once(self, key: tuple[object, ...], event: str, known: P | None, **values: object) -> None:
        self._repeated_log.begin(key, _log.warning, event, **values, **(known.log_fields if known else {}))

    def _connect(self, known: P, peer: bytes, now: float) -> None:
        self.peers.connect(known, peer)
        known.last_heard = now
        known.next_heartbeat = now + self._interval
        self._asked.pop(peer, None)

    def _welcome(self) -> dict[str, Any]:
        return {
            "processor_id": self._settings.processor.id,
            "schema_minor": MINOR,
            "heartbeat_interval_ms": self._settings.bus.heartbeat_interval_ms,
            "heartbeat_timeout_ms": self._settings.bus.heartbeat_timeout_ms,
        }

    def _is_same_life(self, known: P, peer: bytes, proof: bytes, now: float) -> bool:
        """Return whether a hello comes from the known peer; without a proof, any other connection must be dead."""
        is_proven = hmac.compare_digest(known.proof, proof)
        return is_proven and bool(known.proof or known.peer == peer or not self._is_alive(known, now))

    def _is_alive(self, known: P, now: float) -> bool:
        if known.peer is None or now - known.last_heard > self._timeout:
            return False
        return self._send_heartbeat(known, now) is not Outcome.GONE

    def tick(self, now: float) -> None:
        """Check the deadlines of all peers; a defect at one peer does not affect other peers."""
        for known in list(self._known.values()):
            try:
                self._check(known, now)
            except Exception:  # noqa: BLE001 - only a defect of the processor raises here
                self.failed_ticks += 1
                self._repeated_log.begin("defect", _log.exception, "tick failed", **known.log_fields)
                self.peers.disconnect(known)
        self._repeated_log.expire()

    def extend_deadlines(self, seconds: float, now: float) -> None:
        """Do not count a stall of this processor as silence of its peers."""
        for known in self._known.values():
            known.last_heard = min(now, known.last_heard + seconds)

    def close(self, reason: GoodbyeReason, message: str) -> None:
        for known in list(self._known.values()):
            self._say_goodbye(known, reason, message)
        self._repeated_log.close()

    def _say_goodbye(self, known: P, reason: GoodbyeReason, message: str) -> None:
        self._flush(known)
        goodbye = Goodbye(reason=reason, message=message, last_sequence=self._last_sequence(known))
        self.peers.send(known, self.peers.frame_of(goodbye=goodbye))

    @abstractmethod
    def _flush(self, known: P) -> None:
        """Send the waiting frames or acks of a peer."""

    def _last_sequence(self, _known: P) -> int:
        return 0

    def _send_heartbeat(self, known: P, now: float) -> Outcome:
        known.next_heartbeat = now + self._interval
        beat = Heartbeat(
            sent_at_ns=max(1, int(now * _NS)), echo_ns=known.echo_ns, last_sequence=self._last_sequence(known)
        )
        return self.peers.send(known, self.peers.frame_of(heartbeat=beat))
