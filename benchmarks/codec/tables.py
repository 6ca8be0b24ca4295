"""A record as tables to read."""

import textwrap
from collections.abc import Callable, Iterator

from benchmarks.codec.record import OURS, headline
from benchmarks.machine import LIBRARIES
from benchmarks.outputs import Record
from benchmarks.paint import Paint

_WIDTH = 112
_LABEL, _CELL, _NARROW = 26, 20, 9


def render(record: Record, paint: Paint) -> str:
    """Return the whole report."""
    parts = [_machine, _headline, _first, _spread, _rows, _goals, _stages, _sizes, _notes]
    return "\n\n".join("\n".join(part(record, paint)) for part in parts)


def _machine(record: Record, paint: Paint) -> Iterator[str]:
    machine = record["machine"]
    yield paint.title("From a step's arrays to every request's queue: one process, one core")
    yield f"{machine['cpu']}; {machine['cores']} cores, pinned: {machine['pinned']}; {machine['system']}"
    versions = [f"{name} {machine[name]}" for name in ("python", *LIBRARIES) if name in machine]
    yield ", ".join([*versions, f"compiled check {machine['compiled check']}"])
    settings = record["settings"]
    turns = sorted({result["turns"] for result in record["results"]})
    text = (
        f"Medians of {' to '.join(map(str, turns))} turns of {settings['steps_a_turn']} steps, over "
        f"{settings['different_steps']} different steps; {settings['order']}. The first step of a turn finds the "
        "caches as another peer left them and is told apart from the others. Garbage collection is "
        f"{settings['garbage_collection']}."
    )
    yield from textwrap.wrap(text, _WIDTH)


def _headline(record: Record, paint: Paint) -> Iterator[str]:
    def cell(peer: Record) -> str:
        return f"{peer['median_us']:,.1f}{peer['times_ours']:>8,.2f}x"

    return _by_peer(record, paint, "microseconds a step, and times Tokenbus's", cell)


def _first(record: Record, paint: Paint) -> Iterator[str]:
    def cell(peer: Record) -> str:
        return f"{peer['first_median_us']:,.1f}{peer['first_times_ours']:>8,.2f}x"

    return _by_peer(record, paint, "the first step of a turn, in cold caches", cell)


def _spread(record: Record, paint: Paint) -> Iterator[str]:
    def cell(peer: Record) -> str:
        return f"{peer['p10_us']:,.0f}-{peer['p90_us']:,.0f}{peer['bytes_per_token']:>8,.1f}"

    return _by_peer(record, paint, "p10 to p90 in microseconds, and bytes a token", cell)


def _by_peer(record: Record, paint: Paint, what: str, cell: Callable[[Record], str]) -> Iterator[str]:
    results = headline(record)
    first = results[0]
    yield paint.title(f"{first['rows']} rows x {first['tokens_per_row']} tokens: {what}")
    yield " " * _LABEL + "".join(f"k = {result['top_k']}".rjust(_CELL) for result in results)
    for peer in record["peers"]:
        label = peer["label"].ljust(_LABEL)
        if peer["not_run"]:
            yield label + paint.bad(peer["not_run"])
            continue
        line = label + "".join(cell(result["peers"][peer["name"]]).rjust(_CELL) for result in results)
        yield paint.good(line) if peer["name"] == OURS else line


def _rows(record: Record, paint: Paint) -> Iterator[str]:
    for count in dict.fromkeys(result["rows"] for result in record["rows"]):
        mine = [result for result in record["rows"] if result["rows"] == count]
        yield paint.title(f"{count} row{'s' * (count > 1)} x 3 tokens, read: microseconds a row")
        yield " " * _LABEL + "".join(f"k = {result['top_k']}".rjust(_CELL) for result in mine)
        for name, label in record["row_labels"].items():
            yield f"{label:<{_LABEL}}" + "".join(f"{result['us'][name]:,.2f}".rjust(_CELL) for result in mine)
    text = (
        "Of each row the key, position, status, token ids, logprobs and ranks are read; as lists: lists of the last "
        "three and of its alternatives are made. rows: of a batch that was decoded before. Of vLLM's outputs the "
        "request id, the list of ids, the reason and the arrays are read."
    )
    yield from textwrap.wrap(text, _WIDTH)


def _goals(record: Record, paint: Paint) -> Iterator[str]:
    yield paint.title("Goals")
    ks = list(dict.fromkeys(goal["top_k"] for goal in record["goals"]))
    yield " " * (_LABEL + 18) + "".join(f"k = {k}".rjust(_CELL) for k in ks)
    for name in dict.fromkeys(goal["goal"] for goal in record["goals"]):
        mine = {goal["top_k"]: goal for goal in record["goals"] if goal["goal"] == name}
        wanted = next(iter(mine.values()))["wanted"]
        yield f"{name:<30}{wanted:<14}" + "".join(_verdict(mine.get(k), paint) for k in ks)


def _verdict(goal: Record | None, paint: Paint) -> str:
    if goal is None:
        return " " * _CELL
    if goal["measured"] is None:
        return paint.bad("not run".rjust(_CELL))
    text = f"{goal['measured']:,.2f}"
    if goal["met"] is None:
        return text.rjust(_CELL)
    return paint.good(f"{text} met".rjust(_CELL)) if goal["met"] else paint.bad(f"{text} missed".rjust(_CELL))


def _stages(record: Record, paint: Paint) -> Iterator[str]:
    yield paint.title("Where Tokenbus's time goes, in microseconds (on its own, in warm caches)")
    yield " " * _LABEL + "".join(f"k = {stage['top_k']}".rjust(_CELL) for stage in record["stages"])
    for name in record["stages"][0]["us"]:
        yield f"{name:<{_LABEL}}" + "".join(f"{stage['us'][name]:,.1f}".rjust(_CELL) for stage in record["stages"])


def _sizes(record: Record, paint: Paint) -> Iterator[str]:
    peers = [peer for peer in record["peers"] if not peer["not_run"]]
    yield paint.title("Every size: median microseconds a step")
    yield "rows x tokens      k" + "".join(peer["short"].rjust(_NARROW) for peer in peers)
    for result in record["results"]:
        size = f"{result['rows']:>4} x {result['tokens_per_row']}{result['top_k']:>12}"
        medians = (result["peers"][peer["name"]]["median_us"] for peer in peers)
        yield size + "".join(f"{median:,.1f}".rjust(_NARROW) for median in medians)
    rivals = [peer for peer in peers if peer["delivers"] and not peer["name"].startswith(OURS)]
    faster = [text for peer in rivals for text in _where_faster(record, peer)]
    yield from textwrap.wrap(f"Faster than Tokenbus at some k: {'; '.join(faster) or 'none'}.", _WIDTH)


def _where_faster(record: Record, peer: Record) -> Iterator[str]:
    sizes = dict.fromkeys(
        f"{result['rows']} x {result['tokens_per_row']}"
        for result in record["results"]
        if result["peers"][peer["name"]]["times_ours"] < 1
    )
    if sizes:
        yield f"{peer['short']} at {', '.join(sizes)}"


def _notes(record: Record, paint: Paint) -> Iterator[str]:
    yield paint.title("What each line's time includes")
    for peer in record["peers"]:
        text = f"{peer['label']} ({peer['short']}): {peer['includes']}."
        yield from textwrap.wrap(text, _WIDTH, subsequent_indent="    ")
    mixed = ", ".join(map(str, record["settings"]["mixed_top_ks"]))
    text = (
        "All get the same values, each in the layout of its own engine's arrays, which is made before: columns for "
        "Tokenbus and protobuf, rectangles with the sampled token first for the others. In a mixed step each row wants "
        f"one of {mixed} alternatives: columns carry just those, rectangles as many as the row that wants most. Every "
        "peer's delivery is compared with the engine's values before it is timed. Only Tokenbus checks what it carries."
    )
    yield from textwrap.wrap(text, _WIDTH)
