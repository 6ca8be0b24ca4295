"""SlotRegistry: the request of each slot.

The engine's ops name slots instead of requests, and do not report the end of a request. So a slot keeps its request
until a message shows another request. Then an added row ends the earlier request.
"""

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from tokenbus.engines.fastdeploy.message import Flags, Message
from tokenbus.worker.step import StepArrays
from tokenbus_contracts import ContractError, RowStatus, Rule

_RENEW_SECONDS = 12 * 3600.0
"""Age at which a slot's request gets a new id, because a processor ends every request within a day."""
_FORGOTTEN_SECONDS = 23 * 3600.0
"""Age from which a replaced request needs no last row, because the processor ends the request itself."""
_MOST_ABSENT = 65_536
GOING_ON = np.array([RowStatus.ACTIVE, RowStatus.IDLE, RowStatus.PREFILLING], np.uint8)
OVER = np.array([RowStatus.FINISHED_STOP, RowStatus.UNRECOVERABLE], np.uint8)
REPLACED = RowStatus.ABORTED
"""Status of an added row that ends the previous request of a slot."""
_Ended = tuple[int, int, RowStatus]
"""Request id, position and status of a last row that is added after the rows of the slots."""
SlotRequests = npt.NDArray[np.void]
"""Current request of each slot, in the fields of `_SLOT`."""
_SLOT = np.dtype(
    [
        ("key", np.uint64),
        ("position", np.int64),
        ("decoder_length", np.int64),  # length when the slot last got tokens, or -1 if no op passed one
        ("prompt_length", np.int64),
        ("known_since", np.float64),  # time of the first published row, or infinity
        ("is_over", np.bool_),
        ("is_interrupted", np.bool_),  # whether the request got no token since a preemption
        ("is_assigned", np.bool_),
    ]
)


class SlotRegistry:
    """Tracks the current request of each slot."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Begin with no slots. A random prefix of the ids makes collisions with other processes unlikely."""
        self._now = now
        self._prefix = (secrets.randbits(31) + 1) << 32
        self._drawn = 0
        self._requests = self._begun(0)
        self._replaced: list[_Ended] = []
        self._absent: OrderedDict[int, int] = OrderedDict()

    def _begun(self, count: int) -> SlotRequests:
        requests = np.zeros(count, _SLOT)
        requests["key"] = np.arange(self._drawn + 1, self._drawn + 1 + count, dtype=np.uint64) | np.uint64(self._prefix)
        self._drawn += count
        requests["decoder_length"] = requests["prompt_length"] = -1
        requests["known_since"] = np.inf
        return requests

    def _begin(self, requests: SlotRequests, slots: npt.NDArray[np.intp]) -> None:
        requests[slots] = self._begun(slots.size)

    def _grow(self, least: int) -> None:
        missing = least - self._requests.size
        if missing > 0:
            self._requests = np.concatenate([self._requests, self._begun(missing)])

    # Requests that the engine assigned.

    def assign(self, slot: int, key: int) -> None:
        """Set the request id of a slot. Positions continue from the request's earlier tokens."""
        self._grow(slot + 1)
        requests = self._requests
        if int(requests["key"][slot]) == key:
            if requests["is_over"][slot]:
                raise ContractError("request_id", "a slot whose request has not ended", key, rule=Rule.UNIQUE)
        else:
            self._leave(slot)
            elsewhere = np.flatnonzero(requests["key"] == np.uint64(key))
            for other in elsewhere.tolist():  # it moves
                self._absent[key] = int(requests["position"][other])
            self._begin(requests, np.append(elsewhere, slot))
            requests["key"][slot] = key
            requests["position"][slot] = self._absent.pop(key, 0)
        requests["is_assigned"][slot] = True

    def _leave(self, slot: int) -> None:
        """Keep an interrupted request's position, because it may resume. End other open requests by an added row."""
        requests = self._requests
        key, position = int(requests["key"][slot]), int(requests["position"][slot])
        if requests["is_over"][slot] or not np.isfinite(requests["known_since"][slot]):
            return
        if requests["is_assigned"][slot] and requests["is_interrupted"][slot]:
            self._absent[key] = position  # the request will resume, perhaps in another slot
            if len(self._absent) > _MOST_ABSENT:
                self._replaced.append((*self._absent.popitem(last=False), REPLACED))
            return
        self._replaced.append((key, position, REPLACED))

    # Steps.

    def fill(self, arrays: StepArrays, message: Message) -> None:
        """Set the requests of a target's rows, and add last rows for replaced requests."""
        count, now = message.slots, self._now()
        self._grow(count)
        requests = self._requests.copy()
        slots, statuses = requests[:count], np.asarray(arrays.statuses)
        has_tokens, is_quiet = arrays.token_counts > 0, statuses == RowStatus.IDLE
        replaced = _is_replaced(slots, message, has_tokens, now)
        ended = [*_still_open(slots, np.flatnonzero(replaced), now), *self._replaced]
        self._begin(slots, np.flatnonzero(replaced | slots["is_over"]))
        # Without lengths, a step has a token for each open request, so a request without a token has finished.
        is_left: Flags = np.ones(count, np.bool_)
        if message.lengths is not None:
            is_prefilling = message.lengths.decoder < message.lengths.prompt
            statuses[is_quiet & is_prefilling] = RowStatus.PREFILLING
            is_left = slots["is_interrupted"] | is_prefilling
        statuses[is_quiet & is_left & (slots["position"] > 0) & ~slots["is_assigned"]] = RowStatus.FINISHED_STOP
        if message.stop_flag <= 0:
            # Requests with draft proposals continue on another worker.
            is_last = True if arrays.proposal_counts is None else arrays.proposal_counts == 0
            statuses[np.isin(statuses, GOING_ON) & is_last] = RowStatus.FINISHED_STOP
        arrays.request_ids, arrays.positions = slots["key"].copy(), slots["position"].copy()
        slots["position"] += arrays.token_counts
        if message.lengths is not None:
            slots["decoder_length"][has_tokens] = message.lengths.decoder[has_tokens]
            slots["prompt_length"][has_tokens] = message.lengths.prompt[has_tokens]
        slots["known_since"] = np.minimum(slots["known_since"], now)
        slots["is_over"] = np.isin(statuses, OVER)
        slots["is_interrupted"] = (statuses == RowStatus.PREEMPTED) | (slots["is_interrupted"] & ~has_tokens)
        if ended:
            _add_rows(arrays, ended)
        self._requests, self._replaced = requests, []

    def lose(self, keys: list[int] | None = None) -> None:
        """End the given open requests with an error (by default all requests), and give their slots new requests."""
        requests = self._requests
        is_lost = np.isfinite(requests["known_since"]) & ~requests["is_over"]
        if keys is not None:
            is_lost &= np.isin(requests["key"], np.array(keys, np.uint64))
        slots = np.flatnonzero(is_lost)
        for slot in slots.tolist():
            key, position = int(requests["key"][slot]), int(requests["position"][slot])
            self._replaced.append((key, position, RowStatus.UNRECOVERABLE))
        self._begin(requests, slots)


def _is_replaced(slots: SlotRequests, message: Message, has_tokens: Flags, now: float) -> Flags:
    """Return a mask of the slots that have a new request although the earlier request has not ended."""
    goes_on = has_tokens & (slots["position"] > 0)
    found: Flags = slots["is_interrupted"] & goes_on
    if message.lengths is not None:
        before = slots["decoder_length"]
        # A request's length grows with every token, so a shorter length belongs to another request.
        is_another = (message.lengths.decoder <= before) | (message.lengths.prompt != slots["prompt_length"])
        found |= goes_on & (before >= 0) & is_another
    found |= now - slots["known_since"] >= _RENEW_SECONDS
    found &= ~slots["is_over"] & ~slots["is_assigned"]
    return found


def _still_open(requests: SlotRequests, slots: npt.NDArray[np.intp], now: float) -> Iterator[_Ended]:
    for slot in slots.tolist():
        if now - requests["known_since"][slot] < _FORGOTTEN_SECONDS:
            yield int(requests["key"][slot]), int(requests["position"][slot]), REPLACED


def _add_rows(arrays: StepArrays, ended: list[_Ended]) -> None:
    keys, positions, statuses = zip(*ended, strict=True)
    arrays.request_ids = np.append(arrays.request_ids, np.array(keys, np.uint64))
    arrays.positions = np.append(arrays.positions, positions)
    arrays.statuses = np.append(np.asarray(arrays.statuses), np.array(statuses, np.uint8))
    for name in ("token_counts", "proposal_counts", "scored", "top_ks"):
        of_slots = getattr(arrays, name)
        if of_slots is not None:
            setattr(arrays, name, np.append(of_slots, np.zeros(len(ended), of_slots.dtype)))
