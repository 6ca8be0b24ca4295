"""Commands: what an operator asked of workers' engines, and was not answered yet."""

import asyncio
from collections.abc import Iterator
from typing import Protocol

from tokenbus_contracts import ContractError
from tokenbus_contracts.generated.client_pb2 import ClientFrame
from tokenbus_contracts.generated.control_pb2 import Control, ControlAnswer

_MOST_OPEN = 1024


class Says(Protocol):
    """The connection to a processor."""

    def say(self, frame: ClientFrame) -> bool:
        """Queue a frame."""


class Commands:
    """The commands that wait for their answers; each goes to one processor, again after each welcome of it.

    A worker does a command that it gets twice once.
    """

    def __init__(self) -> None:
        self._open: dict[int, tuple[Says, Control, asyncio.Future[ControlAnswer]]] = {}

    def send(self, session: Says, control: Control) -> asyncio.Future[ControlAnswer]:
        """Send a command to the processor that has its worker."""
        if len(self._open) >= _MOST_OPEN:
            raise ContractError("commands that are not answered", _MOST_OPEN, len(self._open) + 1)
        answer: asyncio.Future[ControlAnswer] = asyncio.get_running_loop().create_future()
        session.say(ClientFrame(control=control))
        self._open[control.control_key] = session, control, answer
        return answer

    def forget(self, control: Control) -> None:
        """Wait for an answer no more."""
        self._open.pop(control.control_key, None)

    def of(self, session: Says) -> Iterator[Control]:
        """Yield the commands that wait for a processor's answer."""
        return (control for said, control, _ in list(self._open.values()) if said is session)

    def answered(self, answer: ControlAnswer) -> None:
        """Take what became of a command."""
        found = self._open.pop(answer.control_key, None)
        if found is not None and not found[2].done():
            found[2].set_result(answer)
