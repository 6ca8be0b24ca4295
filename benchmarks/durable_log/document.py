"""What was measured, as tables, and the page for docs/."""

from collections.abc import Iterator
from statistics import median

from benchmarks.durable_log.beside_bare import IN_FLIGHT
from benchmarks.machine import in_words
from benchmarks.outputs import Record
from benchmarks.paint import Paint

_ABOUT = """\
<!-- Written by `python -m benchmarks.durable_log --write-docs`. Do not edit: the next run writes it anew. -->
# The durable log

Real nats-server processes on one machine; one writer, {size:,} bytes a message or item, {rounds} rounds in turn of
{seconds:g} s each, medians. [durable-log.json](durable-log.json) has every figure, [log.md](../log.md) the rest.

    python -m benchmarks.durable_log --rounds {rounds} --seconds {seconds:g} --pace {pace} --write-docs

Machine: {machine}. It is shared with others.

```text
{tables}
```

Beside bare nats-py: three servers, three replicas. Bare nats-py has {flight} messages in flight; the log orders,
deduplicates and names what is missing, and puts what came while a message was on its way into the next one.

Readers: each is a process that reads all items as they come; three servers and three replicas, and one server with one.
"Writer" is the processor time of the process that writes, "servers" that of all nats-server processes, "reader" that of
one reader, each in microseconds an item. "Times one" are medians of each round's ratio to one reader, with the least
and the most of all rounds; "1 again" is one reader measured twice, which says how far such ratios mean nothing. At a
pace the cores have time left, so what a reader costs the writer shows there; at full speed the writer, the servers and
the readers compete for the cores.
"""


def page(record: Record) -> str:
    """Return the page."""
    return _ABOUT.format(
        size=record["size"],
        rounds=record["rounds"],
        seconds=record["seconds"],
        pace=max(each["pace"] for each in record["readers"]),
        machine=in_words(record["machine"]),
        tables="\n".join(tables(record, Paint(colour=False))),
        flight=IN_FLIGHT,
    )


def tables(record: Record, colours: Paint) -> Iterator[str]:
    """Yield the lines of the goals, of the log beside bare nats-py, and of the readers."""
    for goal in record["goals"]:
        text = f"{goal['measured']:>8.2f} {'met' if goal['met'] else 'missed'}"
        yield f"{goal['goal']:<80}{goal['wanted']:<15}" + (colours.good if goal["met"] else colours.bad)(text)
    yield ""
    yield colours.title(f"{'':<28}{'a second':>10}{'ack ms':>9}")
    bare, log = record["bare"], record["log"]
    yield f"{'bare nats-py':<28}{median(bare['per_second']):>10,.0f}{bare['ack_ms']:>9.2f}  p50, {IN_FLIGHT} in flight"
    held = f"mean, {log['items_a_message']:g} items a message"
    yield f"{'durable log':<28}{median(log['per_second']):>10,.0f}{log['ack_ms']:>9.2f}  {held}"
    yield ""
    yield colours.title(f"{'':<27}{'':>17}{'us an item':^27}  times one, least to most: of the writer")
    yield (
        f"{'replicas':<10}{'pace':<8}{'readers':<9}{'items/s':>9}{'ack ms':>8}{'writer':>9}{'servers':>9}{'reader':>9}"
        f"  {'items/s':<22}{'processor time'}"
    )
    for each in record["readers"]:
        yield (
            f"{each['replicas']:<10}{each['pace'] or 'full':<8}{each['readers']:<9}{each['per_second']:>9,.0f}"
            f"{each['ack_ms']:>8.2f}{each['writer_us']:>9,.0f}{each['servers_us']:>9,.0f}{each['reader_us']:>9,.0f}"
            f"  {_spread(each['rate_of_one']):<22}{_spread(each['cost_of_one'])}"
        )


def _spread(ratios: list[float]) -> str:
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
