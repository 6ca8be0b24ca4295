"""RequestStates: what a prefill engine hands off to a decode engine. It came over the network: all of it is checked."""

from typing import Any

import numpy as np
import numpy.typing as npt

from tokenbus_engines.paddle.network import Shape
from tokenbus_engines.paddle.requests import Handed, Request, refused
from tokenbus_engines.paddle.runner import Lines
from tokenbus_engines.paddle.tokenizer import VOCABULARY_SIZE

_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "U8": np.dtype(np.uint8),
}
_KINDS = {
    "fingerprint": "U8",
    "seed": "U64",
    "prompt": "I32",
    "output": "I32",
    "drafts": "I32",
    "draft_logits": "F32",
    "keys": "F32",
    "values": "F32",
}
_LARGEST = 65_504.0
"""No number of a sound state comes near it, and none below it overflows in what is computed of it."""
_HEADER_BYTES = 65_536


class RequestStates:
    """Packs states of requests, and unpacks those that were packed by an engine like this one."""

    def __init__(self, shape: Shape, fingerprint: bytes, context: int) -> None:
        """Say what the engine's weights are, and how many tokens a slot holds."""
        self._shape = shape
        self._fingerprint = fingerprint
        held = 2 * shape.layers * context * shape.width * 4
        self._most_bytes = held + 4 * context + 4 * shape.draft_heads * VOCABULARY_SIZE + _HEADER_BYTES

    def packed(self, request: Request, keys: Lines, values: Lines) -> bytes:
        """Return a request's state, with what its slot holds, as safetensors."""
        from safetensors.numpy import save  # noqa: PLC0415 - of the extra, as paddle is

        logits = request.draft_logits
        arrays: dict[str, npt.NDArray[Any]] = {
            "fingerprint": np.frombuffer(self._fingerprint, np.uint8),
            "seed": np.array([request.seed], np.uint64),
            "prompt": np.array(request.prompt, np.int32),
            "output": np.array(request.output, np.int32),
            "drafts": np.array(request.drafts, np.int32),
            "draft_logits": np.zeros((0, VOCABULARY_SIZE), np.float32) if logits is None else logits,
            "keys": keys,
            "values": values,
        }
        state: bytes = save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
        return state

    def unpack(self, state: bytes, request: Request) -> None:
        """Continue a new request from a state; after a ValueError, the request must be dropped."""
        if len(state) > self._most_bytes:
            raise refused("state", f"at most {self._most_bytes} bytes", len(state))
        arrays = self._arrays(state, request)
        found = arrays["fingerprint"].tobytes()
        if found != self._fingerprint:
            raise refused("state.fingerprint", f"{self._fingerprint.hex()}, that of the weights here", found.hex())
        for name in ("output", "drafts"):
            _check_tokens(name, arrays[name])
        for name in ("draft_logits", "keys", "values"):
            _check_numbers(name, arrays[name])
        if arrays["prompt"].tolist() != request.prompt:
            raise ValueError("state.prompt: the request's own, got another")
        output = arrays["output"].tolist()
        if not 1 <= len(output) < request.most:
            raise refused("state.output", f"1 to {request.most - 1} tokens, so that one is left", len(output))
        for token in output:
            if request.append(token):
                raise refused("state.output", "no token that ends the request", token)
        count = min(arrays["drafts"].size, request.most - request.position - 1)
        request.drafts = arrays["drafts"][:count].tolist()
        request.draft_logits = arrays["draft_logits"][:count]
        request.handed = Handed(arrays["keys"], arrays["values"])
        if not request.is_seeded:
            request.seed = int(arrays["seed"][0])

    def _arrays(self, state: bytes, request: Request) -> dict[str, npt.NDArray[Any]]:
        """Return a state's arrays, each of the kind and the shape that it must have for this request."""
        found = _entries(state)
        for name, kind in _KINDS.items():
            if found[name]["dtype"] != kind:
                raise refused(f"state.{name}", kind, found[name]["dtype"])
        # A state may claim any shape; its size is what it has.
        output, drafts = len(found["output"]["data"]) // 4, len(found["drafts"]["data"]) // 4
        if drafts > self._shape.draft_heads:
            raise refused("state.drafts", f"at most {self._shape.draft_heads}", drafts)
        length = len(request.prompt) + output - 1
        held = (self._shape.layers, self._shape.attention_heads, length, self._shape.head_width)
        for name, wanted in (
            ("fingerprint", (len(self._fingerprint),)),
            ("seed", (1,)),
            ("prompt", (len(request.prompt),)),
            ("output", (output,)),
            ("drafts", (drafts,)),
            ("draft_logits", (drafts, VOCABULARY_SIZE)),
            ("keys", held),
            ("values", held),
        ):
            if (shape := tuple(found[name]["shape"])) != wanted:
                raise refused(f"state.{name}", f"shape {wanted}", str(shape)[:200])
        return {
            name: np.frombuffer(found[name]["data"], _DTYPES[kind]).reshape(found[name]["shape"])
            for name, kind in _KINDS.items()
        }


def _entries(state: bytes) -> dict[str, dict[str, Any]]:
    """Return what a state says of each of its arrays, with its bytes."""
    from safetensors import SafetensorError, deserialize  # noqa: PLC0415 - of the extra, as paddle is

    try:
        found = dict(deserialize(state))
    except SafetensorError as error:
        raise ValueError(f"state: damaged, or no safetensors: {error}") from None
    if found.keys() != _KINDS.keys():
        raise refused("state", f"the arrays {', '.join(_KINDS)}", ascii(sorted(found))[:200])
    return found


def _check_tokens(name: str, tokens: npt.NDArray[Any]) -> None:
    wrong = np.flatnonzero((tokens < 0) | (tokens >= VOCABULARY_SIZE))
    if wrong.size:
        raise refused(f"state.{name}[{wrong[0]}]", f"0 to {VOCABULARY_SIZE - 1}", int(tokens[wrong[0]]))


def _check_numbers(name: str, numbers: npt.NDArray[Any]) -> None:
    # Not "above": that would let NaN pass.
    wrong = ~(np.abs(numbers) <= _LARGEST)
    if wrong.any():
        raise refused(f"state.{name}", f"finite numbers up to {_LARGEST:.0f}", numbers[wrong][0])
