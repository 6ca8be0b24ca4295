"""Measure what a step costs in a recording and in Parquet: `python -m benchmarks.recording`.

Steps go where `tokenbus record` writes them, as its file and as Parquet with the recording of the unfinished part
beside it, and from a recording through `tokenbus export`, to a row for each token and for each request. Beside them is
what a program writes that makes a dict for each token and hands these to pyarrow. What is measured is `process_time`,
of all threads together; requests have 300 tokens.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.codec.ours import batch_of
from benchmarks.report import Report, Row, progress
from benchmarks.workload import HEADLINE_ROWS, HEADLINE_TOKENS, TOP_KS, Case, make_steps
from tokenbus_contracts import LogprobBatch, RowStatus, encode
from tokenbus_contracts.generated.stream_pb2 import Hello, PayloadKind, StreamLimits, WorkerRole
from tokenbus_services.cli.record import Files
from tokenbus_services.items import StreamItem, read_recording
from tokenbus_services.parquet import RequestFile, TokenFile

_DIFFERENT_STEPS = 200
_STEPS_OF_REQUEST = 100
_PART_BYTES = 1 << 27
_NAMES = ("record", "record, Parquet", "export, tokens", "export, requests", "a dict a token")

Write = Callable[[Sequence[StreamItem], Path], None]


def main(arguments: Sequence[str] | None = None) -> None:
    report = Report("recording", __doc__)
    add = report.parser.add_argument
    add("--rounds", type=int, default=5, metavar="N", help="how many rounds (5)")
    add("--steps", type=int, default=1000, metavar="N", help="steps of each (1000)")
    options = report.parse(arguments)
    if options.quick:
        options.rounds, options.steps = 1, 2 * _STEPS_OF_REQUEST
    report.say(f"{options.rounds} round(s) in turn, medians, {options.steps} steps each.")
    rows = []
    for top_k in TOP_KS:
        case = Case(HEADLINE_ROWS, HEADLINE_TOKENS, top_k)
        progress(str(case))
        rows += _rows(case, list(_items(case, options.steps)), options.rounds)
    report.table(rows)
    report.write()


def _items(case: Case, count: int) -> Iterator[StreamItem]:
    """Yield steps of requests that end and are followed by others."""
    limits = StreamLimits(max_message_bytes=1 << 21, max_rows=512, max_tokens_per_row=8, max_top_k=20)
    role = WorkerRole.WORKER_ROLE_MIXED
    hello = Hello(schema_major=1, worker_id="worker-0", role=role, limits=limits, first_sequence=1, next_sequence=1)
    steps = make_steps(case, min(count, _DIFFERENT_STEPS), seed=1)
    for number in range(count):
        made = batch_of(steps[number % len(steps)])
        request, place = divmod(number, _STEPS_OF_REQUEST)
        ends = place == _STEPS_OF_REQUEST - 1
        columns = made.columns | {
            "request_keys": np.arange(case.rows, dtype="u8") + (1 << 40) * (request + 1),
            "positions": np.full(case.rows, place * case.tokens_per_row, "u4"),
            "statuses": np.full(case.rows, RowStatus.FINISHED_LENGTH if ends else RowStatus.ACTIVE, "u1"),
        }
        header = made.header._replace(sequence=number + 1, step=number + 1)
        data = encode(LogprobBatch.of_views(header, columns))
        yield StreamItem(hello, 1, number + 1, PayloadKind.PAYLOAD_KIND_LOGPROB_BATCH, data)


def _rows(case: Case, items: Sequence[StreamItem], rounds: int) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="tb") as name:
        folder, source = Path(name), Path(name, "source")
        _record(items, source)
        ways: list[Write] = [_record, partial(_record, part_bytes=_PART_BYTES)]
        ways += [partial(_export, source, kind) for kind in (TokenFile, RequestFile)]
        found: dict[str, list[float]] = {each: [] for each in _NAMES}
        sizes: dict[str, float] = {}
        for number in range(rounds):
            for way, each in zip((*ways, _dicts), _NAMES, strict=True):
                mine = items[: _STEPS_OF_REQUEST // 5] if way is _dicts else [*map(_again, items)]
                path = folder / f"{number} {each}"
                begin = time.process_time()
                way(mine, path)
                found[each].append((time.process_time() - begin) / len(mine) * 1e6)
                files = path.iterdir() if path.is_dir() else [path]
                sizes[each] = sum(file.stat().st_size for file in files) / len(mine) / case.tokens
    ours = median(found["record, Parquet"])
    return [
        {
            "k": case.top_k_name,
            "what": each,
            "us a step": median(values),
            "steps/s of one core": round(1e6 / median(values)),
            "bytes a token": sizes[each],
            "times record, Parquet": median(values) / ours,
        }
        for each, values in found.items()
    ]


def _again(item: StreamItem) -> StreamItem:
    """Return an item whose payload was not decoded yet."""
    return StreamItem(item.hello, item.epoch, item.sequence, item.kind, item.payload)


def _record(items: Sequence[StreamItem], path: Path, part_bytes: int = 0) -> None:
    files = Files(str(path), part_bytes)
    for item in items:
        files.write(item)
    files.close()


def _export(source: Path, kind: type[TokenFile], _: Sequence[StreamItem], path: Path) -> None:
    file = kind(path)
    for item in read_recording(source):
        file.add(item)
    file.close()


def _dicts(items: Sequence[StreamItem], path: Path) -> None:
    tokens = [
        {
            "request_id": row.key,
            "position": row.position + place,
            "token_id": token_id,
            "logprob": logprob,
            "rank": rank,
            "alternative_token_ids": ids,
            "alternative_logprobs": logprobs,
        }
        for item in items
        if item.batch is not None
        for row in item.batch.rows()
        for place, (token_id, logprob, rank, ids, logprobs) in enumerate(
            zip(
                row.token_ids.tolist(),
                row.logprobs.tolist(),
                row.ranks.tolist(),
                row.alternative_token_ids.tolist(),
                row.alternative_logprobs.tolist(),
                strict=True,
            )
        )
    ]
    pq.write_table(pa.Table.from_pylist(tokens), path, compression="zstd")


if __name__ == "__main__":
    main()
