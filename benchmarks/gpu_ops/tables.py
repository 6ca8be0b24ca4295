"""A record as tables to read."""

import textwrap
from collections.abc import Iterator

from benchmarks.gpu_ops.cases import VOCABULARY
from benchmarks.outputs import Record
from benchmarks.paint import Paint

_WIDTH = 112
_CELL = 16
_US_A_SECOND = 1e6


def render(record: Record, paint: Paint) -> str:
    """Return the whole report."""
    card = record["card"]
    parts = []
    if isinstance(card, str):
        parts.append([paint.title("On a card"), paint.bad(card)])
    else:
        parts += [list(part(record, paint)) for part in (_head, _goals, _beside, _kinds, _types, _host)]
    parts.append(list(_cpu(record, paint)))
    return "\n\n".join("\n".join(part) for part in parts)


def _head(record: Record, paint: Paint) -> Iterator[str]:
    card = record["card"]
    yield paint.title(f"From logits to columns on one {card['name']}: {VOCABULARY:,} words")
    yield (
        f"{card['multiprocessors']} multiprocessors, {card['cache_bytes'] >> 20} MB of L2; CUDA {card['cuda']}, "
        f"torch {card['torch']}; a large copy reaches {card['copy_bytes_per_us'] / _US_A_SECOND:.2f} TB/s"
    )
    text = (
        "Microseconds on the card: the median of seven spans of up to 40 calls each between two events, over inputs "
        "that take four times the L2 where they can. The floor is reading the logits once at 4.3 TB/s, and f times it. "
        "'kernel' is the launch alone, 'alone' the same with events of its own around each launch, 'call' all that a "
        "call queues, with the copy to pinned memory."
    )
    yield from textwrap.wrap(text, _WIDTH)


def _goals(record: Record, paint: Paint) -> Iterator[str]:
    yield paint.title("Goals")
    for goal in record["goals"]:
        verdict = "met" if goal["met"] else "missed"
        text = f"{goal['measured']:>8.2f} {verdict}"
        yield f"{goal['goal']:<62}{goal['wanted']:<14}" + (paint.good(text) if goal["met"] else paint.bad(text))


def _beside(record: Record, paint: Paint) -> Iterator[str]:
    present = [peer for peer in record["peers"] if not peer["not_run"]]
    yield paint.title("bfloat16, random logits, beside what engines do (microseconds, and times the kernel's)")
    names = ["floor", "kernel", "alone", "call", *(peer["label"] for peer in present)]
    yield "  rows    k" + "".join(name.rjust(_CELL) for name in names)
    for result in _chosen(record, "bfloat16", "random"):
        ours = result["kernel_us"]
        cells = [
            f"{result['floor_us']:,.1f}",
            f"{ours:,.1f} {ours / result['floor_us']:6.2f}f",
            f"{result['kernel_alone_us']:,.1f}",
            f"{result['call_us']:,.1f}",
        ]
        for peer in present:
            taken = result["peers"].get(peer["name"])
            cells.append("" if taken is None else f"{taken:,.0f} {taken / ours:6.1f}x")
        yield f"{result['rows']:>6}{result['top_k']:>5}" + "".join(cell.rjust(_CELL) for cell in cells)
    for peer in record["peers"]:
        text = f"{peer['label']}: {peer['not_run'] or peer['includes']}."
        yield from textwrap.wrap(text, _WIDTH, subsequent_indent="    ")


def _kinds(record: Record, paint: Paint) -> Iterator[str]:
    yield paint.title("bfloat16, the kernel by kind of logits (microseconds, and times the floor)")
    yield from _by(record, [("bfloat16", kind) for kind in ("random", "peaked", "ascending", "descending")], kinds=True)


def _types(record: Record, paint: Paint) -> Iterator[str]:
    yield paint.title("Random logits, the kernel by type (microseconds, and times the floor)")
    yield from _by(record, [(dtype, "random") for dtype in ("bfloat16", "float16", "float32")], kinds=False)


def _by(record: Record, columns: list[tuple[str, str]], *, kinds: bool) -> Iterator[str]:
    yield "  rows    k" + "".join((kind if kinds else dtype).rjust(_CELL + 4) for dtype, kind in columns)
    for results in zip(*(_chosen(record, *column) for column in columns), strict=True):
        first = results[0]
        cells = (f"{r['kernel_us']:,.1f} {r['kernel_us'] / r['floor_us']:8.2f}f".rjust(_CELL + 4) for r in results)
        yield f"{first['rows']:>6}{first['top_k']:>5}" + "".join(cells)


def _host(record: Record, paint: Paint) -> Iterator[str]:
    yield paint.title("Host time of a call: until it returns, with the card idle (microseconds)")
    for name, taken in record["host"].items():
        yield f"{name:<48}{taken:>10.1f}"


def _cpu(record: Record, paint: Paint) -> Iterator[str]:
    yield paint.title(
        "The CPU twin (float32, microseconds a row, and times the twin's; one core but for torch's own threads)"
    )
    yield f"{record['cpu_name']}, numpy {record['numpy']}"
    yield "  rows    k" + "".join(
        name.rjust(_CELL + 4) for name in ("twin", "numpy", "torch, 1 thread", "torch, all threads")
    )
    for result in record["cpu"]:
        twin = result["twin_us"]
        cells = [f"{twin / result['rows']:,.0f}"]
        for name in ("numpy_us", "torch_one_thread_us", "torch_us"):
            taken = result.get(name)
            cells.append("not run" if taken is None else f"{taken / result['rows']:,.0f} {taken / twin:6.2f}x")
        yield f"{result['rows']:>6}{result['top_k']:>5}" + "".join(cell.rjust(_CELL + 4) for cell in cells)


def _chosen(record: Record, dtype: str, kind: str) -> list[Record]:
    return [result for result in record["results"] if (result["dtype"], result["kind"]) == (dtype, kind)]
