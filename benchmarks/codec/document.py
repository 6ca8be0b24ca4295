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
"""


def page(record: Record, command: str) -> str:
    """Return the page, with the command that writes it."""
    report = render(record, Paint(colour=False))
    return _PAGE.format(command=command, cpu=record["machine"]["cpu"], report=report)
