"""Tensors that a get op fills, and where in them a message's tokens go."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus_contracts import ContractError, Rule
from tokenbus_services.worker.arrays import Host, on_host
from tokenbus_services.worker.fastdeploy.layout import TOKENS
from tokenbus_services.worker.fastdeploy.message import Integers, Message, Tensor


class Output:
    """A tensor of the caller's: `flat` is written to, and what it holds is the tensor's once it is stored."""

    def __init__(self, name: str, tensor: Tensor, size: int, dtype: npt.DTypeLike) -> None:
        """Take a tensor, which must be of that type and at least that large."""
        found: Host = on_host(name, tensor)
        if found.dtype != np.dtype(dtype):
            raise ContractError(name, np.dtype(dtype).name, found.dtype.name, rule=Rule.TYPE)
        if found.size < size:
            raise ContractError(name, f"at least {size} elements", found.size, rule=Rule.LENGTH)
        self._tensor = tensor
        self._is_array = found is tensor
        if self._is_array and not (found.flags.c_contiguous and found.flags.writeable):
            raise ContractError(name, "an array that is contiguous and may be written to", "another", rule=Rule.TYPE)
        self._shaped = found if self._is_array else np.array(found, order="C")
        self.flat: Host = self._shaped.reshape(-1)

    def store(self) -> None:
        """Let the tensor have what was written."""
        if not self._is_array:
            self._tensor.set_value(self._shaped)


class Entries(NamedTuple):
    """Where the elements of something ragged go: which slot each belongs to, and its place there."""

    slots: Integers
    places: Integers


def entries(counts: Integers, first: Integers | int = 0) -> Entries:
    """Return the entries of as many elements in each slot as counted, from a place on."""
    slots = np.repeat(np.arange(counts.size), counts)
    starts = np.cumsum(counts) - counts
    places = np.arange(slots.size) - np.repeat(starts - first, counts)
    return Entries(slots, places)


def counts_with_proposals(message: Message, most_slots: int) -> Integers:
    """Return the counts as that engine counts: draft ids that come with a token too; refuse what it has no room for."""
    if message.slots > most_slots:
        raise ContractError("message.slots", most_slots, message.slots, rule=Rule.MAX)
    proposals = message.proposal_counts
    counts = message.counts if proposals is None else message.counts + np.where(message.counts > 0, proposals, 0)
    beyond = np.flatnonzero(counts > TOKENS)
    if beyond.size:
        raise ContractError(f"message.counts[{int(beyond[0])}]", TOKENS, int(counts[beyond[0]]), rule=Rule.MAX)
    return counts


def token_entries(message: Message) -> tuple[Entries, Integers]:
    """Return where all ids of a message go, and the ids: those of its tokens, then those that come with them."""
    own = entries(message.token_counts)
    if message.proposal_counts is None or not message.proposal_ids.size:
        return own, message.token_ids
    others = entries(message.proposal_counts, message.token_counts)
    joined = Entries(*(np.concatenate(pair) for pair in zip(own, others, strict=True)))
    return joined, np.concatenate([message.token_ids, message.proposal_ids])
