"""How a worker or a client finds its processor, is refused, hears nothing any more, and finds it again."""

from abc import ABC, abstractmethod

from tokenbus_contracts import ContractError
from tokenbus_contracts.generated.client_pb2 import ClientWelcome
from tokenbus_contracts.generated.stream_pb2 import Heartbeat, Refusal, RefusalReason, Welcome
from tokenbus_services.link import SessionState

_NS = 1_000_000_000
PROOF_BYTES = 16
"""How long the proof is that a session draws once, and shows in each hello: who has it is the same life of its peer."""


def check_times(welcome: Welcome | ClientWelcome) -> None:
    """Refuse a welcome whose times contradict each other."""
    if welcome.heartbeat_timeout_ms <= welcome.heartbeat_interval_ms:
        limit = f"above heartbeat_interval_ms, {welcome.heartbeat_interval_ms}"
        raise ContractError("welcome.heartbeat_timeout_ms", limit, welcome.heartbeat_timeout_ms)


class ReconnectingSession(ABC):
    """What is the same in both sessions; each says itself how it introduces itself, and what it has to say then."""

    def __init__(self, interval: float, timeout: float) -> None:
        """Take how often peers are to be heard, and after how long they are lost, in seconds."""
        self._interval = interval
        self._timeout = timeout
        self._next_greeting = 0.0
        self._last_sent = 0.0
        self._last_heard = 0.0
        self._echo_ns = 0
        self.state = SessionState.GREETING
        self.processor_id = ""
        self.refusal: Refusal | None = None
        self.handshakes = 0

    @abstractmethod
    def _hello(self) -> list[bytes]:
        """Return how it introduces itself."""

    @abstractmethod
    def _next(self, now: float) -> list[bytes] | None:
        """Return the next message to a processor that is there, or None: there is nothing to say just now."""

    def next_message(self, now: float) -> list[bytes] | None:
        """Return the next message to send, or None: there is nothing to say just now, or no credit for it."""
        if self.state is SessionState.OPEN and now - self._last_heard > self._timeout:
            self._greet_again(now)
        if self.state in (SessionState.GREETING, SessionState.REFUSED):
            return self._greeting(now)
        if self.state is SessionState.LEFT:
            return None
        message = self._next(now)
        if message is not None:
            self._last_sent = now
        return message

    def seconds_to_wait(self, now: float) -> float:
        """Return after how long `next_message` has something to say even if nothing happens, at most an interval."""
        if self.state in (SessionState.GREETING, SessionState.REFUSED):
            return max(0.0, min(self._next_greeting - now, self._interval))
        return max(0.0, min(self._last_sent + self._interval - now, self._interval))

    def _greeting(self, now: float) -> list[bytes] | None:
        if now < self._next_greeting:
            return None
        self.state = SessionState.GREETING
        self._next_greeting = now + self._interval
        return self._hello()

    def _greet_again(self, at: float) -> None:
        self.state = SessionState.GREETING
        self._next_greeting = at

    def _welcomed(self, welcome: Welcome | ClientWelcome) -> None:
        self.state = SessionState.OPEN
        self.refusal = None
        self.processor_id = welcome.processor_id
        self.handshakes += 1
        self._interval = welcome.heartbeat_interval_ms / 1000
        self._timeout = welcome.heartbeat_timeout_ms / 1000

    def _refused(self, refusal: Refusal, now: float) -> None:
        if refusal.reason == RefusalReason.REFUSAL_REASON_HELLO_FIRST:
            if self.state is SessionState.OPEN:
                self._greet_again(now)
            return
        self.state = SessionState.REFUSED
        self.refusal = refusal
        self._next_greeting = now + self._timeout

    def _heartbeat(self, now: float, *, at_once: bool = False) -> Heartbeat | None:
        """Return a sign of life, if it is time for one."""
        if now - self._last_sent < self._interval and not at_once:
            return None
        return Heartbeat(sent_at_ns=max(1, int(now * _NS)), echo_ns=self._echo_ns)
