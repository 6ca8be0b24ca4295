"""Our save with FastDeploy's get, and the other way round: the message between them is converted."""

import time

import numpy as np

from tests.engines.fastdeploy.bus import KINDS, Getter, same_bytes, save, stained, wait_for
from tests.engines.fastdeploy.kernel import KernelQueue, is_flat
from tests.engines.fastdeploy.structs import STRUCTS, message_of, struct_of
from tests.engines.fastdeploy.theirs import GETS, PACKS_FLAG, PACKS_SLOTS
from tests.engines.fastdeploy.undefined import Array, Given, Mask, beyond, undefined
from tokenbus_engines.fastdeploy.message import Kind, Message, unpacked
from tokenbus_engines.fastdeploy.process import PROCESS
from tokenbus_engines.fastdeploy.published import SavedMessage


class Packed:
    """A message that FastDeploy saved, on its way into the drop-in's queue."""

    op, rank = "FastDeploy's save", 0

    def __init__(self, message: Message) -> None:
        self.kind = message.kind
        self._message = message

    def pack(self, _: int, sequence: int, /) -> tuple[bytes, int]:
        """Return its bytes, of which no socket took any."""
        return self._message.packed(sequence, time.monotonic_ns()), 0

    def saved(self, data: bytes) -> SavedMessage:
        """Return it as it is shown to the bus."""
        return SavedMessage(data, None, is_first=False)


class Crossed:
    """Compares each side of the drop-in with FastDeploy's, in queues of its own that are empty before and after."""

    def __init__(self, aside: KernelQueue) -> None:
        """Use an id's queues in the kernel; the environment names those of the drop-in."""
        self._ops = aside.ops
        self._getters = {op: Getter(op) for op in set(GETS.values())}
        self._crossed = {op: stained(op) for op in self._getters}
        self._beside_get, self._beside_save = ({op: stained(op) for op in self._getters} for _ in range(2))

    def compare(self, op: str, given: Given, message_id: int = 1) -> None:
        """Save on both sides; get FastDeploy's message by both sides' gets, and the drop-in's by FastDeploy's get."""
        form, get = self._ops.form, GETS[op]
        kind = KINDS[get]
        packs = form in (PACKS_SLOTS if kind is Kind.SINGLE_SCORED else PACKS_FLAG)
        if not self._ops.save(op, given, message_id=message_id, is_flat=is_flat(given)):
            return
        struct = np.zeros((), STRUCTS[kind])
        self._ops.queues.of(op).receive(struct)
        for beside in (self._beside_get, self._beside_save):
            self._get(get, struct, beside[get])

        PROCESS.sender().save(Packed(message_of(kind, struct, packs=packs)))
        getter = self._getters[get]
        getter.get()
        mask = beyond(struct) if kind is Kind.SPECULATED else []
        self._same(f"their {op}, our get", getter.outputs, self._beside_get[get], mask)

        save(op, given)
        wait_for(get)
        receiver = PROCESS.receiver(kind)
        received = receiver.peek(0.0)
        assert received is not None
        self._get(get, struct_of(unpacked(received.data), packs=packs), self._crossed[get])
        receiver.pop()
        mask = undefined(form, op, given)
        self._same(f"our {op}, their get", self._crossed[get], self._beside_save[get], mask)

    def _get(self, op: str, struct: Array, into: list[Array]) -> None:
        self._ops.queues.of(op).send(struct)
        assert self._ops.get(op, into) > 0

    def _same(self, what: str, found: list[Array], expected: list[Array], mask: Mask) -> None:
        for at, (one, other) in enumerate(zip(found, expected, strict=True)):
            same_bytes(what, at, one, other, mask)
