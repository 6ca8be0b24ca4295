"""A record as a page for docs/: exactly what was printed, and what it means."""

from benchmarks.machine import in_words
from benchmarks.outputs import Record
from benchmarks.paint import Paint
from benchmarks.vllm.tables import render

_PAGE = """\
<!-- Written by `{command}`. Do not edit: the next run writes it anew. -->
# Tokenbus beside vLLM's own server

What a client gets of one model by vLLM's own API server, and by Tokenbus with vLLM as its engine.
[{name}.json]({name}.json) has every round.

    {command}

![Tokens a second, processor time a token, and time to the first token, by top-k]({name}.svg)

```text
{report}
```

Machine: {machine}.
vLLM's options, for both: `{options}`.

## How to read it

- Both systems are up all the time and are asked in turn, the same requests in the same round; the order alternates. The
  other one is idle meanwhile; what that costs is above. Between rounds is a pause of a second, since vLLM's processes
  wait awake for as long for what may come next.
- A round begins when all streams have written their requests, each on a connection of its own that is open already, and
  ends when the last has its end. Every stream asks for one answer, and where there are fewer than eight streams for
  several, one after the other, so that a round has at least eight. Prompts differ from each other and from round to
  round; sampling is seeded, at temperature 0.8; the model's own end is ignored, so that all answers are as long.
- Tokens are those of each answer's usage. Time to the first token is from the writing of a request until its first
  event arrives; time between tokens is from there to the end, by the tokens less one. Both are medians of the requests.
  A server that is behind sends several tokens in one event: "tokens/event".
- A ratio among the goals is the median of the rounds' own ratios, each of two rounds taken one after the other.
- Processor time is that of whole processes as the kernel counts it. The client, one process for both, is in none of the
  systems, and its time is given for itself.
{about_model}"""
_TINY = """\
- The model is as small as can be, so that what is around it shows; tokens a second say what the ways out cost, and
  nothing of how fast vLLM computes a model.
"""
_ON_CARD = """\
- On a card vLLM's defaults are in use: CUDA graphs, asynchronous scheduling, the V2 runner. What the model itself takes
  for logprobs is in both systems' figures. How large the model is, its folder says: `--model`.
"""


def page(record: Record, command: str, name: str = "vllm") -> str:
    """Return the page, with the command that writes it, and what the files beside it are called."""
    return _PAGE.format(
        command=command,
        name=name,
        about_model=_ON_CARD if record["card"] else _TINY,
        report=render(record, Paint(colour=False)),
        machine=in_words(record["machine"] | ({"card": record["card"]} if record["card"] else {})),
        options=" ".join(record["engine_options"]),
    )
