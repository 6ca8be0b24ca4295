"""A record as a page for docs/: exactly what was printed, and what it means."""

from benchmarks.bus.memory import ROWS
from benchmarks.bus.tables import render
from benchmarks.outputs import Record
from benchmarks.paint import Paint

_PAGE = """\
<!-- Written by `{command}`. Do not edit: the next run writes it anew. -->
# The bus beside its peers

How long a step takes from the engine's arrays in a worker process to the buffer of each of its requests in a processor
process, and how many steps a second go that way; for Tokenbus, and for what engines use today, in one run.
[bus.json](bus.json) has every figure.

    {command}

Measured on: {cpu}.

![Latency, throughput, cost a row, and memory](bus.svg)

```text
{report}
```

## How to read it

- Times are of the monotonic clock, which all processes of a machine share. A step's begins when its arrays are there,
  before a batch is made of them, and ends when the last of its 256 requests has its row.
- Delivered means: in the request's own buffer, where FastDeploy's lines put lists and Tokenbus puts a step and the
  number of a row. A task for each request that takes them from there one by one, as arrays, costs Python several times
  more than all that comes before; "a task a request" has it. Who wants all rows takes them by `steps()`.
- The worker and the processor have a core each, with all their threads; the remote client has whatever is left.
- Flat out, a peer sends as fast as it is let: Tokenbus as its credit and its retention allow, ZeroMQ up to its
  high-water mark, the System V queue one struct at a time. At a rate that a peer cannot keep, its latency is that of
  the queue before it.
- Only Tokenbus checks what it carries, puts it in order, acknowledges it, and can send it again; raw ZeroMQ is the
  limit of what any bus on it can reach, and delivers nothing.
- "Where the processor's main thread is" comes from looking at it a thousand times a second, not from wrapping it, so
  the sections add up to a step's time. ZeroMQ's own thread is not in it.
- The cost of a row with 65,536 open requests is to be that with 256: a step touches no request that has no row in it.
- The memory run has {requests} short requests at a time over a remote client, so all three processes are in it, and
  requests begin and end all the time. `--memory-steps 1000000` is the long form, which takes minutes.
"""


def page(record: Record, command: str) -> str:
    """Return the page, with the command that writes it."""
    report = render(record, Paint(colour=False))
    return _PAGE.format(command=command, cpu=record["machine"]["cpu"], report=report, requests=ROWS)
