"""Our own schema through the generated protobuf classes, used as anyone would without the codec."""

from typing import Any

from benchmarks.codec.ours import READ, deliver_lists, share_of_lists
from benchmarks.codec.peer import Peer, Queues
from benchmarks.workload import VOCABULARY_SIZE, Share, Step
from tokenbus_contracts.generated.logprob_batch_pb2 import BatchHeader, LogprobBatch
from tokenbus_contracts.schema import MAJOR, MINOR


class GeneratedClasses(Peer):
    """The generated classes: filled from lists, read into lists."""

    name = "protobuf"
    label = "protobuf classes"
    short = "pb"
    includes = (
        "our schema's generated classes: extend every column with a list, SerializeToString, FromString, read the "
        "columns as lists, per request the same lists as Tokenbus's; nothing checked"
    )

    def carry(self, step: Step, queues: Queues) -> int:
        """Fill, serialize, parse, read, deliver."""
        header = BatchHeader(
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
        batch = LogprobBatch(header=header)
        for name, column in step.columns.items():
            getattr(batch, name).extend(column.tolist())
        message = batch.SerializeToString()
        parsed = LogprobBatch.FromString(message)
        deliver_lists((list(getattr(parsed, name)) for name in READ), queues)
        return len(message)

    def plain(self, delivered: tuple[list[Any], ...], top_k: int) -> Share:
        """Read a request's lists."""
        return share_of_lists(delivered, top_k)
