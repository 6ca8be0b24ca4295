"""What was measured, and the model, as tables, and the page for docs/."""

from collections.abc import Iterator

from benchmarks.machine import in_words
from benchmarks.outputs import Record
from benchmarks.paint import Paint
from benchmarks.scaling.model import bytes_on_paper, on_paper

BUSY = 0.9
"""From which share of a core on a process is what limits."""
_COMMAND = "python -m benchmarks.scaling --write-docs"
_ABOUT = """\
<!-- Written by `{command}`. Do not edit: the next run writes it anew. -->
# Several processors

Real processes on one machine: workers with a synthetic engine (steps of 256 rows of 3 tokens), processors, and readers.
"clients" are processes that take all rows as columns; they hold the workers back, which run flat out. "gateway" are the
processes of one gateway that writes the rows to HTTP clients ("load", a process for each worker); it does not hold
workers back, so these have a pace. Each worker's rows are spread over all readers, so a step leaves its processor in as
many frames as there are readers. Over NATS, one nats-server process carries all. [scaling.json](scaling.json) has every
figure, [scaling.md](../scaling.md#model) says what follows from them.

    {command}

![Measured and predicted, and how busy each kind of process was](scaling.svg)

{runs}

```text
{paper}
```

"Predicted" is the least of what the workers, the processors and the readers could do with a core each, of what all
cores could, and of the pace, by the model of the same run: for each kind of process a cost of a step and one for each
reader that its rows go to, the nearest to all cells' costs. "Busiest" is the share of a core that the busiest process
of a kind took: near 100 % it is what limits. Goals are for systems whose processors are at least {busy:.0%} busy with
half as many.
Where all processes share two cores the cores limit, not the processes, and each step costs more than on idle cores.
"""
_RUN = """\
## {title}

{rounds} round(s) of {seconds:g} s in turn, medians, k = {k}. Machine: {machine}. It is shared with others.

```text
{tables}
```"""


def page(record: Record) -> str:
    """Return the page."""
    plain = Paint(colour=False)
    runs = [
        _RUN.format(
            title=title(run),
            rounds=run["rounds"],
            seconds=run["seconds"],
            k=run["k"],
            machine=in_words(run["machine"]),
            tables="\n".join(_tables(record, run, plain)),
        )
        for run in record["runs"]
    ]
    paper = "\n".join(bytes_on_paper(record))
    return _ABOUT.format(command=_COMMAND, runs="\n\n".join(runs), paper=paper, busy=BUSY)


def tables(record: Record, colours: Paint) -> Iterator[str]:
    """Yield the lines of all tables."""
    for run in record["runs"]:
        yield colours.title(title(run))
        yield from _tables(record, run, colours)
        yield ""
    yield from bytes_on_paper(record)


def title(run: Record) -> str:
    """Return what tells a run from others."""
    bus = {"zeromq": "ZeroMQ", "nats": "NATS"}[run["bus"]]
    pace = f" at {run['pace']} steps/s a worker" if run["pace"] else ""
    return f"{run['machine']['cores']} cores, {bus}, {run['reading']}{pace}"


def _tables(record: Record, run: Record, colours: Paint) -> Iterator[str]:
    kinds = list(run["model"])
    for goal in run["goals"]:
        text = f"{goal['measured']:>8.2f} {'met' if goal['met'] else 'missed'}"
        yield f"{goal['goal']:<64}{goal['wanted']:<15}" + (colours.good if goal["met"] else colours.bad)(text)
    wide = 10 * len(kinds) + 1
    yield colours.title(f"{'':<29}{'steps/s':^20}{'processor us a step':^{wide}}{'busiest, % of a core':^{wide}}")
    columns = "".join(f"{kind:>10}" for kind in kinds)
    yield f"{'workers':>7}{'processors':>12}{'readers':>9} {'measured':>9}{'predicted':>10} {columns} {columns}  limit"
    for cell in run["cells"]:
        costs = "".join(f"{cell['microseconds_a_step'][kind]:>10,.0f}" for kind in kinds)
        busy = "".join(f"{100 * cell['busiest'][kind]:>10.0f}" for kind in kinds)
        yield (
            f"{cell['workers']:>7}{cell['processors']:>12}{cell['readers']:>9} {cell['steps_per_second']:>9,.0f}"
            f"{cell['predicted']:>10,.0f} {costs} {busy}  {cell['limit']}"
        )
    yield ""
    yield colours.title("The model: processor microseconds of a step, and of each reader that its rows go to")
    for kind, (step, reader) in run["model"].items():
        yield f"{kind:<12}{step:>9,.0f} + {reader:,.0f} a reader"
    yield ""
    first, *rest = on_paper(record, run)
    yield colours.title(first)
    yield from rest
