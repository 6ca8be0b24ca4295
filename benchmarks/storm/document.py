"""What was measured as a table, and the page for docs/."""

from benchmarks.machine import in_words
from benchmarks.outputs import Record

MOST_SECONDS = 10.0
LEAST_SHARE = 0.8
MOST_GROWTH_MIB = 256
_ABOUT = """\
# A crowd that connects at once

Written by `python -m benchmarks.storm --write-docs`. A processor with keys over tcp, a worker and a client with eight
requests, 40 steps/s; then {clients} clients and {workers} workers connect at once, and once more after the processor
was killed and started again. All of the crowd are real clients and workers in one process. "All are back" counts from
the moment in which the crowd begins to connect, or the new processor listens. "Share" is what the first client's
tokens/s were until then, of those before; what waited while there was no processor comes after it, so it may be above
1. "Growth" is of the processor's resident memory, at its peak, above what it was before the crowd came.
"""


def table(record: Record) -> str:
    """Return the table."""
    crowd = f"{record['clients']} clients and {record['workers']} workers"
    head = f"| {crowd} | all are back | share | failed | growth | CPU |"
    lines = [
        f"| {storm['name']} | {storm['seconds']:.1f} s | {storm['share']:.2f} | {storm['failed']} "
        f"| {storm['growth_mib']:.0f} MiB | {storm['cpu_s']:.1f} s |"
        for storm in record["storms"]
    ]
    goals = f"at most {MOST_SECONDS:g} s | at least {LEAST_SHARE:g} | 0 | at most {MOST_GROWTH_MIB} MiB"
    return "\n".join([head, "|---|---|---|---|---|---|", *lines, f"| goals | {goals} | |", ""])


def page(record: Record) -> str:
    """Return the page."""
    about = _ABOUT.format(clients=record["clients"], workers=record["workers"])
    return f"{about}\nMachine: {in_words(record['machine'])}. It is shared with others.\n\n{table(record)}"
