"""ClientSession: the client's side of the client protocol, without sockets and clocks."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

from tokenbus.bus.link import ReconnectingSession, SessionState
from tokenbus_contracts import ContractError, Limits, Rule, decode
from tokenbus_contracts.frames import read_frame, write_frame
from tokenbus_contracts.generated.client_pb2 import (
    ClientFrame,
    ClientHello,
    ClientWelcome,
    Confirm,
    ModelRoom,
    ProcessorStatus,
    Room,
    ServerFrame,
    StatusRequest,
    Watch,
    WatchedStream,
)
from tokenbus_contracts.generated.control_pb2 import Control, ControlAnswer
from tokenbus_contracts.generated.request_pb2 import ErrorCode
from tokenbus_contracts.generated.stream_pb2 import Item

if TYPE_CHECKING:
    from tokenbus.client.requests import OpenRequests

T = TypeVar("T")
_MOST_COMMANDS = 1024
_ACK_SECONDS = 0.05
"""Maximum seconds before a received frame is acknowledged while requests are open."""
_ACK_SHARE = 8
"""Divisor of the window: an ack is sent once 1/8 of the window is used, because an ack costs as much as a frame."""
ReceiveItem = Callable[[WatchedStream, Item, bytes], None]
"""Function that receives an item of an observed stream, with the item's payload."""


class ClientSession(ReconnectingSession):
    """Exchanges a client's frames with one processor, across restarts of the processor."""

    def __init__(
        self, hello: ClientHello, requests: "OpenRequests", limits: Limits, *, interval: float, timeout: float
    ) -> None:
        super().__init__(interval, timeout)
        self._introduction = hello
        self._limits = limits
        self._requests = requests
        self._commands: dict[int, tuple[Control, asyncio.Future[ControlAnswer]]] = {}
        """Unanswered commands, which are resent after each welcome and executed only once by each worker."""
        self.ordinal = requests.join(self)
        self._outgoing: deque[bytes] = deque()
        self.owner = 0
        """The processor's hash of this client's identity, or 0 before the first welcome."""
        self._number = 0
        self._acked = 0
        self._unacked_bytes = 0
        self._ack_at = inf
        """Time at which the next ack is due."""
        self._is_ack_due = False
        self._of_request: dict[str, Callable[[ClientSession, Any], None]] = {
            "admitted": requests.admitted,
            "prompt_scores": requests.scored,
            "error": requests.failed,
        }
        self.watched: tuple[str, ReceiveItem] | None = None
        self._watched_stream: WatchedStream | None = None
        """Last stream that the processor announced, to which the following items belong."""
        self._status: asyncio.Future[ProcessorStatus] | None = None
        self._room: dict[str, ModelRoom] = {}
        self._used: Counter[str] = Counter()
        """Number of requests sent per model since the processor's last Room frame."""
        self.is_closing = False
        """Whether the processor is closing, so that its workers move to another processor."""
        self._away_since: float | None = None
        self.is_silent = False
        """Whether the processor has been silent for so long that requests continue elsewhere."""
        self.away = inf
        """Seconds between the first and the last unanswered hello, or infinity while the processor answers."""
        self.on_news: Callable[[], None] = lambda: None
        """Callback that runs when a frame is queued."""
        self.lost_since: float | None = None
        """Time of the first unanswered hello that was sent with open requests, or None."""

    @property
    def outstanding(self) -> int:
        return len(self._requests)

    @property
    def is_here(self) -> bool:
        return self.state is SessionState.OPEN and not self.is_silent

    def room_for(self, model: str) -> float:
        """Return how many more requests each worker can accept on average, or -inf if no worker serves the model."""
        rooms = [room for name, room in self._room.items() if model in ("", name)]
        workers = sum(room.workers for room in rooms)
        used = sum(self._used[room.model] for room in rooms) + (0 if "" in self._room else self._used[""])
        return (sum(room.free_requests for room in rooms) - used) / workers if workers else -inf

    def used(self, model: str) -> None:
        self._used[model] += 1

    def _set_room(self, room: Room) -> None:
        self._room = {each.model: each for each in room.models}
        self._used.clear()
        self._requests.has_room(self)

    def watch(self, worker_id: str, receive: ReceiveItem) -> None:
        self.say(ClientFrame(watch=Watch(worker_id=worker_id)))
        self.watched = worker_id, receive

    def ask_status(self) -> asyncio.Future[ProcessorStatus]:
        """Ask for the processor's status; all callers share one future until the answer arrives."""
        self.say(ClientFrame(status=StatusRequest()))  # each caller asks again, because an answer may have been lost
        if self._status is None:
            self._status = asyncio.get_running_loop().create_future()
        return self._status

    def control(self, control: Control) -> asyncio.Future[ControlAnswer]:
        """Send a command to a worker of the processor, and resend it until the returned future is done."""
        key, count = control.control_key, len(self._commands) + 1
        if count > _MOST_COMMANDS:
            raise ContractError("commands that are not answered", _MOST_COMMANDS, count)
        self.say(ClientFrame(control=control))
        answer: asyncio.Future[ControlAnswer] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda _: self._commands.pop(key, None))
        self._commands[key] = control, answer
        return answer

    def say(self, frame: ClientFrame) -> bool:
        """Queue a frame, and return whether the session is open; raises ContractError if the frame is out of bounds.

        Without an open session, the frame is dropped; after the next welcome, `welcomed` sends the current state.
        """
        data = write_frame(frame)
        if self.state is not SessionState.OPEN:
            return False
        self._outgoing.append(data)
        self.on_news()
        return True

    def _decode(self, parts: list[bytes]) -> ServerFrame:
        if not parts:
            raise ContractError("message", "a frame, and its batches", 0, rule=Rule.LENGTH)
        return read_frame(ServerFrame, parts[0])

    def _is_next(self, number: int, parts: list[bytes], now: float) -> bool:
        if number == self._number + 1:
            self._number = number
            self._unacked_bytes += sum(map(len, parts))
            self._ack_at = min(self._ack_at, now + _ACK_SECONDS)
            return True
        if number > self._number:  # a frame was lost; after another hello, the processor resends unacknowledged frames
            self._greet_again(now)
        else:
            self._requests.repeated += 1
        return False

    def _handle(self, frame: ServerFrame, body: str, parts: list[bytes], now: float) -> None:
        if frame.number and not self._is_next(frame.number, parts, now):
            return
        match body:
            case "outputs":
                self._receive_outputs(parts, has_draft=frame.outputs.has_draft)
            case "admitted" | "prompt_scores" | "error":
                self._of_request[body](self, getattr(frame, body))
            case "control_answer":
                _settle(self._commands.get(frame.control_answer.control_key, (None, None))[1], frame.control_answer)
            case "status":
                _settle(self._status, frame.status)
                self._status = None
            case "room":
                self._set_room(frame.room)
            case "watched_stream":
                self._watched_stream = frame.watched_stream
            case "watched_item":
                if self.watched is not None and self._watched_stream is not None:
                    self.watched[1](self._watched_stream, frame.watched_item, parts[0] if parts else b"")

    def _receive_outputs(self, parts: list[bytes], *, has_draft: bool) -> None:
        try:
            if len(parts) != 1 + has_draft:
                raise ContractError("message", f"{2 + has_draft} parts", 1 + len(parts), rule=Rule.LENGTH)  # noqa: TRY301
            target, *drafts = [decode(part, self._limits) for part in parts]
        except ContractError as error:
            # A repetition has the same bytes. All requests fail, because the frame may have tokens of any request.
            self._requests.end_all(ErrorCode.ERROR_CODE_GAP, f"tokens cannot be read: {error}", self)
            raise
        self._requests.receive_step(self, target, drafts[0] if drafts else None)

    def _welcome(self, welcome: ClientWelcome) -> None:
        # After an outage, several hellos may be answered at once, but only the first answer requires action.
        resumed = welcome.resumed and welcome.processor_id == self.processor_id
        self._welcomed(welcome)
        self.owner = welcome.owner
        self.lost_since = self._away_since = None
        self.away, self.is_silent = inf, False
        self._number = self._acked = self._unacked_bytes = 0
        self._ack_at, self._is_ack_due = inf, False
        if not resumed:
            self._outgoing.clear()
            self._room.clear()
            self.is_closing = False  # an earlier incarnation of the processor may have been closing
        self._requests.welcomed(self, resumed=resumed)
        if self.watched is not None:
            self.say(ClientFrame(watch=Watch(worker_id=self.watched[0])))
        if self._status is not None:
            self.say(ClientFrame(status=StatusRequest()))
        for control, _ in self._commands.values():
            self.say(ClientFrame(control=control))

    def next_message(self, now: float) -> list[bytes] | None:
        self._is_ack_due |= now >= self._ack_at
        return super().next_message(now)

    def seconds_to_wait(self, now: float) -> float:
        may_ack = self.state is SessionState.OPEN and not self._requests.is_paused
        ack_at = self._ack_at if may_ack else inf
        return max(0.0, min(super().seconds_to_wait(now), ack_at - now))

    def _encode(self, **body: Any) -> bytes:  # noqa: ANN401 - messages
        return write_frame(ClientFrame(**body))

    def _next_data(self) -> list[bytes] | None:
        if self._outgoing:
            return [self._outgoing.popleft()]
        if self._number > self._acked and not self._requests.is_paused and self._may_ack():
            self._acked, self._unacked_bytes = self._number, 0
            self._ack_at, self._is_ack_due = inf, False
            return [self._encode(confirm=Confirm(through_number=self._number))]
        return None

    def _may_ack(self) -> bool:
        """Return whether an ack is due: much of the window is used, the ack is late, or no more frame is expected."""
        frames, size = self._number - self._acked, self._unacked_bytes
        is_much = frames * _ACK_SHARE >= self._introduction.window_frames or (
            size * _ACK_SHARE >= self._introduction.window_bytes
        )
        return is_much or self._is_ack_due or not len(self._requests)

    def _greeting(self, now: float) -> list[bytes] | None:
        self._away_since = now if self._away_since is None else self._away_since
        self.away = now - self._away_since
        self.is_closing = False
        if not len(self._requests):
            self.lost_since = None
        elif self.lost_since is None:
            self.lost_since = now
        return super()._greeting(now)

    def _hello(self) -> ClientHello:
        return self._introduction


def _settle(future: "asyncio.Future[T] | None", answer: T) -> None:
    if future is not None and not future.done():
        future.set_result(answer)
