"""vLLM's way out: msgpack of one struct a request, with arrays for its logprobs.

Three lines: the same shape written here on msgspec, and vLLM's own classes, without and with what they go
through to reach its API, where vLLM is installed.
"""

from collections.abc import Hashable, Iterable, Sequence
from importlib import import_module
from typing import Any

from benchmarks.codec.peer import Peer, Queues
from benchmarks.codec.vllm_shape import ArrayCodec, EngineCoreOutput, EngineCoreOutputs, LogprobsLists
from benchmarks.errors import NotRunError
from benchmarks.workload import Array, Share, Step


class PerRequest(Peer):
    """A message of one struct a request."""

    def __init__(self) -> None:
        """Start without arrays."""
        self._arrays: dict[int, tuple[Array, Array, Array]] = {}

    def prepare(self, steps: Sequence[Step]) -> None:
        """Lay the arrays out as vLLM's sampler does: ids of 32 bits."""
        self._arrays = {
            id(step): (step.rectangle_ids.astype("i4"), step.rectangle_logprobs, step.ranks) for step in steps
        }

    def addresses(self, step: Step) -> Sequence[Hashable]:
        """Return the request ids: the message carries them."""
        return step.request_ids

    def _sliced(self, step: Step, make: Any, make_lists: Any) -> list[Any]:  # noqa: ANN401 - ours or vLLM's
        count = step.case.tokens_per_row
        ids, logprobs, ranks = self._arrays[id(step)]
        return [
            make(
                request_id=request_id,
                new_token_ids=token_ids,
                new_logprobs=make_lists(
                    ids[start : start + count], logprobs[start : start + count], ranks[start : start + count]
                ),
            )
            for request_id, token_ids, start in zip(
                step.request_ids,
                ids[:, 0].reshape(-1, count).tolist(),
                range(0, step.case.tokens, count),
                strict=True,
            )
        ]

    @staticmethod
    def _handed_out(frames: Sequence[Any], outputs: Iterable[Any], queues: Queues) -> int:
        for output in outputs:
            queues[output.request_id].append(output)
        return sum(memoryview(frame).nbytes for frame in frames)

    def encoded(self, step: Step) -> list[Any]:
        """Return the frames of a prepared step."""
        raise NotImplementedError

    def decoded(self, frames: list[Any]) -> Sequence[Any]:
        """Return each request's output."""
        raise NotImplementedError

    def carry(self, step: Step, queues: Queues) -> int:
        """Slice, encode, decode, deliver."""
        frames = self.encoded(step)
        return self._handed_out(frames, self.decoded(frames), queues)

    def plain(self, delivered: EngineCoreOutput, top_k: int) -> Share:
        """Read a request's output."""
        if delivered.new_logprobs is None:
            raise ValueError(f"request {delivered.request_id} got no logprobs")
        ids, logprobs, ranks = delivered.new_logprobs[:3]
        return Share(
            delivered.new_token_ids,
            logprobs[:, 0].tolist(),
            ranks.tolist(),
            ids[:, 1 : top_k + 1].tolist(),
            logprobs[:, 1 : top_k + 1].tolist(),
        )


class MsgspecShape(PerRequest):
    """vLLM's shape on msgspec."""

    name = "vllm_shape"
    label = "vLLM's shape (msgspec)"
    short = "shape"
    includes = (
        "slice the arrays per request into EngineCoreOutput structs, msgpack encode and decode (an array as "
        "dtype, shape and bytes; a frame of its own from 256 bytes up), and each request's struct into its queue: "
        "token ids as a list, the rest as views; no socket, no LogprobsProcessor behind it"
    )

    def __init__(self) -> None:
        """Make the encoder and the decoder."""
        super().__init__()
        self._codec = ArrayCodec(EngineCoreOutputs)

    def encoded(self, step: Step) -> list[Any]:
        """Slice and encode."""
        outputs = self._sliced(step, EngineCoreOutput, LogprobsLists)
        return self._codec.encode(EngineCoreOutputs(outputs=outputs, timestamp=float(step.number)))

    def decoded(self, frames: list[Any]) -> Sequence[Any]:
        """Decode."""
        return self._codec.decode(frames).outputs


class Installed(PerRequest):
    """vLLM's own classes."""

    name = "vllm"
    label = "vLLM"
    short = "vLLM"
    includes = "as vLLM's shape, with the installed vLLM's MsgpackEncoder, MsgpackDecoder and EngineCoreOutputs"

    def __init__(self) -> None:
        """Import vLLM, or raise NotRunError."""
        super().__init__()
        self._engine = _vllm("v1.engine")
        self._lists = _vllm("v1.outputs").LogprobsLists
        serial = _vllm("v1.serial_utils")
        self._encoder = serial.MsgpackEncoder()
        self._decoder = serial.MsgpackDecoder(self._engine.EngineCoreOutputs)

    def encoded(self, step: Step) -> list[Any]:
        """Slice and encode."""
        outputs = self._sliced(step, self._engine.EngineCoreOutput, self._lists)
        return list(self._encoder.encode(self._engine.EngineCoreOutputs(outputs=outputs)))

    def decoded(self, frames: list[Any]) -> Sequence[Any]:
        """Decode."""
        outputs: Sequence[Any] = self._decoder.decode(frames).outputs
        return outputs


class InstalledToItsEnd(Installed):
    """vLLM's own classes, up to the logprobs that its clients get."""

    name = "vllm_processed"
    label = "vLLM + LogprobsProcessor"
    short = "vLLM+LP"
    includes = (
        "as vLLM, and then each request's output through vLLM's own LogprobsProcessor, whose list starts anew with "
        "each step: a dict of as many Logprob objects a token as the request wants, vLLM's default (its flat_logprobs "
        "is off), which is what its API reads; no tokenizer, so no text, and no RequestOutput around it"
    )

    def __init__(self) -> None:
        """Import vLLM, or raise NotRunError."""
        super().__init__()
        self._processor = _vllm("v1.engine.logprobs").LogprobsProcessor
        self._processors: dict[Hashable, Any] = {}

    def prepare(self, steps: Sequence[Step]) -> None:
        """Make each request's processor too: it lives as long as its request."""
        super().prepare(steps)
        self._processors = {
            request_id: self._processor(
                tokenizer=None,
                logprobs=[],
                prompt_logprobs=None,
                cumulative_logprob=0.0,
                num_logprobs=top_k,  # in a mixed step the rectangle is wider, and the rest of it is not read
                num_prompt_logprobs=None,
            )
            for step in steps
            for request_id, top_k in zip(step.request_ids, step.top_ks, strict=True)
        }

    def carry(self, step: Step, queues: Queues) -> int:
        """Slice, encode, decode, process, deliver."""
        frames = self.encoded(step)
        for output in self.decoded(frames):
            processor = self._processors[output.request_id]
            processor.logprobs = []
            processor.update_from_output(output)
            queues[output.request_id].append((output.new_token_ids, processor.logprobs))
        return sum(memoryview(frame).nbytes for frame in frames)

    def plain(self, delivered: Any, top_k: int) -> Share:  # noqa: ANN401 - each peer delivers its own kind
        """Read a request's dicts: the sampled token is the first entry, and each knows its rank."""
        token_ids, positions = delivered
        alternatives = [
            sorted(((entry.rank, token_id, entry.logprob) for token_id, entry in position.items()))[:top_k]
            for position in positions
        ]
        own = [position[token_id] for token_id, position in zip(token_ids, positions, strict=True)]
        return Share(
            token_ids,
            [entry.logprob for entry in own],
            [entry.rank for entry in own],
            [[token_id for _, token_id, _ in entries] for entries in alternatives],
            [[logprob for _, _, logprob in entries] for entries in alternatives],
        )


def _vllm(module: str) -> Any:  # noqa: ANN401 - a module that may not be there
    try:
        return import_module(f"vllm.{module}")
    except ModuleNotFoundError as error:
        missing = "vLLM is not installed" if error.name == "vllm" else f"vLLM misses {error.name or error}"
        raise NotRunError(f"not run: {missing}") from None
    except ImportError as error:
        raise NotRunError(f"not run: vLLM cannot be imported: {error}") from None
