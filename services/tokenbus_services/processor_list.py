"""ProcessorList: the addresses of the processors that a worker or a client goes to, and which of them is next."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING

from tokenbus_services.bus import AddressError, require_nats
from tokenbus_services.bus.addresses import is_group
from tokenbus_services.settings import BusSettings, listed_addresses

if TYPE_CHECKING:
    from tokenbus_services.bus.nats_directory import NatsDirectory

_SETTLE_SECONDS = 0.1
"""How long the first choice waits for others that answer just after the first."""
_FEWER = 2
"""By how many workers another processor must have fewer before one goes there."""


class ProcessorList:
    """The addresses of processors: fixed, or of those that announce themselves over NATS, which come and go."""

    def __init__(
        self, *addresses: str, worker_id: str = "", group: str = "", settings: BusSettings | None = None
    ) -> None:
        """Take fixed addresses, or a group's, as `nats://HOST:PORT/workers.*`, and the settings to look for it.

        A worker's id decides in which order it tries those that are alike.
        """
        self._worker_id = worker_id
        self._group = group
        self._settings = settings
        self._fixed = dict.fromkeys(sorted(addresses, key=self._rank), 0)
        self._directory: NatsDirectory | None = None
        self._came = asyncio.Event()
        self._seen: set[str] = set()
        self._has_newcomer = False
        self._report: Callable[[], None] = lambda: None
        self._tries: Counter[str] = Counter()
        """How often each was tried since one was found."""
        self.current = ""
        """The address that was chosen last."""

    @property
    def is_fixed(self) -> bool:
        """Whether none comes or goes."""
        return not self._group

    @property
    def workers(self) -> Mapping[str, int]:
        """How many workers each processor has, by its address, as far as is known."""
        return self._fixed if self._directory is None else self._directory.listeners

    @property
    def count(self) -> int:
        """How many processors there are to go to, the current one too."""
        return len(self.workers.keys() | {self.current}) if self.current else len(self.workers)

    @property
    def is_outdated(self) -> bool:
        """Whether the current processor has gone, or another one has come since it was chosen and not yet found."""
        return self._has_newcomer or (bool(self.workers) and bool(self.current) and self.current not in self.workers)

    async def open(self, changed: Callable[[], None] = lambda: None) -> None:
        """Begin to look for processors; `changed` is called when some come or go. Raises AddressError."""
        if self._settings is not None:
            require_nats(self._group)
            from tokenbus_services.bus.nats import NatsTransport  # noqa: PLC0415 - an extra

            self._report = changed
            self._directory = NatsTransport(self._settings).directory(self._group, self._changed)

    def _changed(self) -> None:
        self._has_newcomer = bool(self._has_newcomer or self.workers.keys() - self._seen)
        self._seen = set(self.workers)
        if self.workers:
            self._came.set()
        else:
            self._came.clear()
        self._report()

    async def next(self) -> str:
        """Choose the next address: one that was not tried yet, with the fewest workers; waits while there is none."""
        while not self.workers:
            await self._came.wait()
            if not self.current:
                await asyncio.sleep(_SETTLE_SECONDS)
        self._has_newcomer = False
        workers = self.workers
        self._tries = Counter({address: self._tries[address] for address in workers})
        self.current = min(workers, key=lambda each: (self._tries[each], workers[each], self._rank(each)))
        self._tries[self.current] += 1
        return self.current

    def welcomed(self) -> None:
        """Learn that the processor at the current address took this worker: newcomers are of no interest any more."""
        self._tries = Counter([self.current])
        self._has_newcomer = False

    def share_to_leave(self) -> float:
        """Return how large a share of the workers at the current address should go to others that have far fewer."""
        workers = self.workers
        here = workers.get(self.current, 0)
        if here - min(workers.values(), default=here) < _FEWER:
            return 0.0
        return 1 - sum(workers.values()) / len(workers) / here

    async def close(self) -> None:
        """Look for processors no longer."""
        if self._directory is not None:
            await self._directory.close()

    def _rank(self, address: str) -> bytes:
        if not self._worker_id:
            return b""
        return blake2b(f"{self._worker_id} {address}".encode(), digest_size=8).digest()


def processors_at(setting: str, settings: BusSettings, *, worker_id: str = "") -> ProcessorList:
    """Return the list that an address setting means; raises AddressError for a group beside other addresses."""
    addresses = listed_addresses(setting)
    if not any(map(is_group, addresses)):
        return ProcessorList(*addresses, worker_id=worker_id)
    if len(addresses) > 1:
        raise AddressError(setting, "an address that ends with .* stands alone")
    return ProcessorList(worker_id=worker_id, group=setting, settings=settings)
