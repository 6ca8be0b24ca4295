"""Tokenbus's own lines: the same batch delivered as views, as lists, and through a socket."""

from collections import deque
from collections.abc import Iterable
from itertools import count as counting
from itertools import pairwise, repeat
from time import perf_counter_ns
from typing import Any

from benchmarks.codec.peer import Peer, Queues
from benchmarks.codec.sockets import Pipe
from benchmarks.workload import VOCABULARY_SIZE, Share, Step
from tokenbus_contracts import BatchHeader, LogprobBatch, SpeculativeMethod, ValueKind, decode, encode

READ = (
    "request_keys",
    "token_counts",
    "top_ks",
    "token_ids",
    "logprobs",
    "ranks",
    "alternative_token_ids",
    "alternative_logprobs",
)
"""The columns that a request's lists are made of."""
STAGES = ("LogprobBatch(...)", "encode", "decode", "deliver views")


def batch_of(step: Step) -> LogprobBatch:
    """Return the engine's arrays as a batch."""
    header = BatchHeader(
        worker_id="worker-0",
        epoch=1,
        sequence=step.number,
        step=step.number,
        step_rows=step.case.rows,
        method=SpeculativeMethod.MTP,
        value_kind=ValueKind.RAW_LOGPROBS,
        vocabulary_size=VOCABULARY_SIZE,
        produced_at_ns=1_700_000_000_000_000_000 + step.number,
    )
    return LogprobBatch(header, **step.columns)


def message_of(step: Step) -> bytes:
    """Return the step as a message, made and checked from the engine's arrays."""
    return encode(batch_of(step))


def deliver_views(batch: LogprobBatch, queues: Queues) -> None:
    """Give each request the batch and its row's place in it."""
    shares = zip(repeat(batch), counting())
    deque(map(deque.append, map(queues.__getitem__, batch.request_keys.tolist()), shares), maxlen=0)


def staged(step: Step, queues: Queues) -> tuple[int, ...]:
    """Do what `Views` does, and return the nanoseconds that each of STAGES took."""
    times = [perf_counter_ns()]
    batch = batch_of(step)
    times.append(perf_counter_ns())
    message = encode(batch)
    times.append(perf_counter_ns())
    read = decode(message)
    times.append(perf_counter_ns())
    deliver_views(read, queues)
    times.append(perf_counter_ns())
    return tuple(after - before for before, after in pairwise(times))


def deliver_lists(columns: Iterable[list[Any]], queues: Queues) -> None:
    """Give each request its tokens, logprobs, ranks and alternatives as lists of its own, from READ's columns."""
    keys, counts, top_ks, ids, logprobs, ranks, other_ids, other_logprobs = columns
    token = other = 0
    for key, count, top_k in zip(keys, counts, top_ks, strict=True):
        end = token + count
        if top_k:
            starts = range(other, other + count * top_k, top_k)
            alternatives = [other_ids[at : at + top_k] for at in starts]
            alternative_logprobs = [other_logprobs[at : at + top_k] for at in starts]
            other += count * top_k
        else:
            alternatives, alternative_logprobs = [], []
        queues[key].append((ids[token:end], logprobs[token:end], ranks[token:end], alternatives, alternative_logprobs))
        token = end


def share_of_lists(delivered: tuple[list[Any], ...], top_k: int) -> Share:
    """Return what `deliver_lists` gave as a share: it gives no lists for no alternatives."""
    ids, logprobs, ranks, *alternatives = delivered
    if not top_k:
        alternatives = [[[] for _ in ids], [[] for _ in ids]]
    return Share(ids, logprobs, ranks, *alternatives)


class Views(Peer):
    """Tokenbus, each request given a view."""

    name = "ours"
    label = "Tokenbus"
    short = "ours"
    includes = (
        "LogprobBatch from arrays, encode (checked), decode (checked), and (batch, row) into each request's "
        "queue: views, nothing copied out"
    )

    def carry(self, step: Step, queues: Queues) -> int:
        """Encode, decode, deliver."""
        message = message_of(step)
        deliver_views(decode(message), queues)
        return len(message)

    def plain(self, delivered: tuple[LogprobBatch, int], top_k: int) -> Share:  # noqa: ARG002 - the row knows
        """Read a request's row."""
        batch, index = delivered
        row = batch.row(index)
        return Share(
            row.token_ids.tolist(),
            row.logprobs.tolist(),
            row.ranks.tolist(),
            row.alternative_token_ids.tolist(),
            row.alternative_logprobs.tolist(),
        )


class Lists(Peer):
    """Tokenbus, each request given lists of its own."""

    name = "ours_lists"
    label = "Tokenbus, as lists"
    short = "lists"
    includes = (
        "the same, but each request is given Python lists of its tokens, logprobs, ranks and alternatives "
        "(a list a token), as the peers that deliver lists do"
    )

    def carry(self, step: Step, queues: Queues) -> int:
        """Encode, decode, read every column out, deliver."""
        message = message_of(step)
        batch = decode(message)
        deliver_lists((getattr(batch, name).tolist() for name in READ), queues)
        return len(message)

    def plain(self, delivered: tuple[list[Any], ...], top_k: int) -> Share:
        """Read a request's lists."""
        return share_of_lists(delivered, top_k)


class ThroughZeroMQ(Views):
    """Tokenbus through a ZeroMQ socket pair."""

    name = "ours_zeromq"
    label = "Tokenbus + ZeroMQ"
    short = "+zmq"
    includes = "as Tokenbus, with a ZeroMQ send and recv between encode and decode"

    def __init__(self, pipe: Pipe) -> None:
        """Use a pipe that somebody else closes."""
        self._pipe = pipe

    def carry(self, step: Step, queues: Queues) -> int:
        """Encode, send, receive, decode, deliver."""
        message = message_of(step)
        deliver_views(decode(self._pipe.through(message)), queues)
        return len(message)
