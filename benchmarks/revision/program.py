"""What a revision's process runs: each line that it reads is an order, and each that it writes what that took."""

import json
import sys
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np

from benchmarks.revision.order import BusOrder, CodecOrder
from benchmarks.workload import VOCABULARY_SIZE, Case, make_steps
from tokenbus_contracts import BatchHeader, LogprobBatch, Scoring, ValueKind, decode, encode, native

_SEED = 1
_SCORES = ("logprobs", "ranks", "alternative_token_ids", "alternative_logprobs")


def main() -> None:
    if not native.available():
        raise SystemExit("native: the compiled check in both revisions, got none in one of them")
    orders: Mapping[str, Callable[..., Any]] = {"CodecOrder": _codec, "BusOrder": _bus}
    for line in sys.stdin:
        kind, *values = json.loads(line)
        print(json.dumps(orders[kind](*values)), flush=True)


def _codec(*values: Any) -> float:  # noqa: ANN401 - JSON
    order = CodecOrder(*values)
    call = _operations(order._replace(operation="", calls=0))[order.operation]
    began = time.process_time_ns()
    for _ in range(order.calls):
        call()
    return (time.process_time_ns() - began) / order.calls / 1e3


def _bus(*values: Any) -> tuple[float, ...]:  # noqa: ANN401 - JSON
    from benchmarks.bus.pair import Order  # noqa: PLC0415 - an older revision has another bus than these know
    from benchmarks.bus.turns import IPC, OURS, turn  # noqa: PLC0415 - as above

    order = BusOrder(*values)
    done = turn(_pair(), OURS, IPC, Order(case=Case(256, 3, order.top_k), seed=_SEED, steps=order.steps))
    return tuple(side.cpu_ns / 1e3 / side.at.size for side in done)


@cache
def _pair() -> Any:  # noqa: ANN401 - as above
    from benchmarks.bus.pair import Pair  # noqa: PLC0415 - as above

    return Pair()


@cache
def _operations(order: CodecOrder) -> dict[str, Callable[[], object]]:
    header = BatchHeader(
        "worker-0", epoch=1, sequence=1, step=1, step_rows=order.rows, vocabulary_size=VOCABULARY_SIZE,
        value_kind=ValueKind.UNSPECIFIED if order.top_k is None else ValueKind.RAW_LOGPROBS,
    )  # fmt: skip
    columns = _columns(order)
    batch = LogprobBatch(header, **columns)
    data = encode(batch)
    decoded, half = decode(data), np.arange(0, order.rows, 2)
    return {
        "make": lambda: LogprobBatch(header, **columns),
        "encode": lambda: encode(batch),
        "decode": lambda: decode(data),
        "decode and read": lambda: list(decode(data).rows()),
        "select": lambda: decoded.select(half),
    }


def _columns(order: CodecOrder) -> dict[str, Any]:
    (step,) = make_steps(Case(order.rows, order.tokens, order.top_k or 0), 1, _SEED)
    columns = dict(step.columns)
    if order.top_k is None:
        columns = {name: values for name, values in columns.items() if name not in _SCORES}
        columns["scorings"] = np.full(order.rows, Scoring.NONE, "u1")
    return columns


if __name__ == "__main__":
    main()
