"""A run as one record: what the JSON file holds, and what the tables, the figure and the page are made of."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import numpy as np

from benchmarks.bus.figures import cost, latency, rate_of, throughput
from benchmarks.bus.goals import goals_of
from benchmarks.bus.lanes import LANES, OURS, SYSV, TAKEN, Lane
from benchmarks.bus.memory import fit, measure_memory
from benchmarks.bus.orders import Order, Received, Sent, steps_of
from benchmarks.bus.pair import Pair
from benchmarks.bus.plan import Plan
from benchmarks.bus.tokenbus import RETENTION_ITEMS
from benchmarks.codec.fastdeploy_struct import STRUCT_BYTES
from benchmarks.errors import NotRunError, WrongDeliveryError
from benchmarks.machine import Placement, description
from benchmarks.outputs import Record
from benchmarks.sysv import queue_for
from benchmarks.workload import Case, truth

Progress = Callable[[str], None]
_Turns = dict[tuple[str, str, int], list[tuple[Sent, Received]]]


def run(plan: Plan, progress: Progress) -> Record:
    """Measure everything and return the record."""
    with ExitStack() as stack:
        absent: dict[str, str] = {}
        queue = 0
        try:
            # Before the processes: they are to be in the namespace that the queue is in.
            queue = stack.enter_context(queue_for(STRUCT_BYTES - np.dtype("i8").itemsize)).identity
        except NotRunError as error:
            absent = {lane.name: str(error) for lane in LANES if lane.transports == (SYSV,)}
        pair = stack.enter_context(Pair())
        bench = Bench(plan, pair, queue, progress)
        named = plan.lanes or tuple(lane.name for lane in LANES)
        results = bench.results([lane for lane in LANES if lane.name in named and lane.name not in absent])
        sections = bench.sections()
        scaling = bench.scaling()
        cores = pair.cores
    progress(f"memory: {plan.memory_steps:,} steps (a million takes minutes)")
    with Pair() as pair:  # with nothing in memory from what was measured before
        memory = measure_memory(pair, plan.transports[0], plan.memory_steps)
    record = {
        "benchmark": "bus",
        "machine": description(Placement.here(), vllm=False)
        | {"pinned": f"worker to core {cores[0]}, processor to core {cores[1]}" if cores else "no"},
        "settings": asdict(plan) | {"retention_items": RETENTION_ITEMS},
        "peers": [
            {
                "name": lane.name,
                "label": lane.label,
                "includes": lane.includes,
                "delivers": lane.delivers,
                "not_run": absent.get(lane.name),
            }
            for lane in LANES
        ],
        "results": results,
        "sections": sections,
        "scaling": scaling,
        "memory": {
            "steps": plan.memory_steps,
            "processes": {name: {"fit": fit(each)._asdict(), "samples": each} for name, each in memory.items()},
        },
    }
    return record | {"goals": goals_of(record)}


class Bench:
    """The turns of a run."""

    def __init__(self, plan: Plan, pair: Pair, queue: int, progress: Progress) -> None:
        """Take how much to measure, the processes, and the System V queue."""
        self._plan = plan
        self._pair = pair
        self._queue = queue
        self._progress = progress

    def results(self, lanes: list[Lane]) -> list[Record]:
        """Return each lane's latency and throughput, over each transport, at each k."""
        at_rate: _Turns = defaultdict(list)
        flat_out: _Turns = defaultdict(list)
        random = np.random.default_rng(self._plan.seed)
        mine = [(lane, transport) for lane in lanes for transport in self._transports(lane)]
        for number in range(self._plan.rounds):
            for case in self._plan.cases:
                for place in random.permutation(len(mine)).tolist():
                    lane, transport = mine[place]
                    what = f"round {number + 1}/{self._plan.rounds}, k = {case.top_k_name}: {lane.label}, {transport}"
                    self._progress(what)
                    key = (lane.name, transport, case.top_k or 0)
                    paced = {"steps": self._plan.latency_steps, "rate": self._plan.rate}
                    at_rate[key].append(self.turn(lane, transport, case, **paced))
                    flat_out[key].append(self.turn(lane, transport, case, seconds=self._plan.seconds))
        return list(self._results(lanes, at_rate, flat_out))

    def _results(self, lanes: list[Lane], at_rate: _Turns, flat_out: _Turns) -> Iterator[Record]:
        by_name = {lane.name: lane for lane in lanes}
        places = list(by_name)
        for key in sorted(at_rate, key=lambda each: (each[2], places.index(each[0]), each[1])):
            name, transport, top_k = key
            case = Case(*self._plan.cases[0][:2], top_k)
            size = by_name[name].message_bytes(steps_of(_order(case, self._plan.seed))[0])
            # What has one way, which Tokenbus did not go here, is compared with Tokenbus's first.
            ours = (OURS, transport if transport in self._plan.transports else self._plan.transports[0], top_k)
            pairs = zip(flat_out[key], flat_out[ours], strict=True)
            yield {
                "peer": name,
                "transport": transport,
                "top_k": top_k,
                "latency_us": latency(at_rate[key]),
                "throughput": throughput(flat_out[key], case.tokens, size),
                "ours_times_its_steps_s": _median([rate_of(us.at) / rate_of(its.at) for (_, its), (_, us) in pairs]),
                "its_times_our_p50": round(
                    latency(at_rate[key])["50"] / latency(at_rate[ours])["50"],
                    3,
                ),
            }

    def sections(self) -> list[Record]:
        """Return where the processor's main thread spends a step flat out."""
        found = []
        for lane in (lane for lane in LANES if lane.name in (OURS, TAKEN)):
            for case in self._plan.cases:
                self._progress(f"profile, k = {case.top_k_name}: {lane.label}")
                transport = self._plan.transports[0]
                _, received = self.turn(lane, transport, case, seconds=2 * self._plan.seconds, is_profiled=True)
                us = {name: round(value, 2) for name, value in received.sections.items()}
                found.append({"peer": lane.name, "transport": transport, "top_k": case.top_k, "us": us})
        return found

    def scaling(self) -> list[Record]:
        """Return what a step costs each process as it grows in each direction, and as more requests are open."""
        plan, base = self._plan, self._plan.cases[0]
        sizes: list[tuple[str, int, Case, int]] = [
            *(("rows", rows, base._replace(rows=rows), 0) for rows in plan.rows),
            *(("tokens a row", tokens, base._replace(tokens_per_row=tokens), 0) for tokens in plan.tokens),
            *(("k", width, base._replace(top_k=width), 0) for width in plan.widths),
            *(("open requests", most, base, most) for most in plan.open_requests),
        ]
        return [self._scaled(*size) for size in sizes]

    def _scaled(self, axis: str, value: int, case: Case, most: int) -> Record:
        self._progress(f"scaling: {axis} {value}")
        lane = LANES[0]
        options = {"steps": self._plan.scaling_steps, "open_requests": most}
        turns = [self.turn(lane, self._plan.transports[0], case, **options) for _ in range(self._plan.rounds)]
        receiver = cost([(received.cpu_ns, received.at.size) for _, received in turns])
        return {
            "axis": axis,
            "value": value,
            "rows": case.rows,
            "tokens_per_row": case.tokens_per_row,
            "top_k": case.top_k,
            "steps_s": _median([rate_of(received.at) for _, received in turns]),
            "sender_cpu_us": cost([(sent.cpu_ns, sent.at.size) for sent, _ in turns]),
            "receiver_cpu_us": receiver,
            "receiver_cpu_us_a_row": round(receiver / case.rows, 3),
        }

    def _transports(self, lane: Lane) -> list[str]:
        kept = [transport for transport in lane.transports if transport in self._plan.transports]
        return kept or list(lane.transports[:1])

    def turn(self, lane: Lane, transport: str, case: Case, **options: Any) -> tuple[Sent, Received]:  # noqa: ANN401
        """Let the two processes do one turn, or raise a WrongDeliveryError."""
        addresses = (self._pair.address(transport, name) for name in ("workers", "clients"))
        order = _order(case, self._plan.seed, *addresses, queue=self._queue, taking=lane.taking, **options)
        sent, received = lane.turn(self._pair, order)
        if sent.at.size != received.at.size:
            raise WrongDeliveryError(f"{lane.name}, {case}: {sent.at.size} steps went, {received.at.size} came")
        if lane.delivers and received.first != truth(steps_of(order)[0]):
            raise WrongDeliveryError(f"{lane.name}, {case}: the first step is not what the engine emitted")
        return sent, received


def _order(case: Case, seed: int, address: str = "", clients_address: str = "", **options: Any) -> Order:  # noqa: ANN401
    return Order(case=case, address=address, clients_address=clients_address, seed=seed, **options)


def _median(values: list[float]) -> float:
    return round(float(np.median(values)), 3)
