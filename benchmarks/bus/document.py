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

## A task for each request, before and after

A reader that waited cost a future, and with it a callback of the event loop that asyncio makes, queues and runs. Now
all readers whose rows came since the loop's last turn go on in one callback, and a row is made when its reader takes
it, where 256 rows were made at once and left the cache before they were read. Both versions in turn on one loaded
machine: processor time of the reading thread in microseconds, 256 rows of 3 tokens, k = 0.

| | before | now |
|---|---|---|
| a wake-up alone: asyncio's future; now a waiter | 3.1 to 3.6 | 1.1 to 1.3 |
| the same under uvloop | 1.5 to 1.7 | 1.1 |
| a step that comes alone: decoded, handed out, woken, taken by 256 tasks as arrays | 1,516 | 1,258 |
| of that, decoding and making rows | 253 | 78 |
| of that, handing out and waking | 235 | 95 |
| a step of four that come together | 1,162 | 797 |
| a step of sixteen that come together | 1,016 | 813 |
| a row of 3 tokens, taken as tokens | 9.8 | 6.5 |

Over the whole bus, a worker process beside the processor's and both cores busy with other work, a step cost the
processor's process 1,783, 2,643, 3,231 and 3,109 microseconds of processor time before, and 1,582, 2,025, 2,739 and
2,436 now, in four pairs of turns; flat out that was 253, 115, 75 and 25 steps/s, and 367, 201, 60 and 47: so loaded a
machine tells little. The tables above still show the version before.

On 16 idle cores, one short run of each version in turn (`--quick`, ipc unless it says tcp, k = 0):

| | steps/s, before | now | p50 at 200 steps/s, ms | now | p99 | now |
|---|---|---|---|---|---|---|
| Tokenbus | 1,324 | 4,292 | 1.34 | 1.16 | 4.6 | 3.0 |
| a task a request | 699 | 1,188 | 1.71 | 1.22 | 3.7 | 4.1 |
| `steps()` | 2,036 | 4,688 | 1.34 | 1.08 | 3.9 | 3.9 |
| keys, tcp | 1,223 | 3,026 | 1.46 | 1.31 | 4.0 | 3.4 |
| NATS, tcp | 1,255 | 3,428 | 1.52 | 1.39 | 4.4 | 4.4 |
| remote client | 1,244 | 1,892 | 2.29 | 1.72 | 3.0 | 2.4 |
| FastDeploy's queue (SysV) | 234 | 364 | 9.5 | 3.2 | 52 | 37 |
| raw ZeroMQ | 71,931 | 86,531 | 0.17 | 0.25 | 0.3 | 0.5 |

The first version had the slower minutes, as the last two lines show; NATS beside ZeroMQ is 0.80 of its steps/s now.

On 32 idle cores, this version alone, one round of 400 steps at 200 steps/s, copied by hand, in milliseconds:

| | ipc, p50 | p99 | tcp, p50 | p99 |
|---|---|---|---|---|
| Tokenbus, k = 0 | 0.79 | 1.27 | 0.77 | 1.01 |
| Tokenbus, k = 5 | 0.71 | 1.13 | 0.75 | 1.10 |
| Tokenbus, k = 20 | 0.82 | 1.12 | 0.97 | 1.25 |

So there the p99 is 1.3 to 1.6 times the p50. `steps()` had 0.73 and 0.93; of a task a request the last row was taken
with a p99 of 2.3 to 2.5; the remote client's p50 was 1.20 to 1.49, NATS's 0.91, FastDeploy's queue 2.7 to 9.0. Flat
out, in steps/s: 5,222 by ipc and 4,479 by tcp, a task a request 866 and 1,550, the remote client 1,980, NATS 5,040,
FastDeploy's queue 283, raw ZeroMQ 80,745 and 112,300.

- What is left is the task's own turn, 1.1 to 1.3, `async for` 0.3 to 0.4, and the row, 1.0: by these parts, 256 tasks
  cannot have 2,000 steps a second each on this machine in Python. A reader of all requests can: `async with
  client.steps() as steps`, or `Processor.steps()`, gives a step's columns to one task, which hands them on by request
  id as it likes.
- uvloop makes no difference to readers any more: the loop has one callback a turn. It runs everything, which tests
  hold. For gateway and processor it was not measured, so no extra brings it.
- Eager tasks, from Python 3.12 on, begin at once and then wait as others do. They change nothing for a reader that
  lives as long as its request; they work, which is tested.
- Python 3.14 does the same in less: a future's wake-up 1.6 to 2.9 where 3.11 took 3.7 to 4.3 in the same minutes, a
  step that comes alone 1,090 to 1,640 where it took 2,510 to 2,600, the one-row message of the codec 10 to 20 % less.

## Where a step's time goes at 200 steps/s

`python -m benchmarks.bus --trace` stamps each step at every hop, in both processes, and splits the slow 1 % by the same
hops. Two cores of a virtual machine that other programs use too, ipc, k = 0, nine rounds of both versions in turn, in
microseconds:

| hop | p50 before | of it work | p50 after | of it work |
|---|---|---|---|---|
| a batch is made of the engine's arrays | 167 | | 178 | |
| `publish()` encodes and retains it | 570 | 568 | 255 | 253 |
| the link's thread goes on | 162 | | 174 | |
| the link frames it | 100 | 99 | 102 | 102 |
| ZeroMQ: two I/O threads, the kernel, the loop's wake-up | 292 | | 300 | |
| the processor's task has the message | 176 | 174 | 150 | 147 |
| frame, checksum, decoding, order, credit | 222 | 221 | 228 | 228 |
| assembly, settling, rows in their buffers | 468 | 467 | 510 | 509 |
| in all, traced | 2,261 | | 1,954 | |

Without the trace, the medians of the rounds: p50 2,119 before and 1,778 after, p99 6,243 and 5,872; the medians of the
rounds' ratios 0.85 and 0.81; the worker's process 1,369 and 1,085 of processor time a step. "After" also had the direct
hand-over that is dropped below, which did not make it faster. Raw ZeroMQ in the same run: p50 286, p99 2,312; in a
quieter one, p99 542 beside 3,772 of the version before.

- **The median is work, made slow by sleep.** Both processes sleep for most of the 5 ms between two steps, and what runs
  after that runs cold. `encode()` of one batch and the making of it took 63 flat out, 131 after 5 ms of spinning, and
  352 after 5 ms of sleep; a bare Python loop 42, 74, 90. So at a rate a step costs several times its cost flat out, and
  what helps is less code on its way.
- **The tail is threads that go on late.** Where one thread wakes another, or the kernel one of ours, the slow 1 % lose
  2 to 3 ms in the quieter run, and less where one thread works on. That is as long as the scheduler lets another
  program run, of which there were some; which one ran was not traced.
- **Not the collector, the guard or the ticks.** The collector met 0.3 % of the steps and none of the slow ones. The
  thread that watches connections met 13 % of all and 50 % of the slow ones, which is chance: those last four times as
  long as others. So neither the collector's thresholds nor the guard's interval was changed.

What was done, and what it brought, in microseconds:

| | before | now |
|---|---|---|
| `publish()` of a step, flat out | 226 | 127 |
| of that, the stream's header for the batch: its copy also made the batch's layout, for nothing | 130 | 10 |

What was tried beside it and dropped, against the version that has it, nine rounds in turn in a quieter run (p50 1,386,
p99 2,420); the medians of the rounds' ratios:

| | p50 | p99 | steps/s flat out |
|---|---|---|---|
| direct hand-over: the task goes on in the callback that finds the socket readable | 1.04 | 1.23 | 1.01 |
| `gc.freeze()` once all is imported, and the collector after 20,000 objects in the place of 700 | 1.01 | 1.02 | 1.06 |
| `sys.setswitchinterval(0.0005)`, a tenth of the default | 1.02 | 1.09 | 0.75 |

The first had 0.98 and 1.23 against the version before, in another run.

`publish()` that sends from its own thread, without the wake-up of the link's, was measured on 16 idle cores, three
runs of each in turn: p50 1,018 before and 1,010 with it. What the wake-up took, the next hops take: their code runs
cold on either thread.
"""


def page(record: Record, command: str) -> str:
    """Return the page, with the command that writes it."""
    report = render(record, Paint(colour=False))
    return _PAGE.format(command=command, cpu=record["machine"]["cpu"], report=report, requests=ROWS)
