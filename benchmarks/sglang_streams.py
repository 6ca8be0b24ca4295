"""Measure what a stream of SGLang's /generate costs by its length: `python -m benchmarks.sglang_streams`.

Each of its events has all that came before it. They are written here from steps at hand, without a bus and a socket.
"""

import time
from collections.abc import Sequence
from statistics import median

from benchmarks.report import Report, Row
from tests.services.builders import settings
from tokenbus.testing import RowShape, batch
from tokenbus_contracts import LogprobBatch, RowStatus, Scoring
from tokenbus_services.gateway.buffers import Buffers
from tokenbus_services.gateway.completion_request import CompletionRequest, Reader
from tokenbus_services.gateway.rendered_step import RenderedStep
from tokenbus_services.gateway.sglang_format import SglangFormat
from tokenbus_services.gateway.sse import StreamedAnswer
from tokenbus_services.gateway.vocabulary import Vocabulary, vocabulary_of

_LENGTHS = (256, 1024, 4096)
_ROUNDS = 3
_CASES: dict[str, int | None] = {"none": None, "k = 0": 0, "k = 20": 20}


def main(arguments: Sequence[str] | None = None) -> None:
    report = Report("sglang_streams", __doc__)
    options = report.parse(arguments)
    chosen, vocabulary = settings(), vocabulary_of("ngram")
    reader, rows = Reader(chosen, vocabulary), []
    for name, k in _CASES.items():
        for length in _LENGTHS[:1] if options.quick else _LENGTHS:
            body = {"input_ids": [1], "stream": True, "return_logprob": k is not None, "top_logprobs_num": k or 0}
            asked = reader.sglang_generation(body | {"sampling_params": {"max_new_tokens": length}})
            steps = [_step(position, length, k) for position in range(length)]
            found = [_written(asked, steps, vocabulary) for _ in range(1 if options.quick else _ROUNDS)]
            rows.append(_row(name, length, median(seconds for seconds, _ in found), found[0][1]))
    report.table(rows)
    report.write()


def _row(name: str, length: int, seconds: float, size: int) -> Row:
    return {
        "logprobs": name,
        "tokens": length,
        "MB": size / 1e6,
        "processor time, ms": seconds * 1e3,
        "us a token": seconds / length * 1e6,
    }


def _step(position: int, length: int, k: int | None) -> LogprobBatch:
    status = RowStatus.FINISHED_LENGTH if position == length - 1 else RowStatus.ACTIVE
    scoring = Scoring.NONE if k is None else Scoring.FULL
    return batch([RowShape(1, position, 1, status, scoring=scoring, top_k=k or 0)], step=position + 1)


def _written(asked: CompletionRequest, steps: Sequence[LogprobBatch], vocabulary: Vocabulary) -> tuple[float, int]:
    """Return the processor time that a stream takes, and its bytes."""
    answer = StreamedAnswer(asked, SglangFormat(asked, 1), settings().gateway, Buffers(2**40))
    answer.begin(lambda: None)
    views = [RenderedStep(step, vocabulary) for step in steps]
    size, (listener,) = 0, answer.listeners
    began = time.thread_time()
    for view in views:
        listener.take(view, 0)
        size += len(answer.outbox.take(2**30).data)
    return time.thread_time() - began, size


if __name__ == "__main__":
    main()
