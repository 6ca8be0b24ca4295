"""The search for a request that no processor is known to have, the workers that may bring it, and what has ended."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import TYPE_CHECKING

from tokenbus.bus.link import SessionState
from tokenbus_contracts.generated.client_pb2 import ClientFrame, Ended
from tokenbus_contracts.generated.request_pb2 import RequestError
from tokenbus_contracts.schema import bounds_in

if TYPE_CHECKING:
    from tokenbus.client.session import ClientSession

_OVERDUE = 2
"""A search ends after so many graces; where a worker was lost, only if one processor was there for a whole one."""
_MOST_ENDED = bounds_in(Ended.DESCRIPTOR.fields_by_name["request_keys"].GetOptions()).max_items
"""As many as one frame may name."""


def connected(sessions: "Sequence[ClientSession]") -> "list[ClientSession]":
    """Return the processors that are there."""
    return [each for each in sessions if each.state is SessionState.OPEN]


def grace(sessions: "Sequence[ClientSession]", *, is_told: bool = False) -> float:
    """Return how long a worker may take to come to another processor, in seconds; it asks each in turn.

    `is_told`: its processor let go of it. Else the worker may notice the loss only after the timeout.
    """
    notices = (each.interval if is_told else 2 * each.timeout for each in sessions)
    return max(notices) + sum(each.interval for each in sessions)


@dataclass(slots=True, eq=False)
class Search:
    """A request that no processor has, as far as is known: what the processors said of it."""

    error: RequestError | None = None
    """What it ends with if none of them has it."""
    without: "set[ClientSession]" = field(default_factory=set)
    """Processors that answered "unknown" or "refused" for this request."""
    since: float | None = None
    """When the client first looked at it after the last handshake with a processor, in seconds; None: not yet."""
    is_final: bool = False
    """Whether its worker has had the time to come: what a processor says now counts."""
    looked_at: float | None = None
    """When the client looked at it last, in seconds."""
    searched: float = 0.0
    """For how many seconds a processor was connected meanwhile."""
    is_overdue: bool = False
    """Whether the search has lasted so long that processors which come and go delay its end no longer."""

    def count(self, sessions: "Sequence[ClientSession]", now: float) -> None:
        """Count the time in which a processor was connected, and see whether it was enough."""
        if self.looked_at is not None and connected(sessions):
            self.searched += now - self.looked_at
        self.looked_at = now
        seconds = grace(sessions)
        # Where no processor stayed, a worker that lives may have found none.
        has_stayed = any(each.heard_for(now) >= seconds for each in sessions)
        self.is_overdue = self.error is not None and has_stayed and self.searched >= _OVERDUE * seconds

    def has_failed(self, sessions: "Sequence[ClientSession]") -> bool:
        """Tell whether all processors have said that they do not have the request, and its worker can come no more."""
        here = connected(sessions)
        asked = here if self.is_overdue else sessions
        # Without a processor its worker may still come to the next.
        return self.is_final and bool(here) and all(each in self.without for each in asked)


class AwayWorkers:
    """The workers that have left their processor, or lost it, and are at no other yet.

    Any of them may soon take a request that none takes now. Each is waited for so many seconds in which there is a
    processor to come to.
    """

    def __init__(self, sessions: "Sequence[ClientSession]") -> None:
        self._sessions = sessions
        self._seconds: dict[int, float] = {}
        self._looked_at: float | None = None

    def __bool__(self) -> bool:
        return bool(self._seconds)

    def lost_with(self, workers: frozenset[int]) -> None:
        """Learn that the processor of some workers is lost: they are on their way to another, or there already."""
        self._wait_for(workers, _OVERDUE * grace(self._sessions))

    def left(self, workers: frozenset[int]) -> None:
        """Learn that some workers are at a processor no more, which is there."""
        self._wait_for(workers, grace(self._sessions, is_told=True))

    def seen(self, workers: frozenset[int]) -> None:
        """Learn that some workers are at a processor; each says of which requests it has."""
        for worker in self._seconds.keys() & workers:
            del self._seconds[worker]

    def count(self, now: float) -> None:
        """Give up those that have come to no processor, though there was one for long enough."""
        passed, self._looked_at = now - (now if self._looked_at is None else self._looked_at), now
        if connected(self._sessions):
            left = {worker: seconds - passed for worker, seconds in self._seconds.items()}
            self._seconds = {worker: seconds for worker, seconds in left.items() if seconds > 0}

    def _wait_for(self, workers: frozenset[int], seconds: float) -> None:
        for worker in workers.difference(*(each.workers for each in connected(self._sessions))):
            self._seconds[worker] = max(seconds, self._seconds.get(worker, 0.0))


class EndedRequests:
    """Names to each processor the requests of which nothing more is wanted, once each.

    One that a worker may still run is named each time that a worker comes.
    """

    def __init__(self) -> None:
        self._numbers: OrderedDict[int, float] = OrderedDict()
        """The number of each, in the order of their ends; infinite where a worker may still have it."""
        self._count = count(1)

    def add(self, key: int, *, may_go_on: bool = False) -> None:
        """Remember a request; `may_go_on`: its worker has not said that it ended it."""
        self._numbers[key] = inf if may_go_on else next(self._count)
        if len(self._numbers) > _MOST_ENDED:
            self._numbers.popitem(last=False)

    def remove(self, key: int) -> None:
        """Forget a request: its key is used again."""
        self._numbers.pop(key, None)

    def name_to(self, session: "ClientSession") -> None:
        """Name those to a processor that were not named to it."""
        found = [key for key, number in self._numbers.items() if number > session.named_ended]
        if found and session.say(ClientFrame(ended=Ended(request_keys=found))):
            session.named_ended = max((number for number in self._numbers.values() if number < inf), default=0)
