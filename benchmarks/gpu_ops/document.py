"""A record as a page for docs/: exactly what was printed, and what it means."""

from benchmarks.gpu_ops.tables import render
from benchmarks.outputs import Record
from benchmarks.paint import Paint

_PAGE = """\
<!-- Written by `{command}`. Do not edit: the next run writes it anew. -->
# From logits to columns, beside what engines do

How long a card takes from a step's logits to the sampled tokens' logprobs, ranks and alternatives, in the columns of
the message. [gpu-ops.json](gpu-ops.json) has every figure; [../gpu-ops.md](../gpu-ops.md) says how it works.

    gpu_ops/check_gpu.sh         # checks, then measures, on any machine with a card
    {command}

![Microseconds over rows, and times the floor](gpu-ops.svg)

```text
{report}
```

## How to read it

- The goals are of the kernel: what the stream is kept busy with, launch after launch. "alone" has events of its own
  around every launch, which measure about 2 microseconds of launching with it. "call" is everything that a call queues:
  the kernel and the copy of the results to pinned memory. PyTorch's lines copy nothing to the CPU.
- Every row is over the same number of bytes, whatever the logits are. Sorted logits are the worst case for a search
  that keeps the largest so far; this one goes by the largest of groups, and does not depend on the order.
- Ids are drawn from the logits' own distribution, as a sampler draws them. Before a case is timed, its logprobs and
  ranks are held against float64.
- Few rows: the floor is less than a launch takes, and PyTorch's lines are as fast as Python queues their kernels. The
  logits of few rows come from the L2 in an engine, which has just written them; here they are cold where they can be.
- The CPU twin runs on one core, as does numpy. PyTorch on all of the machine's cores is faster from several rows up.
"""


def page(record: Record, command: str) -> str:
    """Return the page, with the command that writes it."""
    return _PAGE.format(command=command, report=render(record, Paint(colour=False)))
