"""A record as a page for docs/: exactly what was printed, and what it means."""

from benchmarks.codec.tables import render
from benchmarks.outputs import Record
from benchmarks.paint import Paint

_PAGE = """\
<!-- Written by `{command}`. Do not edit: the next run writes it anew. -->
# The codec beside its peers

How long a step takes from the engine's arrays to every request's own queue (a dict of request to
`collections.deque`), for Tokenbus and for what engines use today: in one run, in one process, on one core.
[codec.json](codec.json) has every figure.

    {command}

Measured on: {cpu}.

![Time a step by peer, and over rows](codec.svg)

```text
{report}
```

## How to read it

- The goals compare views: Tokenbus hands each request the batch and a row number, and whoever needs lists makes them.
  FastDeploy's lines end in lists, so compare them with "Tokenbus, as lists" where the reader wants lists; vLLM's end in
  a list of ids and views of the rest.
- "vLLM + LogprobsProcessor" ends in Python objects, so it is compared with "Tokenbus, as lists" too. Its dicts are
  vLLM's default; the option flat_logprobs fills lists in their place, which takes less time and is not measured here.
- Handing 256 requests their share takes a look-up and an append for each, and making the batch looks at every column;
  the table of stages has both. That much Python is in any design that delivers request by request, and at k = 0 those
  two stages alone take most of 1/60 of vLLM's time, and of three times ZeroMQ's on one core.
- Only FastDeploy's struct has its transport in its time: the queue is a part of that mechanism. "Tokenbus + ZeroMQ" is
  the line to compare it with where the bytes must move; pickle and msgpack would pay for a socket too.
- Every peer is given less to do than in its engine: metrics, logging, detokenizing and scheduling are left out, and its
  arrays are laid out its way beforehand. vLLM's shape without vLLM is a lower bound for vLLM.
- ZeroMQ has a thread of its own. On one core a send and a recv are two switches to it, which is cheap; on two cores
  they are two wake-ups, which are not. Both are shown; the goal is for one core.
- Peers take turns, so that a change in the machine's pace meets all of them. The tables' figures are of a turn's later
  steps; its first step, in the caches that another peer left, is in a table of its own. An engine's step lies in
  between: much else ran since the last one, but not ten other codecs.
- The vLLM lines need vLLM, whose engine needs a GPU but whose serialisation does not. An environment for them:

      python3.11 -m venv vllm && vllm/bin/pip install torch==2.13.0 && vllm/bin/pip install --no-deps vllm==0.33.0
      vllm/bin/pip install msgspec numpy protobuf pyzmq structlog matplotlib cloudpickle pydantic regex cachetools \\
          psutil py-cpuinfo pillow transformers cbor2 blake3 setproctitle requests aiohttp oss-harmony openai \\
          pybase64 uvloop prometheus_client
      PYTHONPATH=contracts:. vllm/bin/python -m benchmarks.codec

## Rows, before and after

A batch's rows are made together, a column at a time, when the first of them is read, and a message's columns become
arrays when they are read. Before, each row was made by itself, and each column at once. Runs of both versions
in turn, beside their peers, on a machine whose other work made everything two to three times slower than in the
tables above: compare the columns with each other. Medians of six runs of the 20th percentile, 3 tokens a row, in
microseconds.

| | before | now | times faster | named tuple of 13 | vLLM's shape, decoded and read |
|---|---|---|---|---|---|
| a row of 256, k = 0 | 11.3 | 1.9 | 6.0 | 0.8 | |
| a row of 256, k = 20 | 10.6 | 2.0 | 5.2 | 0.7 | |
| a row of 256, mixed k | 10.9 | 4.6 | 2.4 | 0.8 | |
| a row of 256, as lists, k = 0 | 18.1 | 2.5 | 7.3 | | |
| a row of 256, as lists, k = 20 | 31.9 | 7.7 | 4.2 | | |
| a row of 256, decoded with its step, k = 0 | 13.0 | 2.3 | 5.7 | | 13.9 |
| a step of one row, decoded and read, k = 0 | 119 | 40.4 | 2.9 | 1.2 | 11.6 |
| a step of one row, decoded and read, k = 20 | 117 | 39.3 | 3.0 | 1.3 | 11.4 |
| a single row of a step of 256, decoded with it, k = 0 | 537 | 497 | 1.1 | | |
| a single row of a step of 256, decoded with it, k = 20 | 577 | 616 | 0.9 | | |
| a single row of a step of 256, decoded with it, mixed k | 575 | 1,295 | 0.4 | | |
| decode, 256 rows, k = 0 | 41.6 | 19.9 | 2.1 | | |
| decode, 256 rows, k = 20 | 71.7 | 48.6 | 1.5 | | |
| a step of 256 rows to its queues, k = 0 | 182 | 162 | 1.1 | | |
| a step of 256 rows to its queues, k = 5 | 217 | 198 | 1.1 | | |
| a step of 256 rows to its queues, k = 20 | 251 | 236 | 1.1 | | |

- A row is read as its key, position, status, token ids, logprobs and ranks. Its arrays are made with it.
- vLLM decodes and reads a message of one row in a third of our time: one compiled call makes its objects.
- Reading a single row of a large step cost as much as all of them: as much as before, and where the rows differ in k
  twice as much.
- Since these runs a row is made each time that it is asked for. In microseconds of processor time on the same machine,
  under loads that doubled them from run to run: a one-row batch takes 7.6 to 12.8 to make, 16 to 25 to encode, and its
  message 16.7 to 25.5 to decode and read. A single row of a step of 256, decoded with it, takes 50, where all rows were
  made for 255.
"""


def page(record: Record, command: str) -> str:
    """Return the page, with the command that writes it."""
    report = render(record, Paint(colour=False))
    return _PAGE.format(command=command, cpu=record["machine"]["cpu"], report=report)
