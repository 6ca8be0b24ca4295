"""RequestQueue: requests, aborts and operators' commands that wait for the engine."""

import threading
from collections import deque
from collections.abc import Callable

from tokenbus_contracts import ContractError
from tokenbus_contracts.generated.control_pb2 import Control
from tokenbus_contracts.generated.request_pb2 import Abort, Generate

_MAX_CONTROLS = 64  # number of unanswered commands that a processor allows for one worker


class RequestQueue:
    """Bounded queues between the connection's thread and the engine's thread."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._requests: deque[Generate | Abort] = deque()
        self._controls: deque[Control] = deque()
        self._arrived = threading.Condition()
        self._is_closed = False
        self.on_arrival: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return len(self._requests)

    def close(self) -> None:
        """Wake the threads that block in `take`."""
        with self._arrived:
            self._is_closed = True
            self._arrived.notify_all()

    def put(self, request: Generate | Abort) -> None:
        """Queue a request or an abort, or raise ContractError if the queue is full.

        An abort is ignored if the requests come from the engine's own server, which alone may end these requests.
        """
        if not self._max_requests and isinstance(request, Abort):
            return
        with self._arrived:
            most = 2 * self._max_requests  # one request and one abort for each open request
            limit = f"at most {most} requests that the engine has not taken yet"
            if len(self) >= most:
                # Processors respect max_requests, and fail requests that are not admitted in time.
                raise ContractError("generate", limit, len(self) + 1)
            self._append(request, limit)
            self._arrived.notify_all()
        self.on_arrival()

    def _append(self, request: Generate | Abort, _limit: str) -> None:
        self._requests.append(request)

    def put_control(self, control: Control) -> None:
        """Queue an operator's command unless it is already queued. Raises ContractError if the queue is full."""
        with self._arrived:
            if any(each.control_key == control.control_key for each in self._controls):
                return  # the processor repeats commands after a handshake
            if len(self._controls) >= _MAX_CONTROLS:
                limit = f"at most {_MAX_CONTROLS} commands that the engine has not taken yet"
                raise ContractError("control", limit, len(self._controls) + 1)
            self._controls.append(control)
            self._arrived.notify_all()
        self.on_arrival()

    def take(self, seconds: float) -> list[Generate | Abort]:
        """Return all requests and aborts. Block for at most `seconds` while there is nothing to take."""
        with self._arrived:
            if seconds:
                self._arrived.wait_for(lambda: self._requests or self._controls or self._is_closed, seconds)
            taken = list(self._requests)
            self._requests.clear()
            return taken

    def take_controls(self) -> list[Control]:
        with self._arrived:
            taken = list(self._controls)
            self._controls.clear()
            return taken
