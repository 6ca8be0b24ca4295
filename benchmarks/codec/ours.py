"""The peers that carry Tokenbus's own message: with the codec, with the generated classes, and through ZeroMQ."""

import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count as counting
from itertools import repeat
from typing import Any, Self

import zmq

from benchmarks.codec.peer import Peer, Queues
from benchmarks.workload import VOCABULARY_SIZE, Share, Step
from tokenbus_contracts import BatchHeader, LogprobBatch, SpeculativeMethod, ValueKind, decode, encode
from tokenbus_contracts.generated import logprob_batch_pb2
from tokenbus_contracts.schema import MAJOR, MINOR

_READ = (
    "request_ids",
    "token_counts",
    "top_ks",
    "token_ids",
    "logprobs",
    "ranks",
    "alternative_token_ids",
    "alternative_logprobs",
)
"""The columns that a request's lists are made of."""
_DEADLINE_MS = 10_000


def batch_of(step: Step) -> LogprobBatch:
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
    return encode(batch_of(step))


def share_of(batch: LogprobBatch, index: int) -> Share:
    row = batch.row(index)
    return Share(
        row.token_ids.tolist(),
        row.logprobs.tolist(),
        row.ranks.tolist(),
        row.alternative_token_ids.tolist(),
        row.alternative_logprobs.tolist(),
    )


class Views(Peer):
    """Tokenbus: each request is given the batch and the number of its row."""

    label = "Tokenbus"

    def carry(self, step: Step, queues: Queues) -> int:
        message = message_of(step)
        batch = decode(self._through(message))
        shares = zip(repeat(batch), counting())
        deque(map(deque.append, map(queues.__getitem__, batch.request_ids.tolist()), shares), maxlen=0)
        return len(message)

    def _through(self, message: bytes) -> bytes:
        return message

    def plain(self, delivered: tuple[LogprobBatch, int], top_k: int) -> Share:  # noqa: ARG002 - the row knows
        return share_of(*delivered)


class GeneratedClasses(Peer):
    """Tokenbus's schema through the generated protobuf classes: filled from lists, read into lists, not checked."""

    label = "protobuf classes"

    def carry(self, step: Step, queues: Queues) -> int:
        header = logprob_batch_pb2.BatchHeader(
            schema_major=MAJOR,
            schema_minor=MINOR,
            worker_id="worker-0",
            epoch=1,
            sequence=step.number,
            step=step.number,
            step_rows=step.case.rows,
            part_count=1,
            kind="BATCH_KIND_TARGET",
            phase="STEP_PHASE_DECODE",
            method="SPECULATIVE_METHOD_MTP",
            value_kind="VALUE_KIND_RAW_LOGPROBS",
            vocabulary_size=VOCABULARY_SIZE,
            produced_at_ns=1_700_000_000_000_000_000 + step.number,
        )
        batch = logprob_batch_pb2.LogprobBatch(header=header)
        for name, column in step.columns.items():
            getattr(batch, name).extend(column.tolist())
        message = batch.SerializeToString()
        parsed = logprob_batch_pb2.LogprobBatch.FromString(message)
        self._deliver((list(getattr(parsed, name)) for name in _READ), queues)
        return len(message)

    @staticmethod
    def _deliver(columns: Iterable[list[Any]], queues: Queues) -> None:
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
            own = ids[token:end], logprobs[token:end], ranks[token:end]
            queues[key].append((*own, alternatives, alternative_logprobs))
            token = end

    def plain(self, delivered: tuple[list[Any], ...], top_k: int) -> Share:
        ids, logprobs, ranks, *alternatives = delivered
        return Share(ids, logprobs, ranks, *(alternatives if top_k else [[[] for _ in ids]] * 2))


class ThroughZeroMQ(Views):
    """Tokenbus with a ZeroMQ send and recv, over ipc in this process, between encode and decode."""

    label = "Tokenbus + ZeroMQ"
    _pull: "zmq.Socket[bytes]"
    _push: "zmq.Socket[bytes]"

    @classmethod
    @contextmanager
    def opened(cls) -> Iterator[Self]:
        with tempfile.TemporaryDirectory() as folder, zmq.Context() as context:
            peer = cls()
            with context.socket(zmq.PULL) as peer._pull, context.socket(zmq.PUSH) as peer._push:
                for socket in (peer._pull, peer._push):
                    socket.linger = 0
                    socket.rcvtimeo = socket.sndtimeo = _DEADLINE_MS
                peer._pull.bind(f"ipc://{folder}/pipe")
                peer._push.connect(f"ipc://{folder}/pipe")
                yield peer

    def _through(self, message: bytes) -> bytes:
        self._push.send(message)
        return self._pull.recv()
