"""Trace: where the time of each step goes, hop by hop, and what its slowest steps have in common.

The methods between two hops are wrapped in both processes, for the turn alone. All stamps are of the monotonic clock,
which the processes of a machine share; a second clock, of the thread's processor time, tells work from waiting.
"""

import gc
import time
from array import array
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from benchmarks.bus import tokenbus
from benchmarks.bus.figures import latency
from benchmarks.bus.orders import BUFFERS, BY_STEP, Order, Received, Sent, Stamps
from benchmarks.bus.pair import Pair, TurnFailedError
from benchmarks.bus.peers import Tell, receive_raw, send_raw
from benchmarks.bus.plan import Plan
from benchmarks.machine import Placement, description
from benchmarks.outputs import Record
from benchmarks.paint import Paint
from benchmarks.workload import Case
from tokenbus_services.bus.guard import Guard
from tokenbus_services.bus.sockets import LoopSocket
from tokenbus_services.bus.zeromq import ZeroMQConnection
from tokenbus_services.link import Link
from tokenbus_services.processor.buffers import StepQueue
from tokenbus_services.processor.core import Core
from tokenbus_services.processor.stream import Stream
from tokenbus_services.processor.worker_connections import WorkerConnections
from tokenbus_services.worker import Publisher

Pauses = dict[str, npt.NDArray[np.int64]]
"""By what it was, a line of when each began, and one of when it ended."""


class Hop(NamedTuple):
    """What is between two stamps."""

    name: str
    what: str
    is_work: bool
    """Whether both are of one thread, so that its processor time is known."""


HOPS = (
    Hop("batch", "the engine's arrays become a batch", is_work=False),
    Hop("encode", "publish() encodes and retains it, and wakes the link", is_work=True),
    Hop("wake the link", "the link's thread goes on: a wake-up, and the GIL", is_work=False),
    Hop("frame", "the link finds the item, and makes its checksum and its frame", is_work=True),
    Hop("ZeroMQ", "two I/O threads, the kernel, and the processor's event loop", is_work=False),
    Hop("receive", "the processor's task goes on and has the message", is_work=True),
    Hop("read", "frame, checksum, decoding, order and credit", is_work=True),
    Hop("hand out", "assembly, settling, each request's row in its buffer", is_work=True),
)
READER = Hop("reader", "the task that reads steps() goes on and has the step", is_work=False)
_ITEM_PARTS = 2
_WARM, _SLOW = 0.1, 99.0


@dataclass(slots=True)
class Noted:
    """What one process noted in a turn, beside what it answers."""

    answer: Any
    stamps: dict[str, Stamps]
    """By name, a line of the monotonic clock and one of the thread's processor time, in nanoseconds."""
    pauses: Pauses


class Notes:
    """Notes the time at each hop while `with` lasts."""

    def __init__(self) -> None:
        """Begin without a stamp."""
        self._stamps: dict[str, array[int]] = {}
        self._pauses: dict[str, array[int]] = {}
        self._gc_began = 0
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """Wrap what is traced."""
        self._wrap(Publisher, "publish", before="publish")
        self._wrap(Link, "wake", before="queued")
        self._wrap(Link, "_send_now", before="taken up")
        self._wrap(ZeroMQConnection, "send", before="framed", has_parts_at=1)
        self._wrap(LoopSocket, "_check", before="readable")
        self._wrap(WorkerConnections, "receive", before="received", has_parts_at=2)
        self._wrap(Stream, "take", after="read")
        self._wrap(tokenbus.Taker, "_step", before="delivered")
        self._wrap(Guard, "_check", pause="guard")
        self._wrap(Core, "tick", pause="tick")
        self._replace(StepQueue, "get", self._noting_get(StepQueue.get))
        gc.callbacks.append(self._collected)
        self._stack.callback(gc.callbacks.remove, self._collected)
        return self

    def __exit__(self, *_: object) -> None:
        """Let all be as it was."""
        self._stack.close()

    def noted(self, answer: Sent | Received) -> Noted:
        """Return what was noted, beside an answer."""
        stamps, pauses = (
            {name: np.array(pairs, np.int64).reshape(-1, 2).T for name, pairs in noted.items()}
            for noted in (self._stamps, self._pauses)
        )
        return Noted(answer, stamps, pauses)

    def _wrap(  # noqa: PLR0913 - each but the first two is given by name
        self, owner: type, name: str, *, before: str = "", after: str = "", pause: str = "", has_parts_at: int = 0
    ) -> None:
        """Note each call of a method; with `has_parts_at` only those whose argument there is an item's message."""
        called = getattr(owner, name)

        def noting(*arguments: Any) -> Any:  # noqa: ANN401 - whatever the method takes
            if before and (not has_parts_at or len(arguments[has_parts_at]) == _ITEM_PARTS):
                self._stamp(before)
            began = time.monotonic_ns() if pause else 0
            returned = called(*arguments)
            if after:
                self._stamp(after)
            if pause:
                self._pause(pause, began)
            return returned

        self._replace(owner, name, noting)

    def _noting_get(self, called: Callable[..., Any]) -> Callable[..., Any]:
        async def get(queue: StepQueue) -> Any:  # noqa: ANN401 - a step
            step = await called(queue)
            self._stamp("taken")
            return step

        return get

    def _replace(self, owner: type, name: str, by: Callable[..., Any]) -> None:
        self._stack.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, by)

    def _stamp(self, name: str) -> None:
        self._stamps.setdefault(name, array("q")).extend((time.monotonic_ns(), time.thread_time_ns()))

    def _pause(self, name: str, began: int) -> None:
        self._pauses.setdefault(name, array("q")).extend((began, time.monotonic_ns()))

    def _collected(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            self._gc_began = time.monotonic_ns()
        else:
            self._pause("gc", self._gc_began)


def send(order: Order) -> Noted:
    """Publish the steps, and note their hops."""
    with Notes() as notes:
        return notes.noted(tokenbus.send(order))


def receive(order: Order, tell: Tell) -> Noted:
    """Run a processor, and note the steps' hops."""
    with Notes() as notes:
        return notes.noted(tokenbus.receive(order, tell))


@dataclass(frozen=True, slots=True)
class Traced:
    """The steps of one turn or of several, in microseconds."""

    hops: npt.NDArray[np.float64]
    """A line for each hop, a column for each step."""
    work: npt.NDArray[np.float64]
    """The processor time in it, where that is known."""
    hits: dict[str, npt.NDArray[np.bool_]]
    """By kind of pause, whether one was while the step was on its way."""

    @property
    def late(self) -> npt.NDArray[np.float64]:
        """How long each step took in all."""
        late: npt.NDArray[np.float64] = self.hops.sum(axis=0)
        return late


def trace(pair: Pair, order: Order) -> Traced:
    """Let the two processes do one turn, and return what is known of its steps, without the first tenth."""
    noted = pair.turn(send, receive, order)
    return traced(*noted, has_reader=order.taking == BY_STEP)


def traced(worker: Noted, processor: Noted, *, has_reader: bool) -> Traced:
    """Return the hops of a turn's steps."""
    count = worker.answer.at.size

    def each(noted: Noted, name: str) -> Stamps:
        stamps = noted.stamps[name]
        if stamps.shape[1] <= count:
            raise TurnFailedError(f"{name}: {stamps.shape[1]} stamps of {count} steps")
        return stamps[:, :count]

    def last(noted: Noted, name: str, until: Stamps) -> Stamps:
        """Return the last stamp until each of others: one wake-up may serve several steps."""
        stamps = noted.stamps[name]
        return stamps[:, np.maximum(0, np.searchsorted(stamps[0], until[0], "right") - 1)]

    begun = np.stack([worker.answer.at, np.zeros(count, np.int64)])
    publish, framed = each(worker, "publish"), each(worker, "framed")
    queued = worker.stamps["queued"][:, np.searchsorted(worker.stamps["queued"][0], publish[0])]
    received, read, delivered = (each(processor, name) for name in ("received", "read", "delivered"))
    points = [begun, publish, queued, last(worker, "taken up", framed), framed]
    points += [last(processor, "readable", received), received, read, delivered]
    if has_reader:
        points.append(each(processor, "taken"))
    at, spent = np.moveaxis(np.stack(points), 1, 0)
    at = np.maximum.accumulate(at, axis=0)  # a wake-up before the step's own hop was for the one before
    pauses = {f"worker {name}": each for name, each in worker.pauses.items()}
    pauses |= {f"processor {name}": each for name, each in processor.pauses.items()}
    warm = slice(int(count * _WARM), None)
    hits = {name: _overlaps(at[0], at[-1], *pause)[warm] for name, pause in pauses.items()}
    return Traced(np.diff(at, axis=0)[:, warm] / 1e3, np.diff(spent, axis=0)[:, warm] / 1e3, hits)


def _overlaps(began: Stamps, ended: Stamps, pause_began: Stamps, pause_ended: Stamps) -> npt.NDArray[np.bool_]:
    """Tell whether a pause was within each interval; the pauses are in order."""
    first = np.searchsorted(pause_ended, began)
    has: npt.NDArray[np.bool_] = np.append(pause_began, np.iinfo(np.int64).max)[first] < ended
    return has


def joined(turns: list[Traced]) -> Traced:
    """Return the steps of several turns."""
    names = sorted({name for turn in turns for name in turn.hits})
    hits = {
        name: np.concatenate([turn.hits.get(name, np.zeros(turn.late.size, np.bool_)) for turn in turns])
        for name in names
    }
    hops, work = (np.concatenate(parts, axis=1) for parts in ([t.hops for t in turns], [t.work for t in turns]))
    return Traced(hops, work, hits)


def figures(some: Traced, *, has_reader: bool) -> dict[str, Any]:
    """Return each hop's percentiles, and what the slowest 1 % of the steps have more of, in microseconds."""
    late = some.late
    is_slow = late >= np.percentile(late, _SLOW)
    hops = []
    for hop, took, work in zip((*HOPS, READER) if has_reader else HOPS, some.hops, some.work, strict=True):
        p50, p99 = np.percentile(took, (50, 99))
        hops.append(
            {
                "hop": hop.name,
                "what": hop.what,
                "p50": round(float(p50), 1),
                "p99": round(float(p99), 1),
                "work": round(float(np.median(work)), 1) if hop.is_work else None,
                "more_when_slow": round(float(np.mean(took[is_slow]) - p50), 1),
            }
        )
    return {
        "steps": int(late.size),
        "p50": round(float(np.percentile(late, 50)), 1),
        "p99": round(float(np.percentile(late, 99)), 1),
        "hops": hops,
        "pauses": {
            name: {
                "all": round(float(hit.mean()), 4),
                "slow": round(float(hit[is_slow].mean()), 4),
                "by_chance": round(min(1.0, float(hit.mean() * late[is_slow].mean() / late.mean())), 4),
            }
            for name, hit in some.hits.items()
        },
    }


def run(pair: Pair, plan: Plan, progress: Callable[[str], None]) -> Record:
    """Trace steps that are taken from the buffers, and such that are read by steps(), in turn."""
    turns: dict[str, list[Traced]] = {BUFFERS: [], BY_STEP: []}
    raw = []
    transport, case = plan.transports[0], plan.cases[0]
    for number in range(plan.rounds):
        progress(f"trace, round {number + 1}/{plan.rounds}")
        for taking, done in turns.items():
            done.append(trace(pair, _order(pair, plan, case, transport, taking)))
        raw.append(pair.turn(send_raw, receive_raw, _order(pair, plan, case, transport, BUFFERS)))
    return {
        "benchmark": "bus trace",
        "machine": description(Placement.here(), vllm=False),
        "settings": asdict(plan),
        "ways": {taking: figures(joined(done), has_reader=taking == BY_STEP) for taking, done in turns.items()},
        "raw": latency(raw),
    }


def _order(pair: Pair, plan: Plan, case: Case, transport: str, taking: str) -> Order:
    address, clients_address = (pair.address(transport, name) for name in ("workers", "clients"))
    pace: dict[str, Any] = {"steps": plan.latency_steps, "rate": plan.rate}
    return Order(case=case, address=address, clients_address=clients_address, seed=plan.seed, taking=taking, **pace)


_NAMES = {BUFFERS: "rows into the buffers of their requests", BY_STEP: "steps()"}


def render(record: Record, paint: Paint) -> str:
    """Return the tables."""
    settings = record["settings"]
    raw = record["raw"]
    lines = []
    for taking, way in record["ways"].items():
        head = f"{_NAMES[taking]}, {way['steps']:,} steps at {settings['rate']:g} steps/s: microseconds"
        lines += ["", paint.title(head)]
        lines.append(f"{'hop':<16}{'p50':>8}{'p99':>9}{'work':>8}{'slow 1 %':>10}")
        for hop in way["hops"]:
            work = "" if hop["work"] is None else f"{hop['work']:,.0f}"
            numbers = f"{hop['p50']:>8,.0f}{hop['p99']:>9,.0f}{work:>8}{hop['more_when_slow']:>+10,.0f}"
            lines.append(f"{hop['hop']:<16}{numbers}  {hop['what']}")
        lines.append(paint.good(f"{'in all':<16}{way['p50']:>8,.0f}{way['p99']:>9,.0f}"))
        for name, share in way["pauses"].items():
            slow, chance = share["slow"], share["by_chance"]
            lines.append(f"{name}: meets {share['all']:.1%} of all, {slow:.0%} of the slow 1 %; by chance {chance:.0%}")
    lines += ["", f"raw ZeroMQ in the same run: p50 {raw['50']:,.0f}, p99 {raw['99']:,.0f}"]
    lines.append(
        "work: the thread's processor time, the median. slow 1 %: how much more than the p50 they take, the mean."
    )
    return "\n".join(lines[1:])
