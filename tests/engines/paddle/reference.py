"""The network once more: plain numpy in double precision, one text at a time, nothing cached."""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenbus.engines.paddle.weights import COMMITTED, load

Array = npt.NDArray[np.float64]


@cache
def reference() -> "Reference":
    return Reference()


class Reference:
    """The committed weights, and what follows from them by the book."""

    def __init__(self) -> None:
        weights = load(COMMITTED)
        self._shape = weights.shape
        self._arrays = {name: array.astype(np.float64) for name, array in weights.arrays.items()}
        self._states: dict[tuple[int, ...], Array] = {}

    def states(self, tokens: Sequence[int]) -> Array:
        text = tuple(tokens)
        if text not in self._states:
            self._states[text] = self._computed(text)
        return self._states[text]

    def _computed(self, tokens: Sequence[int]) -> Array:
        count, heads = len(tokens), self._shape.attention_heads
        size = self._shape.width // heads
        distance = np.arange(count)[:, None] - np.arange(count)
        x = self._arrays["embedding.weight"][list(tokens)]
        for layer in range(self._shape.layers):
            name = f"blocks.{layer}."
            q, k, v = np.split(
                self._linear(name + "query_key_value", self._norm(name + "attention_norm", x)), 3, axis=-1
            )
            together = []
            for head in range(heads):
                mine = slice(head * size, (head + 1) * size)
                slope = 2.0 ** (-8.0 * (head + 1) / heads)
                scores = q[:, mine] @ k[:, mine].T / math.sqrt(size) - slope * distance
                scores = np.where(distance < 0, -np.inf, scores)
                weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
                together.append(weights / weights.sum(axis=-1, keepdims=True) @ v[:, mine])
            x = x + self._linear(name + "attended", np.concatenate(together, axis=-1))
            x = x + self._mixed(name, x)
        return self._norm("norm", x)

    def logprobs(self, states: Array) -> Array:
        logits = states @ self._arrays["embedding.weight"].T
        logits -= logits.max(axis=-1, keepdims=True)
        found: Array = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        return found

    def draft_logprobs(self, state: Array, last: int, drafts: Sequence[int]) -> Array:
        """Return the draft heads' logprobs at the place of each draft, after a state and the token chosen from it."""
        lines = []
        for place, token in enumerate([last, *drafts][: len(drafts)]):
            name = f"heads.{place}."
            embedded = self._norm(name + "token_norm", self._arrays["embedding.weight"][token])
            joined = self._linear(name + "join", np.concatenate([self._norm(name + "state_norm", state), embedded]))
            state = joined + self._mixed(name, joined)
            lines.append(self.logprobs(self._norm(name + "norm", state)))
        return np.array(lines)

    def _mixed(self, name: str, x: Array) -> Array:
        inner = self._linear(name + "expand", self._norm(name + "mixing_norm", x))
        return self._linear(name + "contract", inner * (1 + _erf(inner / math.sqrt(2))) / 2)

    def _linear(self, name: str, x: Array) -> Array:
        found: Array = x @ self._arrays[name + ".weight"] + self._arrays[name + ".bias"]
        return found

    def _norm(self, name: str, x: Array) -> Array:
        centred = x - x.mean(axis=-1, keepdims=True)
        scale = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5)
        found: Array = centred / scale * self._arrays[name + ".weight"] + self._arrays[name + ".bias"]
        return found


def _erf(x: Array) -> Array:
    import paddle  # numpy has none, and Python's takes a number at a time

    found: Array = paddle.to_tensor(x).erf().numpy()
    return found


def tokens_of(prompt: Any) -> list[int]:  # noqa: ANN401 - a request's
    if prompt.WhichOneof("prompt") == "tokens":
        return list(prompt.tokens.token_ids)
    return [256, *prompt.text.text.encode()]
