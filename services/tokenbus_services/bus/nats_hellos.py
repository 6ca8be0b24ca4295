"""HelloInlet: how a listener hears hellos without being flooded: the server drops what comes beyond a number.

A subscription of NATS can end by itself after so many messages, and then costs nothing. It is made again after a pause.
All peers share one; each name that was heard has another of its own, which no other name's flood uses up.
"""

import asyncio

from tokenbus_services.bus.nats_server import Inlet, Receive, ServerConnection

_MOST_HELLOS, _MOST_BYTES = 64, 4_194_304
"""How many hellos the server may deliver at once, and how many bytes, however large they are."""
_FEWEST_HELLOS = 4
_HELLOS_PER_SECOND, _BYTES_PER_SECOND = 2048, 33_554_432
_LONGEST_PAUSE = 1.0


class HelloInlet:
    """A subscription to hellos that ends at the server after a few of them, and is made again after a pause."""

    def __init__(
        self,
        server: ServerConnection,
        subject: str,
        receive: Receive,
        *,
        per_second: int = _HELLOS_PER_SECOND,
        is_one_name: bool = False,
    ) -> None:
        """Subscribe, to so many a second; of one name, fewer and fewer as long as its peers send too many."""
        self._server = server
        self._subject = subject
        self._receive = receive
        self._is_one_name = is_one_name
        self._most = max(_FEWEST_HELLOS, min(_MOST_HELLOS, _MOST_BYTES // server.max_payload))
        self._shortest = self._pause = self._most / per_second
        self._is_closed = False
        self._inlet: Inlet
        self._open()

    def close(self) -> None:
        """Hear no more."""
        self._is_closed = True
        self._server.unsubscribe(self._inlet)

    def _open(self) -> None:
        if self._is_closed:
            return
        self._began, self._bytes = asyncio.get_running_loop().time(), 0
        self._inlet = self._server.subscribe(self._subject, self._take, most=self._most)

    def _take(self, subject: str, payload: bytes, nobody: bool) -> None:  # noqa: FBT001 - as a Receive
        self._bytes += len(payload)
        if self._inlet.received == self._most:
            self._open_later()
        self._receive(subject, payload, nobody)

    def _open_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._server.unsubscribe(self._inlet)
        lasted = loop.time() - self._began
        is_flood = self._is_one_name and lasted < 2 * self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE) if is_flood else self._shortest
        loop.call_later(max(0.0, self._pause - lasted, self._bytes / _BYTES_PER_SECOND - lasted), self._open)
