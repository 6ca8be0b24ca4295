"""The pauses as a table, and the page for docs/."""

from collections.abc import Iterator
from statistics import median

from benchmarks.machine import in_words
from benchmarks.outputs import Record
from benchmarks.paint import Paint
from benchmarks.scaling.failover import nodes

_WANTED = {"kill": 2.0, nodes.BUS: 5.0, nodes.LEADER: 5.0}
"""Within how many seconds requests are to go on, in each round."""
_IN_WORDS = {
    "kill": "a processor is killed (SIGKILL)",
    "terminate": "a processor is asked to end (SIGTERM)",
    "stop": "a processor stands still (SIGSTOP)",
    nodes.BUS: "the NATS server that carries all is killed",
    nodes.STILL: "the NATS server that carries all stands still",
    nodes.LEADER: "the NATS server that leads the log is killed",
}
_ABOUT = """\
<!-- Written by `python -m benchmarks.scaling.failover --write-docs`. Do not edit: the next run writes it anew. -->
# Failover

How long requests pause, in seconds: real processes on one machine, two processors, {workers} workers of 20 steps/s each
and a client with {requests} requests, at the default settings. [failover.json](failover.json) has every round,
[scaling.md](../scaling.md#what-happens-when-something-fails) says what happens.

    python -m benchmarks.scaling.failover --write-docs

{machines}

```text
{tables}
```

Over ZeroMQ, a processor goes: the pause is until every request that it had has its next token at the client. Over a
cluster of three NATS servers, one is killed or stands still: the pause is until the client has a token of every request
that was produced after that, and a reader of the durable log an item of every worker. New requests are asked for each
0.2 s until then, and the longest wait for a first token counts. "Carries all" is the server that all processes are
connected to, so each of them notices at once. The log has three replicas and is `durable`, with
`limits.max_message_bytes = {message_bytes}`; its leader is killed wherever the processes are connected: who is
connected to another server may learn of it by `bus.heartbeat_timeout_ms` alone, and the log has to wait for the
servers' own election ("a leader again"). What it asks while there is no leader gets no answer, and is asked again 2 s
later. "Busy" are processes beside it that only compute: with them the processes themselves stand still at times. What
went is started again, and the next round begins once all is whole.
"""


def page(record: Record) -> str:
    """Return the page."""
    first = record["runs"][0]
    machines = dict.fromkeys(
        f"Machine: {in_words(run['machine'])}. It is shared with others." for run in record["runs"]
    )
    return _ABOUT.format(
        workers=first["workers"],
        requests=first["requests"],
        message_bytes=nodes.MESSAGE_BYTES,
        machines="\n\n".join(machines),
        tables="\n".join(tables(record, Paint(colour=False))),
    )


def tables(record: Record, colours: Paint) -> Iterator[str]:
    """Yield the lines of the table: what went, who waited, and for how long."""
    yield colours.title(
        f"{'what goes':<48}{'who waits':<20}{'cores':>5}{'busy':>6}{'rounds':>8}{'median':>8}{'worst':>8}  goal: each"
    )
    for run in record["runs"]:
        for way in run["ways"]:
            worst = max(way["seconds"])
            line = (
                f"{_IN_WORDS[way['how']]:<48}{way['seen_by']:<20}{run['machine']['cores']:>5}{run['busy'] or '':>6}"
                f"{len(way['seconds']):>8}{median(way['seconds']):>8.2f}{worst:>8.2f}"
            )
            wanted = _WANTED.get(way["how"])
            if wanted is not None and not run["busy"] and way["seen_by"] != nodes.ELECTION:
                is_met = worst <= wanted
                line += f"  at most {wanted:g}: " + (colours.good("met") if is_met else colours.bad("missed"))
            yield line
