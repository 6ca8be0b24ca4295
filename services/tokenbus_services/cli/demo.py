"""tokenbus demo: a batch built, encoded, read by the generated classes, broken in five ways and refused."""

import argparse

import numpy as np

from tokenbus_contracts import (
    BatchHeader,
    ContractError,
    LogprobBatch,
    RowStatus,
    Scoring,
    SpeculativeMethod,
    ValueKind,
    decode,
    encode,
)
from tokenbus_contracts.generated.logprob_batch_pb2 import LogprobBatch as BatchMessage
from tokenbus_services.cli.terminal import styled

_WORDS = {0: "<s>", 11: " the", 12: " quick", 13: " brown", 14: " fox", 27: " a", 28: " slow"}


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the options: there are none."""
    parser.description = "Show the contract at work, on three requests of one speculative step."


def run(options: argparse.Namespace) -> int:
    """Show it; return 1 if anything but the five refusals goes wrong."""
    del options
    batch = _batch()
    print(styled("1. A step of three requests, as columns", "bold"))
    for row in batch.in_batch_order().rows():
        words = " ".join(
            f"{_WORDS[token_id]!r}({np.exp(logprob):.0%}, rank {rank})"
            for token_id, logprob, rank in zip(row.token_ids.tolist(), row.logprobs, row.ranks, strict=True)
        )
        print(f"   request {row.key:#06x} from position {row.position}: {row.status.name:13} {words}")

    data = encode(batch)
    print(styled("2. Encoded", "bold"))
    print(f"   {len(data)} bytes: {data[:24].hex(' ')} ...")

    message = BatchMessage.FromString(data)
    print(styled("3. Read by the classes that protoc generated", "bold"))
    print(f"   token_counts {list(message.token_counts)}, token_ids {list(message.token_ids)}")
    same = message.SerializeToString(deterministic=True) == data and decode(data) == batch
    print(f"   the same bytes from them, the same columns from decode: {'yes' if same else 'NO'}")

    print(styled("4. Broken in five ways", "bold"))
    refused = [_refused(what, broken) for what, broken in _broken(data)]
    return 0 if same and all(refused) else 1


def _batch() -> LogprobBatch:
    """Return a step in which the engine has its rows in another order than the original batch."""
    return LogprobBatch(
        BatchHeader(
            worker_id="worker-0",
            epoch=1,
            sequence=41,
            step=40,
            step_rows=3,
            method=SpeculativeMethod.MTP,
            value_kind=ValueKind.RAW_LOGPROBS,
            vocabulary_size=32,
        ),
        request_keys=[0x1C, 0x0A, 0x0B],
        batch_indices=[2, 0, 1],
        positions=[4, 17, 0],
        statuses=[RowStatus.FINISHED_STOP, RowStatus.ACTIVE, RowStatus.ACTIVE],
        token_counts=[1, 3, 1],
        draft_token_counts=[3, 3, 3],
        proposal_counts=[0, 0, 0],
        scorings=[Scoring.FULL] * 3,
        top_ks=[0, 2, 0],
        token_ids=[0, 12, 13, 14, 27],
        logprobs=np.log([0.98, 0.40, 0.90, 0.75, 0.20]),
        ranks=[1, 2, 1, 1, 3],
        alternative_token_ids=[28, 12, 13, 12, 14, 11],
        alternative_logprobs=np.log([0.50, 0.40, 0.90, 0.05, 0.75, 0.15]),
    )


def _broken(data: bytes) -> list[tuple[str, bytes]]:
    """Return five damaged messages and what was done to each."""
    surplus, nan, swapped, major = (BatchMessage.FromString(data) for _ in range(4))
    surplus.token_counts[0] = 2
    nan.logprobs[1] = float("nan")
    swapped.batch_indices[0] = 1
    major.header.schema_major = 2
    return [
        ("one count says a token more", surplus.SerializeToString()),
        ("a logprob is not a number", nan.SerializeToString()),
        ("two rows claim one place in the batch", swapped.SerializeToString()),
        ("it speaks another major version", major.SerializeToString()),
        ("its last seven bytes are missing", data[:-7]),
    ]


def _refused(what: str, data: bytes) -> bool:
    try:
        decode(data)
    except ContractError as error:
        print(f"   {what:38} {styled('refused', 'red')}  {error}")
        return True
    print(f"   {what:38} ACCEPTED")
    return False
