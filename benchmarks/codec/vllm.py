"""vLLM's way out: its own structs, encoder and decoder, without a socket or a tokenizer."""

from collections.abc import Hashable, Sequence
from importlib import import_module
from typing import Any

from benchmarks.codec.peer import Peer, Queues
from benchmarks.errors import NotRunError
from benchmarks.workload import Array, Share, Step


class Installed(Peer):
    """vLLM's own encoder, decoder and structs: a message of one struct a request, with arrays for its logprobs."""

    label = "vLLM"

    def __init__(self) -> None:
        self._arrays: dict[int, tuple[Array, Array, Array]] = {}
        self._engine = _vllm("v1.engine")
        self._lists = _vllm("v1.outputs").LogprobsLists
        serial = _vllm("v1.serial_utils")
        self._encoder = serial.MsgpackEncoder()
        self._decoder = serial.MsgpackDecoder(self._engine.EngineCoreOutputs)

    def prepare(self, steps: Sequence[Step]) -> None:
        self._arrays = {
            id(step): (step.rectangle_ids.astype("i4"), step.rectangle_logprobs, step.ranks) for step in steps
        }

    def addresses(self, step: Step) -> Sequence[Hashable]:
        return step.request_ids

    def carry(self, step: Step, queues: Queues) -> int:
        frames = self._encoded(step)
        for output in self._decoder.decode(frames).outputs:
            queues[output.request_id].append(output)
        return sum(memoryview(frame).nbytes for frame in frames)

    def _encoded(self, step: Step) -> list[Any]:
        count = step.case.tokens_per_row
        arrays = self._arrays[id(step)]
        starts, own_ids = range(0, step.case.tokens, count), arrays[0][:, 0].reshape(-1, count).tolist()
        outputs = [
            self._engine.EngineCoreOutput(
                request_id=request_id,
                new_token_ids=token_ids,
                new_logprobs=self._lists(*(array[start : start + count] for array in arrays)),
            )
            for request_id, token_ids, start in zip(step.request_ids, own_ids, starts, strict=True)
        ]
        return list(self._encoder.encode(self._engine.EngineCoreOutputs(outputs=outputs)))

    def plain(self, delivered: Any, top_k: int) -> Share:  # noqa: ANN401 - vLLM's
        ids, logprobs, ranks = delivered.new_logprobs[:3]
        return Share(
            delivered.new_token_ids,
            logprobs[:, 0].tolist(),
            ranks.tolist(),
            ids[:, 1 : top_k + 1].tolist(),
            logprobs[:, 1 : top_k + 1].tolist(),
        )


def _vllm(module: str) -> Any:  # noqa: ANN401 - a module that may not be there
    try:
        return import_module(f"vllm.{module}")
    except ImportError as error:
        raise NotRunError(f"not run: vLLM cannot be imported: {error}") from None
