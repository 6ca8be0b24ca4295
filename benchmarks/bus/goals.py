"""What was to be reached, and whether it was."""

from collections.abc import Iterator

from benchmarks.bus.lanes import KEYS, NATS, OURS
from benchmarks.outputs import Record

P50_US, P99_US = 1000.0, 3000.0
STEPS_S = 3000.0
MORE_A_ROW = 1.25
"""How many times as much a row may cost with the most requests open; a machine's own noise is in it."""
KEYS_STEPS_S = {0: 0.75, 20: 0.5}
"""By k, the least share of the steps/s without keys that are left with them."""
KEYS_P50 = 1.3
NATS_STEPS_S, NATS_P50_US = 0.5, 2000.0
"""The least share of the steps/s over ZeroMQ that is left over NATS at k = 0, and the most until delivery."""
MIB_A_MILLION_STEPS = 1.0


def goals_of(record: Record) -> list[Record]:
    """Return the goals, each with what was measured."""
    return [*_speed(record), *_keys(record), *_nats(record), *_scaling(record), *_memory(record)]


def _speed(record: Record) -> Iterator[Record]:
    for result in record["results"]:
        if result["peer"] != OURS:
            continue
        where = f"{result['transport']}, k = {result['top_k']}"
        late = result["latency_us"]
        yield _goal(f"p50 of publish to delivery, {where}", "us", late["50"], P50_US, at_most=True)
        yield _goal(f"p99 of publish to delivery, {where}", "us", late["99"], P99_US, at_most=True)
        if not result["top_k"]:
            measured = result["throughput"]["steps_s"]
            yield _goal(f"steps/s, {where}", "", measured, STEPS_S, at_most=False)


def _keys(record: Record) -> Iterator[Record]:
    for result in record["results"]:
        least = KEYS_STEPS_S.get(result["top_k"])
        if result["peer"] != KEYS or least is None or result["transport"] not in record["settings"]["transports"]:
            continue
        where = f"with keys / without, {result['transport']}, k = {result['top_k']}"
        yield _goal(f"steps/s {where}", "x", round(1 / result["ours_times_its_steps_s"], 3), least, at_most=False)
        yield _goal(f"p50 {where}", "x", result["its_times_our_p50"], KEYS_P50, at_most=True)


def _nats(record: Record) -> Iterator[Record]:
    for result in record["results"]:
        if result["peer"] != NATS or result["top_k"] or result["transport"] not in record["settings"]["transports"]:
            continue
        where = f"{result['transport']}, k = 0"
        share = round(1 / result["ours_times_its_steps_s"], 3)
        yield _goal(f"steps/s over NATS / ZeroMQ, {where}", "x", share, NATS_STEPS_S, at_most=False)
        late = result["latency_us"]["50"]
        yield _goal(f"p50 of publish to delivery over NATS, {where}", "us", late, NATS_P50_US, at_most=True)


def _scaling(record: Record) -> Iterator[Record]:
    costs = {
        each["value"]: each["receiver_cpu_us_a_row"] for each in record["scaling"] if each["axis"] == "open requests"
    }
    fewest, most = min(costs), max(costs)
    name = f"cost of a row with {most:,} open requests / {fewest:,}"
    yield _goal(name, "x", round(costs[most] / costs[fewest], 3), MORE_A_ROW, at_most=True)


def _memory(record: Record) -> Iterator[Record]:
    for name, process in record["memory"]["processes"].items():
        fit = process["fit"]
        # Only what is surely there counts as growth: twice the standard error is taken off.
        sure = round(max(0.0, fit["slope_mib"] - 2 * fit["error_mib"]), 3)
        goal = _goal(f"memory of the {name}, growth", "MiB/1M steps", sure, MIB_A_MILLION_STEPS, at_most=True)
        if record["memory"]["steps"] < _ENOUGH_STEPS:
            goal["met"] = None
        yield goal


_ENOUGH_STEPS = 1_000_000
"""In fewer, buffers and caches still fill, so a slope says nothing of what comes later."""


def _goal(goal: str, unit: str, measured: float, wanted: float, *, at_most: bool) -> Record:
    met = measured <= wanted if at_most else measured >= wanted
    text = f"at {'most' if at_most else 'least'} {wanted:,g}"
    return {"goal": goal, "unit": unit, "wanted": text, "measured": measured, "met": met}
