"""FastDeploy's newer way: dataclasses of arrays, one a request, pickled."""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from benchmarks.codec.fastdeploy import CompletionOutput, FastDeploy, LogprobsLists, RequestOutput
from benchmarks.codec.peer import Queues
from benchmarks.workload import Array, Step


class DecoderState(Enum):
    """What a transferred share holds."""

    TEXT = "text"


class LogprobsArrays(NamedTuple):
    """A request's tokens with their alternatives, as arrays."""

    logprob_token_ids: Array
    logprobs: Array
    sampled_token_ranks: Array

    def to_lists(self) -> LogprobsLists:
        """Return the same as lists."""
        return LogprobsLists(*(array.tolist() for array in self))


@dataclass
class StreamTransferData:
    """A request's share of a step, as it is pickled."""

    decoder_state: DecoderState
    batch_id: int
    tokens: Array
    speculative_decoding: bool = True
    logprobs: LogprobsArrays | None = None
    prompt_logprobs: None = None
    accept_tokens: None = None
    accept_num: None = None
    pooler_output: None = None


class Pickle(FastDeploy):
    """Pickled per-request dataclasses."""

    name = "fastdeploy_pickle"
    label = "FastDeploy pickle"
    short = "pickle"
    includes = (
        "slice the arrays per request into dataclasses, pickle.dumps and loads of the list (pyzmq's default "
        "protocol), then per request the same lists; no socket (FastDeploy's own does not support speculation)"
    )

    def carry(self, step: Step, queues: Queues) -> int:
        """Slice, pickle, unpickle, and build the outputs."""
        message = self.dumped(step)
        self.loaded(message, step, queues)
        return len(message)

    def dumped(self, step: Step) -> bytes:
        """Slice and pickle."""
        return pickle.dumps(_sliced(step), pickle.DEFAULT_PROTOCOL)

    def loaded(self, message: bytes, step: Step, queues: Queues) -> None:
        """Unpickle, and build the outputs for the step's requests."""
        for data in pickle.loads(message):  # noqa: S301 - written by `dumped`
            outputs = CompletionOutput(data.batch_id, 0, [])
            lists = data.logprobs.to_lists()
            outputs.logprob = lists.logprobs[0][0]
            outputs.top_logprobs = lists
            for token_id in data.tokens.tolist():
                outputs.token_ids.append(token_id)
            queues[step.keys[data.batch_id]].append(RequestOutput(step.request_ids[data.batch_id], outputs))


def _sliced(step: Step) -> Sequence[StreamTransferData]:
    count = step.case.tokens_per_row
    ids, logprobs, ranks = step.rectangle_ids, step.rectangle_logprobs, step.ranks
    return [
        StreamTransferData(
            DecoderState.TEXT,
            slot,
            ids[start : start + count, 0],
            logprobs=LogprobsArrays(
                ids[start : start + count], logprobs[start : start + count], ranks[start : start + count]
            ),
        )
        for slot, start in enumerate(range(0, step.case.tokens, count))
    ]
