"""A record as tables to read."""

import textwrap
from collections.abc import Iterator
from typing import Any

from benchmarks.bus.lanes import OURS
from benchmarks.machine import LIBRARIES
from benchmarks.outputs import Record
from benchmarks.paint import Paint

_WIDTH = 112
_LABEL, _CELL, _GOAL = 28, 11, 52
_PERCENTILES = ("50", "99", "99.9", "100")
_MOST_SECTIONS = 16


def render(record: Record, paint: Paint) -> str:
    """Return the whole report."""
    parts = [_machine, _goals, _latency, _throughput, _sections, _scaling, _memory, _notes]
    return "\n\n".join("\n".join(part(record, paint)) for part in parts)


def _machine(record: Record, paint: Paint) -> Iterator[str]:
    machine, settings = record["machine"], record["settings"]
    yield paint.title("From a worker process to every request's buffer in a processor process")
    yield f"{machine['cpu']}; {machine['cores']} cores, pinned: {machine['pinned']}; {machine['system']}"
    versions = [f"{name} {machine[name]}" for name in ("python", *LIBRARIES) if name in machine]
    yield ", ".join([*versions, f"compiled check {machine['compiled check']}"])
    text = (
        f"Steps of 256 rows x 3 tokens. {settings['rounds']} rounds, the peers in an order drawn anew for each; in "
        f"each a turn of {settings['latency_steps']:,} steps at {settings['rate']:g} steps/s, of which the first tenth "
        f"does not count, and one of {settings['seconds']:g} s flat out, of which the middle three fifths count."
    )
    yield from textwrap.wrap(text, _WIDTH)


def _goals(record: Record, paint: Paint) -> Iterator[str]:
    yield paint.title("Goals")
    for goal in record["goals"]:
        line = f"{goal['goal']:<{_GOAL}}{goal['wanted']:>16} {goal['unit']:<13}{goal['measured']:>10,.5g}"
        if goal["met"] is None:
            yield f"{line} too short to say"
        else:
            yield paint.good(f"{line} met") if goal["met"] else paint.bad(f"{line} missed")


def _latency(record: Record, paint: Paint) -> Iterator[str]:
    yield paint.title(f"Microseconds from the engine's arrays to delivery, at {record['settings']['rate']:g} steps/s")
    for top_k in record["settings"]["top_ks"]:
        heads = ("p50", "p99", "p99.9", "max", "p50 / ours")
        yield f"k = {top_k}".ljust(_LABEL + 5) + "".join(head.rjust(_CELL) for head in heads)
        yield from _by_peer(record, paint, top_k, _latency_lines)


def _latency_lines(result: Record) -> Iterator[tuple[str, str]]:
    late = result["latency_us"]
    cells = "".join(f"{late[each]:,.0f}".rjust(_CELL) for each in _PERCENTILES)
    yield "", cells + f"{result['its_times_our_p50']:,.2f}x".rjust(_CELL)
    for name, label in (("taken", "  taken, each row"), ("last_taken", "  taken, a step's last row")):
        if name in late:
            yield label, "".join(f"{late[name][each]:,.0f}".rjust(_CELL) for each in _PERCENTILES)


def _throughput(record: Record, paint: Paint) -> Iterator[str]:
    yield paint.title("Flat out")
    for top_k in record["settings"]["top_ks"]:
        heads = ("steps/s", "tokens/s", "MB/s", "send us", "receive us", "ours / its")
        yield f"k = {top_k}".ljust(_LABEL + 5) + "".join(head.rjust(_CELL) for head in heads)
        yield from _by_peer(record, paint, top_k, _throughput_lines)
    yield "send us, receive us: processor time a step of each process, all its threads."


def _throughput_lines(result: Record) -> Iterator[tuple[str, str]]:
    flat = result["throughput"]
    values = (flat["steps_s"], flat["tokens_s"], flat["mb_s"], flat["sender_cpu_us"], flat["receiver_cpu_us"])
    cells = "".join(f"{value:,.0f}".rjust(_CELL) for value in values)
    yield "", cells + f"{result['ours_times_its_steps_s']:,.2f}x".rjust(_CELL)


def _by_peer(record: Record, paint: Paint, top_k: int, lines: Any) -> Iterator[str]:  # noqa: ANN401 - a table's own
    for peer in record["peers"]:
        if peer["not_run"]:
            yield peer["label"].ljust(_LABEL) + paint.bad(peer["not_run"])
        mine = [each for each in record["results"] if (each["peer"], each["top_k"]) == (peer["name"], top_k)]
        for result in sorted(mine, key=lambda each: str(each["transport"])):
            for label, cells in lines(result):
                line = (label or peer["label"]).ljust(_LABEL) + result["transport"].ljust(5) + cells
                yield paint.good(line) if peer["name"] == OURS else line


def _sections(record: Record, paint: Paint) -> Iterator[str]:
    yield paint.title("Where the processor's main thread is, in microseconds a step flat out")
    labels = {peer["name"]: peer["label"] for peer in record["peers"]}
    for name in dict.fromkeys(each["peer"] for each in record["sections"]):
        mine = [each for each in record["sections"] if each["peer"] == name]
        sums = {section: sum(each["us"].get(section, 0) for each in mine) for each in mine for section in each["us"]}
        yield labels[name].ljust(_LABEL + 8) + "".join(f"k = {each['top_k']}".rjust(_CELL) for each in mine)
        for section in sorted(sums, key=lambda each: -sums[each])[:_MOST_SECTIONS]:
            cells = "".join(f"{each['us'].get(section, 0):,.1f}".rjust(_CELL) for each in mine)
            yield section.ljust(_LABEL + 8) + cells
        yield "all".ljust(_LABEL + 8) + "".join(f"{sum(each['us'].values()):,.1f}".rjust(_CELL) for each in mine)


def _scaling(record: Record, paint: Paint) -> Iterator[str]:
    yield paint.title("What a step costs as it grows (processor time in microseconds, all threads)")
    heads = ("steps/s", "send", "receive", "receive/row")
    for axis in dict.fromkeys(each["axis"] for each in record["scaling"]):
        mine = [each for each in record["scaling"] if each["axis"] == axis]
        yield axis.ljust(_LABEL) + "".join(head.rjust(_CELL + 1) for head in heads)
        for each in mine:
            size = f"{each['value']:>9,}  ({each['rows']} x {each['tokens_per_row']}, k = {each['top_k']})"
            yield (
                f"{size:<{_LABEL}}{each['steps_s']:>{_CELL + 1},.0f}{each['sender_cpu_us']:>{_CELL + 1},.1f}"
                f"{each['receiver_cpu_us']:>{_CELL + 1},.1f}{each['receiver_cpu_us_a_row']:>{_CELL + 1},.3f}"
            )


def _memory(record: Record, paint: Paint) -> Iterator[str]:
    memory = record["memory"]
    yield paint.title(f"Resident memory over {memory['steps']:,} steps, in MiB, after the first quarter")
    heads = ("first", "last", "most", "slope", "+-")
    yield " " * _LABEL + "".join(head.rjust(_CELL) for head in heads)
    for name, process in memory["processes"].items():
        yield name.ljust(_LABEL) + "".join(f"{value:,.2f}".rjust(_CELL) for value in process["fit"].values())
    yield "slope: MiB for a million steps, with its standard error."


def _notes(record: Record, paint: Paint) -> Iterator[str]:
    yield paint.title("What each line includes")
    for peer in record["peers"]:
        yield from textwrap.wrap(f"{peer['label']}: {peer['includes']}.", _WIDTH, subsequent_indent="    ")
    text = (
        "All get the same values, each in the layout of its own engine's arrays, which is made before. Every turn's "
        "first step is compared with the engine's values when it was delivered, and as many steps must come as went. "
        "Only Tokenbus checks, orders, acknowledges and can repeat what it carries."
    )
    yield from textwrap.wrap(text, _WIDTH)
