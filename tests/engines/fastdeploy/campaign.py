"""The differential run: random calls to the drop-in and to the kernel's queue, and the same tensors out.

`python -m tests.engines.fastdeploy.campaign --steps 100000` is the long form, which `make soak` runs.
"""

import argparse
import os
import secrets
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fastdeploy.theirs import FORMS, GETS
from tests.engines.fastdeploy import kernel
from tests.engines.fastdeploy.bus import KINDS, Beside, Getter, same_bytes, save, speaking, wait_for
from tests.engines.fastdeploy.engine import Steps, outputs
from tests.engines.fastdeploy.kernel import Array, Given, KernelQueue, is_flat, undefined
from tests.engines.fastdeploy.structs import STRUCTS, message_of, struct_of
from tokenbus_engines.fastdeploy.message import Kind, Message, unpacked
from tokenbus_engines.fastdeploy.process import PROCESS
from tokenbus_engines.fastdeploy.published import SavedMessage

_QUEUES = (1, 2)
_ASIDE = 7
"""The queue whose messages are looked at between the two sides."""
_OPS = tuple(GETS)
_MOST_WAITING = 12
_STRUCT_COLUMNS = 21
_ROUND = 1000


def run(form: str, steps: int, seed: int, *, most_slots: int = 512) -> int:
    """Do so many random steps to the drop-in and to FastDeploy's ops of a form; return how many were compared."""
    draw, engine = np.random.default_rng(seed), Steps(seed)
    with kernel.queue(form) as one, kernel.queue(form) as two, kernel.queue(form) as aside:
        beside = {number: Beside(queue) for number, queue in zip(_QUEUES, (one, two), strict=True)}
        crossed = Crossed(aside)
        for _ in range(steps):
            queue = int(draw.choice(_QUEUES))
            os.environ["INFERENCE_MSG_QUEUE_ID"] = str(queue)
            both = beside[queue]
            while len(both.kernel) and (len(both.kernel) >= _MOST_WAITING or draw.random() < 0.5):
                both.get()
            if not len(both.kernel) and draw.random() < 0.1:
                both.get_nothing(str(draw.choice(list(set(GETS.values())))))
            op = str(draw.choice(_OPS))
            given = _drawn(draw, engine, op, form, most_slots)
            both.save(op, given)
            if draw.random() < 0.3:
                os.environ["INFERENCE_MSG_QUEUE_ID"] = str(_ASIDE)
                crossed.compare(op, given)
        for queue, both in beside.items():
            os.environ["INFERENCE_MSG_QUEUE_ID"] = str(queue)
            both.get_all()
    return steps


def _drawn(draw: np.random.Generator, engine: Steps, op: str, form: str, most_slots: int) -> dict[str, Any]:
    """Return what an op of a form may be given."""
    slots = min(_slots(draw, most_slots), 256 if GETS[op] == "speculate_get_output" else 512)
    columns = int(draw.integers(1, _STRUCT_COLUMNS + 1))
    if op == "save_output_topk" and slots <= 8 and draw.random() < 0.2:
        columns = int(draw.integers(_STRUCT_COLUMNS, 2 * _STRUCT_COLUMNS))
    if GETS[op] == "speculate_get_output_topk" and FORMS.index(form) < FORMS.index("2.6"):
        columns = _STRUCT_COLUMNS  # before #7884 the op reads lines of so many, whatever it is given
    given = engine.any(op, slots, columns)
    given["rank_id"] = int(draw.choice([0, 0, 0, 1, 3]))
    if "save_each_rank" in given:
        given["save_each_rank"] = bool(draw.random() < 0.5)
    has_older = op not in {"mtp_save_first_token_with_topk", "mtp_save_first_token"}
    if has_older and draw.random() < 0.1:
        del given["preempted_idx"]
        if op == "speculate_save_output_topk" and draw.random() < 0.5:
            for name in ("seq_lens_decoder", "prompt_lens", "save_each_rank"):
                del given[name]
    return given


class Packed:
    """A message that FastDeploy saved, on its way into the drop-in's queue."""

    op, rank = "FastDeploy's save", 0

    def __init__(self, message: Message) -> None:
        """Take the message."""
        self.kind = message.kind
        self._message = message

    def pack(self, _: int, sequence: int, /) -> tuple[bytes, int]:
        """Return its bytes, of which no socket took any."""
        return self._message.packed(sequence, time.monotonic_ns()), 0

    def saved(self, data: bytes) -> SavedMessage:
        """Return it as it is shown to the bus."""
        return SavedMessage(data, None, is_first=False)


class Crossed:
    """One side of the drop-in with the other side of FastDeploy: what is between them is turned into the other's."""

    def __init__(self, aside: KernelQueue) -> None:
        """Look at what is between the sides in queues of its own."""
        self._ops = aside.ops
        self._getters = {op: Getter(op) for op in set(GETS.values())}
        self._outputs = {op: [outputs(op) for _ in range(3)] for op in set(GETS.values())}

    def compare(self, op: str, given: Given) -> None:
        """Save on both sides; get FastDeploy's message by both sides' gets, and the drop-in's by FastDeploy's."""
        kind, queue = KINDS[GETS[op]], self._ops.queues.of(op)
        packs = PROCESS.form.packs_slots if kind is Kind.SINGLE_SCORED else PROCESS.form.packs_flag
        getter, (beside_get, beside_save, crossed) = self._getters[GETS[op]], self._outputs[GETS[op]]
        if not self._ops.save(op, given, is_flat=is_flat(given)):
            return
        struct = np.zeros((), STRUCTS[kind])
        queue.receive(struct)
        message = message_of(kind, struct, packs=packs)
        PROCESS.sender().save(Packed(message))
        getter.get()
        self._get(op, struct, beside_get)
        self._same(
            f"{op}, our get", getter.outputs, beside_get, undefined(op, given) if kind is Kind.SPECULATED else []
        )
        save(op, given)
        wait_for(GETS[op])
        receiver = PROCESS.receiver(kind)
        received = receiver.peek(0.0)
        assert received is not None
        self._get(op, struct_of(unpacked(received.data), packs=packs), crossed)
        receiver.pop()
        self._get(op, struct, beside_save)
        self._same(f"{op}, our save", crossed, beside_save, undefined(op, given))

    def _get(self, op: str, struct: Array, into: list[Array]) -> None:
        self._ops.queues.of(op).send(struct)
        assert self._ops.get(GETS[op], into) > 0

    def _same(self, what: str, found: list[Any], expected: list[Any], places: list[tuple[int, Any]]) -> None:
        for at, (one, other) in enumerate(zip(found, expected, strict=True)):
            same_bytes(what, at, one, other, places)


def _slots(draw: np.random.Generator, most: int) -> int:
    """Return a number of slots, small mostly, and now and then as many as there may be."""
    return int(draw.choice([0, 1, 2, 3, int(draw.integers(1, 33)), int(draw.integers(1, most + 1)), most]))


def main() -> None:
    """Run, and say how it went."""
    parser = argparse.ArgumentParser(prog="python -m tests.engines.fastdeploy.campaign", description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000, help="of all forms together")
    parser.add_argument("--seed", type=int, default=secrets.randbits(31), help="repeat a run that differed")
    parser.add_argument("--form", choices=FORMS, action="append", help="only this form; may be repeated")
    options = parser.parse_args()
    forms = options.form or FORMS
    os.environ[kernel.NEEDED] = "1"
    for form in forms:
        for done in range(0, options.steps // len(forms), _ROUND):
            seed = options.seed + done
            again = f"--form {form} --steps {_ROUND} --seed {seed}"
            with tempfile.TemporaryDirectory(prefix="tb", dir="/tmp") as folder, speaking(form, Path(folder)):
                try:
                    run(form, _ROUND, seed)
                except BaseException:
                    sys.stdout.write(f"to repeat it: python -m tests.engines.fastdeploy.campaign {again}\n")
                    raise
        sys.stdout.write(f"{form}: {options.steps // len(forms)} steps, no difference\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
