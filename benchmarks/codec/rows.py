"""What a reader pays for its rows: a step decoded and read, the rows alone, and lists of them, beside their peers."""

from collections.abc import Callable, Iterable, Sequence
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np

from benchmarks.codec.measure import STEADY, STEPS, no_garbage_collection
from benchmarks.codec.ours import message_of
from benchmarks.codec.peer import Peer
from benchmarks.codec.vllm import Installed, MsgspecShape, PerRequest
from benchmarks.workload import Case, Step, make_steps
from tokenbus_contracts import LogprobBatch, Row, decode

READ, LISTS, DECODED = "rows", "rows_lists", "decoded"
ROWS = (1, 256)
"""How many rows the steps have whose rows are read."""


class Reader(NamedTuple):
    """One line of the tables; what it reads is made before, untimed."""

    name: str
    label: str
    made: Callable[[Step], Any]
    read: Callable[[Any], None]


def readers(peers: Sequence[Peer]) -> list[Reader]:
    """Return the lines: ours, and vLLM's as far as it runs here."""
    others = [peer for peer in peers if isinstance(peer, PerRequest) and type(peer) in (MsgspecShape, Installed)]
    return [
        Reader(DECODED, "decode, rows", message_of, lambda message: _read(decode(message))),
        Reader(f"{DECODED}_lists", "decode, rows as lists", message_of, lambda message: _read_lists(decode(message))),
        *(
            Reader(f"{DECODED}_{peer.name}", f"{peer.short}: decode, outputs", peer.encoded, _outputs_of(peer))
            for peer in others
        ),
        Reader(READ, "rows", _decoded, _read),
        Reader(LISTS, "rows as lists", _decoded, _read_lists),
        Reader(
            "tuples", "named tuples as long", lambda step: [tuple(row) for row in _decoded(step).rows()], _make_tuples
        ),
    ]


def measure_rows(case: Case, peers: Sequence[Peer], turns: int, seed: int) -> dict[str, float]:
    """Return each line's median microseconds a row; the lines take turns in an order drawn anew for every round."""
    steps = make_steps(case, STEPS, seed)
    for peer in peers:
        peer.prepare(steps)
    lines = readers(peers)
    random = np.random.default_rng(seed)
    samples: dict[str, list[int]] = {line.name: [] for line in lines}
    with no_garbage_collection():
        for turn in range(turns * STEADY):
            for at in random.permutation(len(lines)):
                line = lines[at]
                made = line.made(steps[turn % STEPS])
                start = perf_counter_ns()
                line.read(made)
                samples[line.name].append(perf_counter_ns() - start)
    return {name: round(float(np.median(taken)) / 1e3 / case.rows, 3) for name, taken in samples.items()}


def _decoded(step: Step) -> LogprobBatch:
    return decode(message_of(step))


def _read(batch: LogprobBatch) -> None:
    for row in batch.rows():
        row.key, row.position, row.status, row.token_ids, row.logprobs, row.ranks  # noqa: B018


def _read_lists(batch: LogprobBatch) -> None:
    for row in batch.rows():
        row.token_ids.tolist()
        row.logprobs.tolist()
        row.ranks.tolist()
        if row.alternative_token_ids.size:
            row.alternative_token_ids.tolist()
            row.alternative_logprobs.tolist()


def _make_tuples(values: Iterable[Iterable[Any]]) -> None:
    for each in values:
        Row(*each)


def _outputs_of(peer: PerRequest) -> Callable[[Any], None]:
    def read(frames: list[Any]) -> None:
        for output in peer.decoded(frames):
            output.request_id, output.new_token_ids, output.finish_reason  # noqa: B018
            _ids, _logprobs, _ranks = output.new_logprobs[:3]

    return read
