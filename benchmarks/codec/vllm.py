"""vLLM's way out: msgpack of one struct a request, with arrays for its logprobs.

Three peers: the same shape written here on msgspec, and vLLM's own classes, without and with what they go through to
reach its API, where vLLM is installed. None has a socket or a tokenizer.
"""

from collections.abc import Hashable, Iterable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import msgspec
import numpy as np

from benchmarks.codec.peer import Peer, Queues
from benchmarks.errors import NotRunError
from benchmarks.workload import Array, Share, Step

_RAW_VIEW = 3
_OWN_FRAME_BYTES = 256


class LogprobsLists(NamedTuple):
    """A request's tokens with their alternatives: one line a token, the sampled token first."""

    logprob_token_ids: np.ndarray
    logprobs: np.ndarray
    sampled_token_ranks: np.ndarray
    cu_num_generated_tokens: list[int] | None = None


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A request's share of a step."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: LogprobsLists | None = None
    new_prompt_logprobs_tensors: None = None
    pooling_output: None = None
    finish_reason: int | None = None
    stop_reason: int | str | None = None
    events: list[Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    trace_headers: dict[str, str] | None = None
    num_cached_tokens: int = 0
    num_nans_in_logits: int = 0


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A step."""

    engine_index: int = 0
    outputs: list[EngineCoreOutput] = []
    scheduler_stats: dict[str, Any] | None = None
    timestamp: float = 0.0


class PerRequest(Peer):
    """A message of one struct a request."""

    def __init__(self) -> None:
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
        arrays = self._arrays[id(step)]
        starts, own_ids = range(0, step.case.tokens, count), arrays[0][:, 0].reshape(-1, count).tolist()
        return [
            make(
                request_id=request_id,
                new_token_ids=token_ids,
                new_logprobs=make_lists(*(array[start : start + count] for array in arrays)),
            )
            for request_id, token_ids, start in zip(step.request_ids, own_ids, starts, strict=True)
        ]

    def encoded(self, step: Step) -> list[Any]:
        """Return the frames of a prepared step."""
        raise NotImplementedError

    def decoded(self, frames: list[Any]) -> Iterable[Any]:
        """Return each request's output."""
        raise NotImplementedError

    def carry(self, step: Step, queues: Queues) -> int:
        """Slice, encode, decode, deliver."""
        frames = self.encoded(step)
        for output in self.decoded(frames):
            queues[output.request_id].append(output)
        return sum(memoryview(frame).nbytes for frame in frames)

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
    """vLLM's shape on msgspec: a small array lies in the message, a larger one is a frame beside it."""

    label = "vLLM's shape (msgspec)"

    def __init__(self) -> None:
        """Make the encoder and the decoder."""
        super().__init__()
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._to_native)
        self._decoder = msgspec.msgpack.Decoder(
            EngineCoreOutputs, dec_hook=self._from_native, ext_hook=lambda _code, data: data
        )
        self._frames: list[Any] = []

    def encoded(self, step: Step) -> list[Any]:
        """Slice and encode."""
        outputs = self._sliced(step, EngineCoreOutput, LogprobsLists)
        self._frames = frames = [b""]
        frames[0] = self._encoder.encode(EngineCoreOutputs(outputs=outputs, timestamp=float(step.number)))
        return frames

    def decoded(self, frames: list[Any]) -> Iterable[Any]:
        """Decode; the arrays are views of the frames."""
        self._frames = frames
        return self._decoder.decode(frames[0]).outputs

    def _to_native(self, array: np.ndarray) -> tuple[str, tuple[int, ...], Any]:
        data: Any = array.data if array.flags.c_contiguous else array.tobytes()
        if not array.shape or array.nbytes < _OWN_FRAME_BYTES:
            return array.dtype.str, array.shape, msgspec.msgpack.Ext(_RAW_VIEW, data)
        self._frames.append(data)
        return array.dtype.str, array.shape, len(self._frames) - 1

    def _from_native(self, _kind: type, value: Any) -> Any:  # noqa: ANN401 - msgspec's hook
        dtype, shape, data = value
        return np.frombuffer(self._frames[data] if isinstance(data, int) else data, dtype).reshape(shape)


class Installed(PerRequest):
    """vLLM's own encoder, decoder and structs."""

    label = "vLLM"

    def __init__(self) -> None:
        """Import vLLM, or raise a NotRunError."""
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

    def decoded(self, frames: list[Any]) -> Iterable[Any]:
        """Decode."""
        outputs: Iterable[Any] = self._decoder.decode(frames).outputs
        return outputs


class InstalledToItsEnd(Installed):
    """vLLM's own classes up to the dicts of Logprob objects that its API reads, its default (flat_logprobs is off)."""

    label = "vLLM + LogprobsProcessor"

    def __init__(self) -> None:
        """Import vLLM, or raise a NotRunError."""
        super().__init__()
        self._make = _vllm("v1.engine.logprobs").LogprobsProcessor
        self._processors: dict[Hashable, Any] = {}

    def prepare(self, steps: Sequence[Step]) -> None:
        """Make each request's processor too: it lives as long as its request."""
        super().prepare(steps)
        self._processors = {
            request_id: self._make(
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
    except ImportError as error:
        raise NotRunError(f"not run: vLLM cannot be imported: {error}") from None
