"""The shape of vLLM's messages on msgspec: its structs' fields, and its way with arrays; not its code."""

from typing import Any, NamedTuple

import msgspec
import numpy as np

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


class ArrayCodec:
    """msgpack with arrays: a small one lies in the message, a larger one is a frame beside it."""

    def __init__(self, kind: type[EngineCoreOutputs]) -> None:
        """Make the encoder, and a decoder of this type."""
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._to_native)
        self._decoder = msgspec.msgpack.Decoder(kind, dec_hook=self._from_native, ext_hook=self._view)
        self._frames: list[Any] = []

    def encode(self, value: EngineCoreOutputs) -> list[Any]:
        """Return the frames."""
        self._frames = frames = [b""]
        frames[0] = self._encoder.encode(value)
        return frames

    def decode(self, frames: list[Any]) -> EngineCoreOutputs:
        """Return the value; its arrays are views of the frames."""
        self._frames = frames
        return self._decoder.decode(frames[0])

    def _to_native(self, value: Any) -> Any:  # noqa: ANN401 - msgspec's hook
        if isinstance(value, np.ndarray) and value.dtype.kind not in "OV":
            return self._array_to_native(value)
        raise TypeError(f"a {type(value).__name__} is not sent")

    def _array_to_native(self, array: np.ndarray) -> tuple[str, tuple[int, ...], Any]:
        data: Any = array.data if array.flags.c_contiguous else array.tobytes()
        if not array.shape or array.nbytes < _OWN_FRAME_BYTES:
            return array.dtype.str, array.shape, msgspec.msgpack.Ext(_RAW_VIEW, data)
        self._frames.append(data)
        return array.dtype.str, array.shape, len(self._frames) - 1

    def _from_native(self, kind: type, value: Any) -> Any:  # noqa: ANN401 - msgspec's hook
        if not issubclass(kind, np.ndarray):
            raise TypeError(f"a {kind.__name__} is not received")
        dtype, shape, data = value
        return np.frombuffer(self._frames[data] if isinstance(data, int) else data, dtype).reshape(shape)

    def _view(self, code: int, data: memoryview) -> memoryview:
        if code != _RAW_VIEW:
            raise ValueError(f"extension type {code} is not sent")
        return data
