"""What must come of the demo's requests: the same requests in an engine of this process, without any bus."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from tokenbus_contracts import BatchKind, Limits, Row
from tokenbus_contracts.generated.request_pb2 import Generate
from tokenbus_services.cli.demonstration.asking import Answer
from tokenbus_services.settings import Settings
from tokenbus_services.worker import StepAssembler, default_engine

Truth = dict[int, list[Row]]
_COLUMNS = ("token_ids", "logprobs", "ranks", "alternative_token_ids", "alternative_logprobs")


def computed(wanted: Iterable[Generate], limits: Limits) -> Truth:
    """Return each request's rows, by its key: with one seed the engine gives the same numbers wherever it runs."""
    engine = default_engine("ngram", Settings(limits=limits))
    assembler = StepAssembler(limits, engine.vocabulary_size)
    for generate in wanted:
        engine.admit(generate)
    rows: Truth = defaultdict(list)
    while engine.has_work:
        for arrays in engine.step():
            for batch in assembler.assemble(arrays):
                if batch.header.kind is BatchKind.TARGET:
                    for row in batch.rows():
                        rows[row.key].append(row)
    return rows


def differing(answers: Sequence[Answer], truth: Truth) -> int:
    """Return how many answers are not, bit by bit, what they must be: ids, logprobs, ranks and alternatives."""
    return sum(not _same(answer.rows, truth.get(answer.generate.request_key, [])) for answer in answers)


def _same(came: Sequence[Row], true: Sequence[Row]) -> bool:
    ends = [rows[-1].status if rows else None for rows in (came, true)]
    return ends[0] == ends[1] and all(_joined(came, name) == _joined(true, name) for name in _COLUMNS)


def _joined(rows: Sequence[Row], column: str) -> bytes:
    parts = [np.asarray(getattr(row, column)).ravel() for row in rows if row.token_ids.size]
    return np.concatenate(parts).tobytes() if parts else b""
