"""EndedRequests: the requests that ended last at a client, of which workers may still bring rows to a processor."""

from collections import OrderedDict
from itertools import count
from math import inf
from typing import TYPE_CHECKING

from tokenbus_contracts.generated.client_pb2 import ClientFrame, Ended
from tokenbus_contracts.schema import bounds_in

if TYPE_CHECKING:
    from tokenbus_services.client.session import ClientSession

_MOST = bounds_in(Ended.DESCRIPTOR.fields_by_name["request_keys"].GetOptions()).max_items
"""As many as one frame may name."""


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
        if len(self._numbers) > _MOST:
            self._numbers.popitem(last=False)

    def remove(self, key: int) -> None:
        """Forget a request: its key is used again."""
        self._numbers.pop(key, None)

    def name_to(self, session: "ClientSession") -> None:
        """Name those to a processor that were not named to it."""
        found = [key for key, number in self._numbers.items() if number > session.named_ended]
        if found and session.say(ClientFrame(ended=Ended(request_keys=found))):
            session.named_ended = max((number for number in self._numbers.values() if number < inf), default=0)
